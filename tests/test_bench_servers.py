"""The benchmark of servers: what it sends, what it measures, and that failures and other texts are told as such."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from outrider.bench.client import Answer, Asking, Client, Failure, Server, UrlError
from outrider.bench.counters import Counters
from outrider.bench.loads import Load, arrivals, blocks
from outrider.bench.prompts import Prompt
from outrider.bench.race import Plan, Taken, race
from outrider.bench.servers import summarise_servers
from outrider.bench.slo import Slo, SloError
from outrider.bench.tables import tables
from outrider.bench.verdict import verdict
from stub_server import Clock, Stub, words

CHAT = [Prompt(n, [{"role": "user", "content": text}], kind) for n, text, kind in [(1, "a", "x"), (2, "b", "y")]]


def run(
    answers: dict[str, Callable[[dict[str, Any]], Any]],
    *,
    loads: tuple[Load, ...] = (Load("closed", 1),),
    prompts: list[Prompt] = CHAT,
    metrics: dict[str, list[str]] | None = None,
    servers: list[Server] | None = None,
    **plan: Any,
) -> tuple[Stub, list[Taken]]:
    """A race of the named stub servers, on a clock that the answers move."""
    clock = Clock()
    stub = Stub(clock, answers, metrics or {})
    chosen = servers or [Server.at(name, f"http://{name}") for name in answers]
    given = Plan(**{"prompts": prompts, "loads": loads, "asking": Asking(max_tokens=8, seed=3), "warm_up": 0, **plan})
    return stub, asyncio.run(race(chosen, given, clock=clock, sleep=clock.sleep, transport=stub))


def asked(stub: Stub) -> list[tuple[str, Any]]:
    return [(host, body["messages"][0]["content"]) for host, _, body in stub.asked]


def test_times_are_those_of_the_chunks() -> None:
    """First chunk after 0.2 s, three more 0.1 s apart: TTFT 200 ms, TPOT and ITL 100 ms, whole 500 ms; 4 tokens."""
    _, taken = run({"a": lambda body: words("one two three four")})
    (entry,) = summarise_servers(taken, CHAT, baseline="a")
    assert entry["ttft_ms"]["p50"] == pytest.approx(200)
    assert entry["tpot_ms"]["p50"] == pytest.approx(100)
    assert entry["itl_ms"]["p99"] == pytest.approx(100)
    assert entry["e2e_ms"]["p95"] == pytest.approx(500)
    assert (entry["requests"], entry["completed"], entry["failed"], entry["tokens"]) == (2, 2, 0, 8)
    assert entry["tokens_per_second"] == pytest.approx(8)
    assert entry["requests_per_second"] == pytest.approx(2)
    json.dumps(entry, allow_nan=False)


def test_a_request_says_what_is_asked_and_to_whom() -> None:
    """Chats and raw text have their own routes; key and extra fields go to their server alone."""
    raw = [Prompt(1, "raw")]
    servers = [
        Server.at("a", "http://a/v1/", key="secret", body={"speculation": {"enabled": False}}),
        Server.at("b", "http://b"),
    ]
    answers = {"a": lambda body: words("x"), "b": lambda body: words("x")}
    stub, taken = run(answers, servers=servers, prompts=[CHAT[0]])
    (_, path, body), (_, _, other) = stub.asked
    assert path == "/v1/chat/completions"
    assert body["model"] == "model-of-a"
    assert (body["max_tokens"], body["temperature"], body["seed"], body["stream"]) == (8, 0.0, 3, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["speculation"] == {"enabled": False}
    assert "speculation" not in other
    assert [headers.get("authorization") for headers in stub.headers] == ["Bearer secret", None]
    assert "secret" not in repr(taken)
    completion = [(0.1, {"choices": [{"text": "t", "finish_reason": "stop"}]})]
    stub, taken = run({"a": lambda body: completion}, prompts=raw)
    assert stub.asked[0][1] == "/v1/completions"
    assert stub.asked[0][2]["prompt"] == "raw"
    (entry,) = summarise_servers(taken, raw, baseline="a")
    assert (entry["tokens"], entry["tokens_counted"]) == (1, False)  # no usage: chunks were counted


def test_servers_take_turns_and_another_begins_each_time() -> None:
    same = {"a": lambda body: words("x"), "b": lambda body: words("x")}
    stub, _ = run(same, prompts=CHAT, requests=3)
    assert asked(stub) == [("a", "a"), ("b", "a"), ("b", "b"), ("a", "b"), ("a", "a"), ("b", "a")]
    stub, _ = run(same, loads=(Load("closed", 2),), requests=2, repeat=2)  # a block each, and turned round
    assert [host for host, _ in asked(stub)] == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_warm_up_does_not_count() -> None:
    stub, taken = run({"a": lambda body: words("x")}, warm_up=2)
    assert len(stub.asked) == 4
    assert len(taken[0].samples) == 2
    assert not {content for _, content in asked(stub)[:2]} & {"a", "b"}


FAILING: dict[str, tuple[Any, str]] = {
    "overloaded": (httpx2.Response(429, json={"error": {"message": "queue\nfull"}}), "HTTP 429: queue full"),
    "not found": (httpx2.Response(404, json={"detail": "Not Found"}), "HTTP 404: {'detail': 'Not Found'}"),
    "html": (httpx2.Response(502, text="<h1>Bad"), "HTTP 502: <h1>Bad"),
    "no connection": (httpx2.ConnectError("refused"), "no connection"),
    "silence": (httpx2.ReadTimeout("slow"), "timed out: nothing came for 5 s"),
    "broken": ([*words("x y")[:2], (0.0, httpx2.ReadError("gone"))], "the connection broke off"),
    "no end": (words("x y")[:3], "the stream broke off before its end"),
    "cut": (
        [(0.1, {"choices": [{"delta": {"content": "x"}, "finish_reason": "abort"}]})],
        "the server cut the text (abort)",
    ),
    "error event": ([(0.1, {"error": {"message": "out of memory"}})], "error in the stream: out of memory"),
    "no JSON": ([(0.1, "{")], "an answer that is not OpenAI's"),
    "a list": ([(0.1, [1])], "an answer that is not OpenAI's (an event that is no object)"),
    "odd": ([(0.1, {"choices": 3})], "an answer that is not OpenAI's"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_failure_is_counted_with_its_reason(kind: str) -> None:
    """One of two requests fails: speeds are of the other one, and the failure is not good under any objective."""
    answer, reason = FAILING[kind]
    _, taken = run({"a": lambda body: answer if body["messages"][0]["content"] == "a" else words("x y")}, timeout=5.0)
    (entry,) = summarise_servers(taken, CHAT, baseline="a", slo=Slo.parse("e2e=10s"))
    assert (entry["requests"], entry["completed"], entry["failed"]) == (2, 1, 1)
    ((told, count),) = entry["failures"].items()
    assert told.startswith(reason)
    assert count == 1
    assert entry["tokens"] == 2
    assert entry["goodput"]["share"] == 0.5


def test_goodput_counts_what_meets_every_limit() -> None:
    """TTFT 200 ms and TPOT 100 ms meet the objective; TTFT 400 ms does not; nor does a TPOT of 300 ms."""
    slow = {"a": words("x y"), "b": words("x y", ttft=0.4), "c": words("x y", gap=0.3), "d": words("x")}
    chosen = [Prompt(n, [{"role": "user", "content": text}]) for n, text in enumerate(slow, start=1)]
    _, taken = run({"s": lambda body: slow[body["messages"][0]["content"]]}, prompts=chosen)
    (entry,) = summarise_servers(taken, chosen, baseline="s", slo=Slo.parse("ttft=250ms, tpot=0.15s"))
    assert entry["goodput"] == {
        "slo": {"ttft": 250.0, "tpot": 150.0},
        "good": 2,
        "share": 0.5,
        "requests_per_second": pytest.approx(2 / 1.5),
    }


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "itl=5ms", "ttft=-5ms", "ttft=1ms,ttft=2ms", ""])
def test_an_objective_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(SloError, match="--slo"):
        Slo.parse(text)


def test_texts_are_compared_with_the_baselines_and_with_the_servers_own() -> None:
    """b writes another text to the second prompt, and c another one each time it is asked."""
    times = iter(range(100))

    def changing(body: dict[str, Any]) -> Any:
        return words(f"same {next(times)}")

    answers = {
        "a": lambda body: words("the whole truth"),
        "b": lambda body: words("the whole lie" if body["messages"][0]["content"] == "b" else "the whole truth"),
        "c": changing,
    }
    _, taken = run(answers, repeat=2)
    runs = {entry["server"]: entry for entry in summarise_servers(taken, CHAT, baseline="a")}
    assert (runs["a"]["compared"], runs["a"]["identical"], runs["a"]["unstable"]) == (2, 2, [])
    assert (runs["b"]["compared"], runs["b"]["identical"], runs["b"]["unstable"]) == (2, 1, [])
    (found,) = runs["b"]["differences"]
    assert (found["line"], found["position"]) == (2, len("the whole "))
    assert (found["plain"], found["drafted"]) == ("the whole truth ", "the whole lie ")
    assert runs["c"]["identical"] == 0
    assert runs["c"]["unstable"] == [1, 2]


def test_speed_up_is_of_all_tokens_in_a_closed_loop_and_of_a_requests_in_an_open_one() -> None:
    """0.4 s against 0.3 s for 3 tokens: 4/3 with one user, and 4/3 where requests arrive once in a long while.

    There, tokens per second are those that were asked for, so nearly equal.
    """
    answers = {"plain": lambda body: words("x y z"), "fast": lambda body: words("x y z", gap=0.05)}
    for load in (Load("closed", 1), Load("open", 0.01)):
        _, taken = run(answers, loads=(load,))
        runs = {entry["server"]: entry for entry in summarise_servers(taken, CHAT, baseline="plain")}
        assert runs["fast"]["speedup"] == pytest.approx(4 / 3)
        assert runs["plain"]["speedup"] == pytest.approx(1.0)
        assert runs["fast"]["by_category"]["x"]["speedup"] == pytest.approx(4 / 3)
    assert runs["fast"]["tokens_per_second"] / runs["plain"]["tokens_per_second"] < 1.1


def test_acceptance_comes_from_the_answers() -> None:
    told = {
        "mean_acceptance_length": 2.0,
        "acceptance_histogram": [1, 2, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
    }
    _, taken = run({"a": lambda body: words("x y", metrics={"speculative_decoding": told})})
    (entry,) = summarise_servers(taken, CHAT, baseline="a")
    assert entry["acceptance"] == {
        "source": "the answers",
        "mean_acceptance_length": 2.0,
        "acceptance_rate": 0.4,
        "acceptance_by_position": [0.75, 0.25],
    }
    _, taken = run({"a": lambda body: words("x y", timings={"draft_n": 8, "draft_n_accepted": 6})})  # llama.cpp
    (entry,) = summarise_servers(taken, CHAT, baseline="a")
    assert entry["acceptance"]["acceptance_rate"] == 0.75


def page(drafts: int, drafted: int, accepted: int, *places: int) -> str:
    lines = [
        "# TYPE vllm:spec_decode_num_drafts counter",
        f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}',
        f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}',
        f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}',
        *(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{i}"}} {count}'
            for i, count in enumerate(places)
        ),
        'outrider_memory_bytes{purpose="target weights"} 1000',
    ]
    return "\n".join(lines) + "\n"


def test_acceptance_else_comes_from_the_servers_counters() -> None:
    """What they grew by: 10 drafts, 30 guesses, 12 accepted, of which 8 at the first place and 4 at the second."""
    pages = [page(100, 200, 150, 100, 50), page(110, 230, 162, 108, 54)]
    _, taken = run({"a": lambda body: words("x y")}, metrics={"a": pages})
    (entry,) = summarise_servers(taken, CHAT, baseline="a")
    assert entry["acceptance"] == {
        "source": "the server's counters",
        "mean_acceptance_length": pytest.approx(2.2),
        "acceptance_rate": pytest.approx(0.4),
        "acceptance_by_position": [0.8, 0.4],
    }
    assert entry["memory_bytes"] == {"target weights": 1000.0}


def test_counters_of_one_server_under_two_names_are_nobodys() -> None:
    """Plain and drafted requests to one server: what its counters grew by is of both, so neither is told."""
    servers = [Server.at("plain", "http://a"), Server.at("drafted", "http://a")]
    pages = [page(0, 0, 0), page(9, 9, 9)] * 2
    _, taken = run({"a": lambda body: words("x y")}, servers=servers, metrics={"a": pages})
    assert [entry["acceptance"] for entry in summarise_servers(taken, CHAT, baseline="plain")] == [None, None]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>no metrics here",
        "up 1\n",
        "vllm:spec_decode_num_drafts_total x\n",
        "vllm:spec_decode_num_drafts_total NaN\n",
        "vllm:spec_decode_num_drafts_total +Inf\n",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="999999999999"} 3.0\n',  # a list so long
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="-1"} 3.0\n',
    ],
)
def test_a_page_without_the_counters_is_none(text: str) -> None:
    assert Counters.read(text) is None


def test_arrivals_are_those_of_the_seed_and_of_the_rate() -> None:
    times = arrivals(4.0, 2001, seed=1)
    assert times == arrivals(4.0, 2001, seed=1) != arrivals(4.0, 2001, seed=2)
    assert times[0] == 0.0
    assert list(times) == sorted(times)
    assert times[-1] / 2000 == pytest.approx(1 / 4.0, rel=0.1)


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """The clock stands still for the server, and the client is late by 5 s: the wait is part of TTFT, and is told."""
    clock = Clock()
    stub = Stub(clock, {"a": lambda body: words("x y", ttft=0.0, gap=0.0)})
    plan = Plan(prompts=CHAT, loads=[Load("open", 2.0)], asking=Asking(max_tokens=8), requests=2, warm_up=0)

    async def oversleep(seconds: float) -> None:
        await clock.sleep(seconds + 5.0)

    (taken,) = asyncio.run(race([Server.at("a", "http://a")], plan, clock=clock, sleep=oversleep, transport=stub))
    assert taken.samples[1].late == pytest.approx(5.0)
    (entry,) = summarise_servers([taken], CHAT, baseline="a")
    assert entry["ttft_ms"]["p99"] == entry["late_ms"]["p99"]
    assert entry["late_ms"]["p99"] == pytest.approx(4950, rel=0.01)


def test_a_closed_loop_of_many_has_no_more_than_its_users() -> None:
    """Of 6 requests never more than 3 are open at once, and there are 3."""
    open_now, most = 0, 0

    class Counting(Stub):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            nonlocal open_now, most
            if request.method == "POST":
                open_now += 1
                most = max(most, open_now)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                open_now -= 1
            return await super().handle_async_request(request)

    clock = Clock()
    plan = Plan(prompts=CHAT, loads=[Load("closed", 3)], asking=Asking(max_tokens=8), requests=6, warm_up=0)
    stub = Counting(clock, {"a": lambda body: words("x")})
    (taken,) = asyncio.run(race([Server.at("a", "http://a")], plan, clock=clock, transport=stub))
    assert len(taken.samples) == 6
    assert most == 3


def test_a_run_has_every_prompt_once_and_four_requests_per_user() -> None:
    assert Load("closed", 1).requests(10) == 10
    assert Load("closed", 16).requests(10) == 64
    assert Load("open", 100.0).requests(10) == 10
    assert [block.prompts for block in blocks(Load("closed", 1), 2, 3, 0)] == [(0,), (1,), (0,)]
    assert [block.prompts for block in blocks(Load("closed", 2), 2, 3, 0)] == [(0, 1, 0)]


@pytest.mark.parametrize(
    "url", ["ftp://x", "localhost:8000", "http://", "http://x:port", "http://me:pw@x", "http://x/?a=1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UrlError, match="--url"):
        Server.at("a", url)


def test_a_server_that_does_not_answer_is_refused_by_name() -> None:
    def nobody(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    async def find() -> None:
        server = Server.at("a", "http://a")
        async with Client(server, timeout=5, limit=60, clock=Clock(), transport=httpx2.MockTransport(nobody)) as client:
            assert await client.find_model("named") == "named"
            assert await client.metrics() is None
            assert isinstance(await client.ask(Asking(max_tokens=1), "x", 0.0), Failure)
            with pytest.raises(UrlError, match=r"a: http://a/v1/models told no model \(no connection\)"):
                await client.find_model()

    asyncio.run(find())


class Drip(httpx2.AsyncByteStream):
    """A sign of life now and then, and never an end."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b": still here\n\n"
            await asyncio.sleep(0)


