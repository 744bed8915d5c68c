"""Several engines behind one door: the replica beside a real `outrider serve`, and the gateway before scripted ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route

from outrider.cli import main
from outrider.cli.options import DraftOptions, EngineOptions, words_of
from outrider.cli.serve import LedgerOptions, ServerOptions
from outrider.scale.gateway import Gateway, conversation_of, merged_metrics
from outrider.scale.replica import Head, Replica, ReplicaError, Request, command_of, ledger_of
from outrider.server.errors import ApiError
from tiny import tiny_model, write_gguf

BODY = {"model": "tiny", "prompt": "abcd abcd", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
JSON = [("Content-Type", "application/json")]
OK = Head(200, [("content-type", "application/json")])
EVENTS = Head(200, [("content-type", "text/event-stream; charset=utf-8")])
GONE = ReplicaError("it was killed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("replica") / "tiny.gguf", tiny_model())


def post(**fields: Any) -> Request:
    return Request("POST", "/v1/completions", JSON, json.dumps({**BODY, **fields}).encode())


async def whole(replica: Replica, request: Request) -> tuple[Head, bytes]:
    head, *parts = [part async for part in replica.answer(request)]
    assert isinstance(head, Head)
    return head, b"".join(part for part in parts if isinstance(part, bytes))


# -- a replica ---------------------------------------------------------------------------------------------------------


def test_a_replica_is_a_server_of_its_own(model: Path, tmp_path: Path) -> None:
    """Its answers are those of `outrider serve`, its ledger is its own, and its end is noticed."""
    options = ["--model", str(model), "--threads=1", f"--ledger={tmp_path / 'audit.db'}"]

    async def try_it() -> None:
        replica = await Replica.start(command_of(options, "r1"))
        try:
            await replica.check()
            head, body = await whole(replica, post())
            assert head.status == 200
            assert dict(head.headers)["content-type"] == "application/json"
            assert json.loads(body)["usage"]["completion_tokens"] == 8
            head, body = await whole(replica, post(stream=True))
            assert body.endswith(b"data: [DONE]\n\n")
            head, body = await whole(replica, post(max_tokens=-1))
            assert (head.status, json.loads(body)["error"]["param"]) == (400, "max_tokens")
            head, _ = await whole(replica, Request("GET", "/health?x=1", [("Connection", "close")], b""))
            assert head.status == 200
        finally:
            await replica.stop()
        assert not replica.alive
        with pytest.raises(ReplicaError, match=r"the replica ended with 0: .*ended"):
            await replica.check()
        with pytest.raises(ReplicaError, match="the replica ended with 0"):
            await whole(replica, post())

    asyncio.run(try_it())
    assert main(["audit", "verify", str(tmp_path / "audit-r1.db")]) == 0


def test_a_replica_that_is_killed_breaks_off_what_it_writes(model: Path) -> None:
    async def try_it() -> None:
        replica = await Replica.start(command_of(["--model", str(model), "--threads=1"], "r1"))
        answer = replica.answer(post(stream=True, max_tokens=400))
        assert isinstance(await anext(answer), Head)
        await anext(answer)
        replica._process.kill()
        await replica._process.wait()
        with pytest.raises(ReplicaError, match="broke off"):
            async for _ in answer:
                pass
        with pytest.raises(ReplicaError, match="ended with -9"):
            await replica.check()
        await replica.stop()

    asyncio.run(try_it())


def test_a_replica_that_cannot_begin_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.gguf")
    with pytest.raises(ReplicaError, match=r"ended with 2 before it served: .*none.gguf does not exist"):
        asyncio.run(Replica.start(command_of(["--model", missing], "r1")))


def test_each_replica_has_its_own_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger_of("/var/audit.db", "a1") == "/var/audit-a1.db"
    start, end = [sys.executable, "-m", "outrider", "serve"], ["--host", "127.0.0.1", "--port", "0", "--log-json"]
    assert command_of(["--ledger", "x.db", "--threads=1"], "r") == [*start, "--ledger", "x-r.db", "--threads=1", *end]
    assert command_of(["--ledger=x.db"], "r") == [*start, "--ledger=x-r.db", *end]


# -- the gateway -------------------------------------------------------------------------------------------------------

Script = Sequence[Head | bytes | Exception]


class Scripted:
    """Replicas that say what they are told; the last script is said again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.asked: list[tuple[Request, str]] = []
        self.closed = 0

    async def ask(self, request: Request, conversation: str) -> AsyncIterator[Head | bytes]:
        self.asked.append((request, conversation))
        try:
            for part in self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1

    async def all(self, request: Request) -> Sequence[tuple[str, bytes]]:
        return [(name, b'# TYPE n counter\nn_total{a="b"} 3.0\n') for name in ("r1", "r2")]


