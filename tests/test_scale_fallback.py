"""Which upstream, and which pool: routing by load and beginnings, the rule of the fallback, and what servers count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.engine.transitions import Transition, Transitions
from outrider.scale.counters import Counters, Guesses
from outrider.scale.fallback import Fallback, Measured
from outrider.scale.router import Router, prefixes_of
from outrider.scale.upstream import Pool, Upstream
from upstreams import Server, ask, fleet_of, run

LOAD = 8
PLAIN = 0.010  # seconds per token


class Traffic:
    """Closed loops of users: as many requests as `load` are open at any time, all of the same length."""

    def __init__(self, *, load: int = LOAD, streamed: bool = True) -> None:
        self.transitions = Transitions(clock=lambda: 0.0)
        self.told: list[Transition] = []
        self.transitions.watch(self.told.append)
        self.up: set[Pool] = {"speculative", "plain"}
        self.fallback = Fallback(self.transitions, self.up.__contains__)
        self.fallback.begin("speculative")
        self.load, self.streamed = load, streamed
        self.open: list[Pool] = []

    def run(self, requests: int, speedup: float, gain: float | None = 0.5) -> list[Pool]:
        """Where so many requests went; a speculative one is `speedup` times as fast as a plain one."""
        went = []
        for _ in range(requests):
            went.append(self.fallback.pool(self.load))
            self.open.append(went[-1])
            if len(self.open) < self.load:
                continue
            pool = self.open.pop(0)
            seconds = 64 * PLAIN / (speedup if pool == "speculative" else 1.0)
            self.fallback.saw(
                Measured(pool, self.load, 64, seconds, self.streamed, gain if pool == "speculative" else None)
            )
        return went


@pytest.mark.parametrize("load", [1, 8])
@pytest.mark.parametrize("gain", [0.5, None])
def test_a_pool_that_loses_is_left_and_taken_up_again_when_it_pays(load: int, gain: float | None) -> None:
    """One change for each change of the traffic, with the figures that it rests on, and no more."""
    traffic = Traffic(load=load)
    first = traffic.run(100 * load, 1.5, gain)
    assert not traffic.told
    assert 0 < first.count("plain") < 0.1 * len(first)  # the live baseline
    went = traffic.run(1200 * load, 0.9, gain)
    (change,) = traffic.told
    assert (change.before, change.after, change.reason) == ("speculative", "plain", "does not pay")
    assert change.speedup == pytest.approx(0.9, abs=0.05)
    assert change.plain_tokens_per_second == pytest.approx(load / PLAIN, rel=0.05)
    settled = went[100 * load :]
    assert 0 < settled.count("speculative") < 0.1 * len(settled)  # trials
    went = traffic.run(2000 * load, 1.5, gain)
    assert [c.after for c in traffic.told] == ["plain", "speculative"]
    assert traffic.told[-1].reason == "pays again"
    assert went[-20 * load :].count("speculative") > 15 * load


def test_luck_moves_nothing() -> None:
    """A pool that gains a little on average, with requests that take between half and one and a half of it."""
    traffic = Traffic()
    for round in range(300):
        traffic.run(LOAD, 1.1 * (0.7, 1.0, 1.5)[round % 3])
    assert not traffic.told


def test_with_one_pool_there_is_nothing_to_choose() -> None:
    """Whatever is measured."""
    traffic = Traffic()
    traffic.up.discard("plain")
    assert set(traffic.run(400, 0.5)) == {"speculative"}
    assert not traffic.told


def test_where_the_speculative_pool_is_gone_the_plain_one_writes() -> None:
    """It is told as a change with its reason, and comes to an end when the pool is back."""
    traffic = Traffic()
    traffic.up.discard("speculative")
    assert set(traffic.run(20, 1.5)) == {"plain"}
    assert [c.reason for c in traffic.told] == ["drafter failed"]
    traffic.up.add("speculative")
    assert "speculative" in traffic.run(20, 1.5)
    assert [c.after for c in traffic.told] == ["plain", "speculative"]


def test_requests_of_another_load_are_no_comparison() -> None:
    """A lone plain request is faster than eight at once: that says nothing against speculation among eight."""
    traffic = Traffic()
    traffic.run(200, 1.5)
    for _ in range(100):
        traffic.fallback.saw(Measured("plain", 1.0, 64, 64 * PLAIN / 5, True, None))
    traffic.run(200, 1.5)
    assert not traffic.told


def test_the_speed_up_is_told_from_compared_requests_alone() -> None:
    """Its sums are those of speculative requests for whose load a plain time was known."""
    traffic = Traffic()
    traffic.run(400, 1.5)
    speed = traffic.fallback.speed
    assert 0 < speed.compared_tokens < speed.tokens
    assert speed.plain_seconds / speed.compared_seconds == pytest.approx(1.5, rel=0.01)


# -- routing ----------------------------------------------------------------------------------------------------------


def servers(*outstanding: int) -> Iterator[Upstream]:
    fleet = fleet_of(**{f"s{index}": Server() for index in range(len(outstanding))})
    for upstream, tokens in zip(fleet.upstreams, outstanding, strict=True):
        upstream.outstanding = tokens
        yield upstream


def test_the_one_with_the_least_to_do_writes() -> None:
    """And among equals each in its turn."""

    async def test() -> None:
        router = Router()
        busy, idle = servers(5000, 100)
        assert router.choose(ask("x"), [busy, idle]) is idle
        one, other = servers(0, 0)
        assert {router.choose(ask(f"{i}"), [one, other]) for i in range(2)} == {one, other}

    run(test)


def test_a_conversation_stays_where_its_beginning_was_read() -> None:
    """Unless waiting there costs more than reading it again elsewhere."""

    async def test() -> None:
        router = Router()
        one, other = servers(0, 0)
        turns = [{"role": "user", "content": "x" * 4000}]
        home = router.choose(chat(turns), [one, other])
        away = other if home is one else one
        home.outstanding = 1000
        longer = [*turns, {"role": "assistant", "content": "y"}, {"role": "user", "content": "more"}]
        assert router.choose(chat(longer), [one, other]) is home
        assert router.choose(chat([{"role": "user", "content": "else"}]), [one, other]) is away
        home.outstanding = 50_000
        assert router.choose(chat(longer), [one, other]) is away
        assert router.choose(chat(longer), [home]) is home  # where the other one is gone

    run(test)


def chat(messages: list[dict[str, str]]) -> Any:
    from outrider.scale.router import Ask, weight_of

    body = {"messages": messages, "max_tokens": 8}
    return Ask("/v1/chat/completions", body, 1, weight_of(body, 1, len(str(body))), prefixes_of(body))


def test_beginnings_are_those_of_the_same_prompt_alone() -> None:
    """Whole blocks, whole messages, tools included; token ids as well as text."""
    one = prefixes_of({"prompt": "a" * 600})
    assert one[:2] == prefixes_of({"prompt": "a" * 600 + "b"})[:2]
    assert one[2] != prefixes_of({"prompt": "a" * 600 + "b"})[2]
    assert prefixes_of({"prompt": list(range(300))})[0] == prefixes_of({"prompt": [list(range(600))]})[0]
    hello = [{"role": "user", "content": "hello"}]
    assert prefixes_of({"messages": hello}) != prefixes_of({"messages": hello, "tools": [1]})


# -- counters ----------------------------------------------------------------------------------------------------------

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 21.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="x"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0
"""


