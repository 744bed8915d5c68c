"""A request's way through the upstreams: what passes, what is asked again, and what ends with an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from outrider.core.params import SamplingParams
from outrider.engine.speculation import Speculation
from outrider.scale.fleet import Fleet
from outrider.scale.passage import Passage
from outrider.scale.router import Ask
from outrider.server.engine_thread import NeverBegunError, Work
from outrider.server.errors import ApiError
from upstreams import DONE, MODEL, Part, Server, ask, chunk, event, fleet_of, run, text, usage, whole


def passage(fleet: Fleet, asked: Ask | None = None) -> Passage:
    asked = asked or ask()
    works = [Work((), SamplingParams(max_tokens=8), Speculation())] * asked.texts
    made = Passage(asked, works, fleet, name=MODEL, headers={"X-Request-Id": "id"})
    fleet.passages.add(made)
    return made


def told(pieces: list[bytes]) -> list[Any]:
    """The objects of a stream's events."""
    events = b"".join(pieces).decode().split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def words(pieces: list[bytes]) -> str:
    return "".join(choice["text"] for chunk in told(pieces) for choice in chunk["choices"])


async def read(made: Passage) -> list[bytes]:
    return [piece async for piece in made.stream()]


def test_a_token_passes_before_the_next_one_is_written() -> None:
    """Nothing waits for the rest of a text, and nothing of it changes but the model's name and unwanted usage."""

    async def test() -> None:
        gate = asyncio.Event()
        said = 'it says "model":"theirs","usage":null'
        parts: list[Part] = [chunk("one", usage=None), gate, chunk(said, usage=None), *text("last")]
        fleet = fleet_of(a=Server([parts]))
        await fleet.check()
        made = passage(fleet)
        stream = made.stream()
        first = await anext(stream)
        assert not gate.is_set()
        assert told([first]) == [{"id": "cmpl-1", "model": MODEL, "choices": told([chunk("one")])[0]["choices"]}]
        gate.set()
        rest = told([piece async for piece in stream])
        assert [c["choices"][0]["text"] for c in rest] == [said, "last"]  # no usage: nobody asked for it
        assert all("usage" not in c and c["model"] == MODEL for c in rest)
        assert made.results[0] is not None
        assert made.results[0].usage.completion_tokens == 1  # as the upstream says
        assert made.prompt_tokens == 3
        assert fleet.upstreams[0].outstanding == 0

    run(test)


def test_what_is_cut_anywhere_passes_whole() -> None:
    """Events that arrive in pieces, with other line ends and comments, are the same events."""

    async def test() -> None:
        sent = b": hello\n\n" + b"".join(part for part in text("a", "b", "c") if isinstance(part, bytes))
        sent = sent.replace(b"\n", b"\r\n")
        for size in (1, 7, 64):
            fleet = fleet_of(a=Server([[sent[i : i + size] for i in range(0, len(sent), size)]]))
            await fleet.check()
            assert words(await read(passage(fleet))) == "abc"

    run(test)