def through(replicas: Scripted, use: Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]]) -> httpx2.Response:
    app = Starlette(routes=[Route("/{path:path}", Gateway(replicas, 1000).__call__, methods=["GET", "POST"])])

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://gate") as client:
            return await use(client)

    return asyncio.run(run())


def ask(replicas: Scripted) -> httpx2.Response:
    return through(replicas, lambda client: client.post("/v1/completions?a=b", json=BODY))


def test_bytes_pass_as_they_come() -> None:
    replicas = Scripted([Head(201, [("x-request-id", "r"), ("content-type", "a/b")]), b"one ", b"two"])
    answer = ask(replicas)
    assert (answer.status_code, answer.content) == (201, b"one two")
    assert (answer.headers["x-request-id"], answer.headers["content-type"]) == ("r", "a/b")
    ((request, _),) = replicas.asked
    assert (request.method, request.target, json.loads(request.body)) == ("POST", "/v1/completions?a=b", BODY)
    assert replicas.closed == 1


def test_a_request_without_an_answer_is_asked_again() -> None:
    replicas = Scripted([GONE], [GONE], [OK, b"{}"])
    assert ask(replicas).status_code == 200
    assert len(replicas.asked) == 3


def test_where_no_replica_answers_the_client_is_told() -> None:
    replicas = Scripted([GONE])
    answer = ask(replicas)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_failed")
    assert len(replicas.asked) == 3


def test_an_answer_that_breaks_off_ends_with_an_error_and_is_not_asked_again() -> None:
    replicas = Scripted([EVENTS, b'data: {"a": 1}\n\n', GONE])
    first, second, rest = ask(replicas).content.split(b"\n\n")
    assert first == b'data: {"a": 1}'
    assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == "replica_failed"
    assert rest == b""
    assert (len(replicas.asked), replicas.closed) == (1, 1)


def test_a_body_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(ReplicaError):  # to a real client: the connection closes before the length that was told
        ask(Scripted([OK, b"{", GONE]))


def test_refusals_of_the_deployment_pass() -> None:
    full = ApiError(503, "all replicas are full", code="full", retry_after=1)
    answer = ask(Scripted([full]))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    replicas = Scripted([OK])
    answer = through(replicas, lambda client: client.post("/v1/completions", content=b"x" * 1001))
    assert (answer.status_code, answer.json()["error"]["code"], replicas.asked) == (413, "body_too_large", [])


def test_a_conversation_stays_where_it_is() -> None:
    def name(*texts: str, headers: dict[str, str] | None = None) -> str:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return conversation_of(headers or {}, json.dumps({"messages": messages}).encode())

    first = name("Be kind.", "Hello")
    assert name("Be kind.", "Hello", "Hi!", "And now?") == first
    assert name("Be kind.", "Another") != first
    assert name("a", headers={"x-session-id": "mine"}) == "mine"
    prompt = "abc" * 200
    assert conversation_of({}, json.dumps({"prompt": prompt}).encode()) == conversation_of(
        {}, json.dumps({"prompt": prompt + "more"}).encode()
    )
    strange = [b"", b"[]", b"{}", b"\xff", b'{"messages": []}', b'{"messages": 3}', b'{"prompt": null}']
    assert len({conversation_of({}, body) for body in strange}) == len(strange)


def test_metrics_of_all_replicas_are_one_page() -> None:
    answer = through(Scripted([OK]), lambda client: client.get("/metrics"))
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    (family,) = text_string_to_metric_families(answer.text)
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"a": "b", "replica": "r1"}, 3.0),
        ({"a": "b", "replica": "r2"}, 3.0),
    ]
    assert merged_metrics([]) == b""


# -- the command -------------------------------------------------------------------------------------------------------


def test_options_become_words_again() -> None:
    assert words_of(ServerOptions()) == words_of(EngineOptions()) == words_of(DraftOptions()) == []
    assert words_of(ServerOptions(dashboard=False, log_json=True, cors_origin=["a", "b"], queue=3)) == [
        "--cors-origin=a",
        "--cors-origin=b",
        "--no-dashboard",
        "--queue=3",
        "--log-json",
    ]
    assert words_of(LedgerOptions(ledger=Path("a b.db"), ledger_text=True)) == ["--ledger=a b.db", "--ledger-text"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--max-replicas", "2"], "they come with --ray"),
        (["--ray", "--upstream", "http://127.0.0.1:1"], "--ray: it is for engines of ours"),
        (["--ray", "--api-key", "12345678"], "--api-key: Ray shows it in its own pages; use --api-key-file"),
    ],
)
def test_refusals_of_the_command(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert reason in capsys.readouterr().err


def test_ray_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "outrider.scale.ray", raising=False)
    assert main(["serve", "--ray"]) == 2
    assert "--ray: ray is not installed; pip install 'ray[serve]'" in capsys.readouterr().err