def test_a_server_that_only_drips_is_given_up() -> None:
    """No silence is as long as the timeout, and yet the run goes on: the answer, its metrics and its models."""

    async def ask() -> Answer | Failure:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, stream=Drip()))
        async with Client(Server.at("a", "http://a"), timeout=60, limit=0.05, clock=Clock(), transport=transport) as c:
            assert await c.metrics() is None
            with pytest.raises(UrlError, match="timed out"):
                await c.find_model()
            return await c.ask(Asking(max_tokens=1), "x", 0.0)

    assert asyncio.run(ask()) == Failure("not done after 0.05 s")


def test_one_server_alone_has_no_speedup() -> None:
    """Nothing decoded plainly: no figure pretends so, in the run, by category, in the words and in the tables."""
    _, taken = run({"a": lambda body: words("one two")})
    (entry,) = runs = summarise_servers(taken, CHAT, baseline="a")
    assert (entry["speedup"], entry["speedup_by_repeat"], entry["speedup_interval"]) == (None, [], None)
    assert {category["speedup"] for category in entry["by_category"].values()} == {None}
    report = {"kind": "server", "runs": runs, "prompts": {"count": 2}}
    assert "Without a plain run there is no speed-up" in verdict(report)
    shown = {table.title: table for table in tables(report)}
    assert shown["speed"].rows[0][4] == "-"
    assert shown["texts"].rows[0][1:4] == ["-", "-", "-"]
    assert "speed-up by category" not in shown