BROKEN: dict[str, list[Part] | httpx2.Response | Exception] = {
    "500": httpx2.Response(500, json={"error": {"message": "boom"}}),
    "429": httpx2.Response(429, json={"error": {"message": "full"}}),
    "refused": httpx2.ConnectError("refused"),
    "died before the headers": httpx2.RemoteProtocolError("gone"),
    "no stream": httpx2.Response(200, text="<html>hello</html>", headers={"content-type": "text/html"}),
    "no JSON": [b"data: {{{\n\n"],
    "no event": [b"hello\n\n"],
    "another shape": [event({"choices": 7})],
    "text of nobody": [chunk("x", index=5)],
    "an error for an event": [event({"error": {"message": "boom", "code": 500}})],
    "died behind the role": [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
                             httpx2.ReadError("reset")],
    "ended before the first token": [],
    "nothing but the end": [DONE],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_another_upstream_writes_what_the_first_could_not_begin(name: str) -> None:
    """The client sees the second one's answer alone."""

    async def test() -> None:
        servers = {"a": Server([BROKEN[name]]), "b": Server([text("x", "y")])}
        fleet = fleet_of(**servers)
        await fleet.check()
        made = passage(fleet)
        assert words(await read(made)) == "xy"
        assert len(told(await read(passage(fleet)))) >= 2
        assert made.retries == len(servers["a"].asked) >= 1
        assert made.origin["upstream"] == "b"
        assert fleet.upstreams[0].answers["failed"] == made.retries
        assert fleet.upstreams[0].outstanding == fleet.upstreams[1].outstanding == 0

    run(test)


@pytest.mark.parametrize("name", BROKEN)
def test_where_all_fail_the_answer_is_a_proper_error(name: str) -> None:
    """No more tries than two at each, and the last reason is told."""

    async def test() -> None:
        servers = {"a": Server([BROKEN[name]]), "b": Server([BROKEN[name]])}
        fleet = fleet_of(**servers)
        await fleet.check()
        with pytest.raises(ApiError) as caught:
            await read(passage(fleet))
        assert caught.value.status in ((429,) if name == "429" else (502, 503))
        assert 2 <= sum(len(server.asked) for server in servers.values()) <= 4

    run(test)


def test_an_upstream_that_dies_behind_a_token_ends_the_answer_with_an_error() -> None:
    """The part that came stands, the error says so, and nobody writes it anew."""

    async def test() -> None:
        servers = {"a": Server([[chunk("one"), chunk("two"), httpx2.ReadError("reset")]]), "b": Server([text("x")])}
        fleet = fleet_of(**servers)
        await fleet.check()
        made = passage(fleet)
        stream = made.stream()
        pieces = [await anext(stream), await anext(stream)]
        with pytest.raises(ApiError, match="failed after 2 pieces, and nothing more comes") as caught:
            await anext(stream)
        made.close()
        assert words(pieces) == "onetwo"
        assert (caught.value.status, caught.value.code) == (502, "upstream_failed")
        assert not servers["b"].asked
        assert made.failed
        assert fleet.broken == 1
        assert made.results[0] is not None
        assert made.results[0].finish_reason == "cancelled"

    run(test)


def test_a_stream_that_ends_without_a_finish_reason_is_an_error() -> None:
    """[DONE] alone does not make a text whole."""

    async def test() -> None:
        fleet = fleet_of(a=Server([[chunk("one"), DONE]]))
        await fleet.check()
        with pytest.raises(ApiError, match="without a finish reason"):
            await read(passage(fleet))

    run(test)


def test_what_an_upstream_refuses_is_the_clients_to_mend() -> None:
    """A 400 keeps its message and parameter, and nobody else is asked."""

    async def test() -> None:
        refusal = httpx2.Response(400, json={"error": {"message": "too long", "param": "prompt", "code": 400}})
        servers = {"a": Server([refusal]), "b": Server([text("x")])}
        fleet = fleet_of(**servers)
        await fleet.check()
        for make in (read, lambda made: made.whole()):
            with pytest.raises(ApiError, match="too long") as caught:
                await make(passage(fleet))
            assert (caught.value.status, caught.value.parameter) == (400, "prompt")
        assert fleet.retries == 0

    run(test)


def test_a_dead_upstream_is_ejected_and_comes_back() -> None:
    """The request that finds it dead goes on elsewhere; once it answers again, it is asked again."""

    async def test() -> None:
        servers = {"a": Server([httpx2.ConnectError("refused")]), "b": Server([whole("x")])}
        fleet = fleet_of(**servers)
        await fleet.check()
        servers["a"].health = httpx2.ConnectError("refused")
        one, other = fleet.upstreams
        assert (await passage(fleet, ask(stream=False)).whole())["choices"][0]["text"] == "x"
        assert (one.state, other.state, one.ejections) == ("down", "up", 1)
        assert len(servers["a"].asked) == 1
        await passage(fleet, ask(stream=False)).whole()
        assert len(servers["a"].asked) == 1  # not asked while it is down
        servers["a"].health, servers["a"].answers = 200, [whole("y")]
        await fleet.check()
        written = [await passage(fleet, ask(f"{i}", stream=False)).whole() for i in "12"]
        assert {answer["choices"][0]["text"] for answer in written} == {"x", "y"}

    run(test)


def test_another_model_at_the_same_address_is_noticed() -> None:
    """It may have been started anew between two health checks; whoever keeps the ledger is told."""

    async def test() -> None:
        server = Server([whole("x")])
        fleet = fleet_of(a=server)
        seen: list[str] = []
        fleet.changed = lambda upstream: seen.append(str(upstream.about and upstream.about.root))
        await fleet.check()
        server.card = {**server.card, "root": "another", "created": 1}
        for _ in range(30):
            await fleet.check()
        assert seen == ["theirs", "another"]

    run(test)


def test_an_upstream_that_hangs_loses_its_requests_to_another() -> None:
    """Its connection stays open and says nothing: three health checks without an answer end the wait."""

    async def test() -> None:
        never = asyncio.Event()
        servers = {"a": Server([[never]]), "b": Server([text("x")])}
        fleet = fleet_of(**servers)
        await fleet.check()
        waiting = asyncio.create_task(read(passage(fleet)))
        while not servers["a"].asked:
            await asyncio.sleep(0)
        servers["a"].health = httpx2.ReadTimeout("slow")
        for state in ("up", "up", "down"):
            await fleet.upstreams[0].check()
            assert fleet.upstreams[0].state == state
        assert words(await waiting) == "x"
        assert servers["a"].closed == 1

    run(test)


def test_an_upstream_that_drains_gets_nothing_new_and_keeps_what_it_has() -> None:
    """503 at its health check is no failure."""

    async def test() -> None:
        gate = asyncio.Event()
        servers = {"a": Server([[chunk("one"), gate, *text("two")]]), "b": Server([text("x")])}
        fleet = fleet_of(**servers)
        await fleet.check()
        stream = passage(fleet).stream()
        first = await anext(stream)
        servers["a"].health = 503
        await fleet.check()
        assert fleet.upstreams[0].state == "draining"
        assert words(await read(passage(fleet))) == "x"
        gate.set()
        assert words([first, *[piece async for piece in stream]]) == "onetwo"

    run(test)


def test_a_text_that_is_cut_gets_a_last_chunk_and_one_that_had_not_begun_none() -> None:
    """As natively: the reason is `abort`; without a token there is no text to end."""

    async def test() -> None:
        never = asyncio.Event()
        server = Server([[chunk("one"), never]])
        fleet = fleet_of(a=server)
        await fleet.check()
        made = passage(fleet)
        stream = made.stream()
        pieces = [await anext(stream)]
        rest = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        made.cut()
        pieces.append(await rest)
        assert [chunk["choices"][0]["finish_reason"] for chunk in told(pieces)] == [None, "abort"]
        assert [piece async for piece in stream] == []
        assert server.closed == 1
        server.answers = [[never]]
        made = passage(fleet)
        reading = asyncio.create_task(read(made))
        while len(server.asked) < 2:
            await asyncio.sleep(0)
        made.cut()
        with pytest.raises(NeverBegunError):
            await reading

    run(test)


def test_a_reader_that_leaves_ends_the_upstreams_work() -> None:
    """Its stream is closed, which an upstream takes for the client's going."""

    async def test() -> None:
        server = Server([[chunk("one"), asyncio.Event()]])
        fleet = fleet_of(a=server)
        await fleet.check()
        stream = passage(fleet).stream()
        await anext(stream)
        assert fleet.upstreams[0].loads == 1
        await stream.aclose()
        assert (server.closed, fleet.upstreams[0].loads, fleet.upstreams[0].outstanding) == (1, 0, 0)

    run(test)


def test_what_speculation_did_is_read_from_the_last_chunk() -> None:
    """Drafts are counted from the histogram, so that the ledger has the same figures as natively."""

    async def test() -> None:
        told = {"num_spec_steps": 3, "num_draft_tokens": 12, "num_accepted_draft_tokens": 3,
                "acceptance_histogram": [1, 1, 1], "num_spec_tokens": 4}  # fmt: skip
        parts = [chunk("a"), chunk("b", end="stop"), usage(6, metrics={"speculative_decoding": told}), DONE]
        fleet = fleet_of(a=Server([parts]))
        await fleet.check()
        made = passage(fleet)
        await read(made)
        (result,) = made.results
        assert result is not None
        assert [step.accepted for step in result.steps] == [0, 1, 2]
        assert sum(step.drafted for step in result.steps) == 12
        assert (result.finish_reason, result.usage.completion_tokens) == ("stop", 6)

    run(test)