def test_vllms_counters_are_read_over_its_engines() -> None:
    """Sums over engines, positions in order, times of creation left out."""
    found = Counters.read(PAGE)
    assert found.guesses == Guesses(15, 60, 21, (13, 8))
    assert found.guesses.mean_acceptance_length == 1 + 21 / 15
    assert (found.running, found.waiting, found.pages, found.free, found.page_size) == (3, 2, 400, 300, 16)
    assert Counters.read("up 1\n") == Counters()


def test_growth_is_since_the_last_reading_or_since_a_restart() -> None:
    before = Guesses(10, 40, 20, (10, 10))
    assert Guesses(12, 50, 23, (12, 10, 1)).since(before) == Guesses(2, 10, 3, (2, 0, 1))
    assert Guesses(2, 8, 1, (1,)).since(before) == Guesses(2, 8, 1, (1,))


def test_what_was_counted_before_the_front_began_is_not_its_own() -> None:
    async def test() -> None:
        server = Server(page=PAGE)
        (upstream,) = fleet_of(a=server).upstreams
        assert await upstream.count() == Guesses()
        server.page = PAGE.replace(" 10.0", " 14.0").replace(" 60.0", " 76.0")
        assert await upstream.count() == Guesses(4, 16, 0, (0, 0))
        server.page = "vllm:spec_decode_num_drafts_total nonsense\n"
        assert await upstream.count() == Guesses()

    run(test)