WHOLE = 'data: {"choices": [{"text": "ab", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'


def answered(content: bytes, status: int = 200) -> Answer | Failure:
    """What the client makes of an answer's bytes."""

    async def ask() -> Answer | Failure:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(status, content=content))
        async with Client(
            Server.at("a", "http://a"), timeout=20, limit=60, clock=Clock(), transport=transport
        ) as client:
            return await client.ask(Asking(max_tokens=2), "x", 0.0)

    return asyncio.run(ask())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_event_ends_where_the_standard_says_and_nowhere_else(end: str) -> None:
    """CR, LF or both; the characters that Python ends lines at too are text, which JSON need not escape."""
    text = "a\u2028b\u2029c\x85d"
    lines = (f": hello{end}event: x{end}{WHOLE.replace('ab', text)}{end}{end}data: [DONE]{end}").encode()
    for begin in (b"", b"\xef\xbb\xbf"):
        found = answered(begin + lines)
        assert isinstance(found, Answer)
        assert (found.text, found.tokens, found.counted) == (text, 2, True)


def test_halves_of_a_character_in_two_chunks_are_one_and_a_lone_half_is_replaced() -> None:
    """The text is written into reports: it has to be Unicode."""
    half = 'data: {"choices": [{"text": "\\ud83d"}]}\n\n'
    found = answered((half + WHOLE.replace("ab", "\\ude00 \\ud83d") + "\n\n").encode())
    assert isinstance(found, Answer)
    assert found.text == "\U0001f600 \ufffd"


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": -5}}',
        '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 1e999}}',
        '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": NaN}}',
        '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": "many"}}',
        '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": %s}}' % ("9" * 400),
        '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": [1]}}',
        '{"choices": [{"finish_reason": "stop"}], "metrics": {"speculative_decoding": {"num_draft_tokens": "x"}}}',
        '{"choices": [{"finish_reason": "stop"}], "metrics": {"speculative_decoding": {"acceptance_histogram": 5}}}',
        '{"choices": [{"finish_reason": "stop"}], "timings": {"draft_n": null, "draft_n_accepted": -1}}',
        '{"choices": 5}',
        '{"choices": [null]}',
        "[" * 200_000,
        '"\\ud800',
    ],
)  # fmt: skip
def test_an_answer_of_any_shape_is_a_failure_and_ends_nothing(event: str) -> None:
    found = answered(f"data: {event}\n\n".encode())
    assert isinstance(found, Failure)
    assert found.reason.startswith("an answer that is not OpenAI's")
    found.reason.encode()


def test_an_error_of_any_shape_is_told_by_its_beginning() -> None:
    found = answered(b"[" * 200_000, status=500)
    assert found == Failure(f"HTTP 500: {'[' * 160}")
