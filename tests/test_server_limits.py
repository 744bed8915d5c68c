"""The server's door and its endings: limits, clients that vanish, texts that are cut, steps that fail."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from outrider import Engine
from outrider.server.settings import Keys, Limits, SettingsError, check_exposure
from serving import MODEL, Running, serving, settled, tiny_engine, wait_until

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "abcd abcd",
    "max_tokens": 450,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
RAW = {"model": MODEL, "prompt": "abcd abcd", "max_tokens": 450, "temperature": 0, "ignore_eos": True}


def slowed(engine: Engine, seconds: float) -> Engine:
    """The engine with steps that take a while, so that a test can come between two of them."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return engine


def raw_stream(running: Running, **change: Any) -> socket.socket:
    """A stream that was asked for with a bare socket, after its first bytes."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.connect((host, int(port)))
    body = json.dumps({**RAW, "stream": True, **change}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    connection.settimeout(10)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_pages_within_a_step(stream: bool) -> None:
    """Closing the connection cancels the text: at most the step that runs is finished."""
    with serving(slowed(tiny_engine(drafter="none"), 0.01)) as running:
        connection = raw_stream(running, stream=stream)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: len(running.engine.running) == 1 and running.engine.steps > 3)
        before = running.engine.steps
        connection.close()
        settled(running)
        assert running.engine.steps - before < 20  # of the 450 that it asked for; the socket's end takes a moment
        assert running.client.completions.create(model=MODEL, prompt="ab", max_tokens=2).choices


def test_a_slow_reader_is_dropped() -> None:
    """A client that takes none of a long stream for `send_seconds` loses its connection, and its text is cancelled."""
    with serving(slowed(tiny_engine(drafter="none"), 0.002), limits=Limits(send_seconds=0.2)) as running:
        with raw_stream(running, n=8, logprobs=20) as connection:
            wait_until(lambda: running.engine.busy)
            settled(running)
            assert running.engine.steps < 400  # of the 450 that it asked for
            data = b""
            while part := connection.recv(1 << 16):
                data += part
        assert b"[DONE]" not in data


def test_the_queue_is_bounded() -> None:
    """More texts than places and queue get 429 with Retry-After; the others are answered."""
    engine = slowed(tiny_engine(batch_size=1), 0.005)
    with serving(engine, limits=Limits(queue=2)) as running, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(running.client.completions.create, **{**LONG, "max_tokens": 60}) for _ in range(8)]
        refused = [job.exception() for job in asked if job.exception() is not None]
        assert len(refused) == 5
        for error in refused:
            assert isinstance(error, openai.RateLimitError)
            assert int(error.response.headers["Retry-After"]) >= 1
            assert error.code == "queue_full"
        texts = {job.result().choices[0].text for job in asked if job.exception() is None}
        assert len(texts) == 1
        settled(running)


def test_one_key_has_its_share() -> None:
    """More requests of one key than it may have get 429; another key's are answered meanwhile."""
    keys = Keys({"ann": "key-of-the-tests", "bob": "another-key"})
    with serving(slowed(tiny_engine(), 0.01), keys=keys, limits=Limits(requests_per_key=1)) as running:
        with running.client.completions.create(**LONG, stream=True) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as refused:
                running.client.completions.create(model=MODEL, prompt="ab", max_tokens=1)
            assert refused.value.code == "concurrency"
            other = running.client.with_options(api_key="another-key")
            assert other.completions.create(model=MODEL, prompt="ab", max_tokens=1).choices
        settled(running)


def test_bodies_are_bounded() -> None:
    """413 by the length that is announced, and by what comes if none is; 400 for a prompt over the operator's limit."""
    with serving(limits=Limits(body_bytes=2000, prompt_tokens=50, output_tokens=20, body_seconds=0.5)) as running:
        url = f"{running.url}/v1/completions"
        kind = {"Content-Type": "application/json"}
        assert httpx2.post(url, content=b" " * 2001, headers=kind).status_code == 413

        def parts() -> Any:
            for _ in range(30):
                yield b" " * 100

        refused = httpx2.post(url, content=parts(), headers=kind)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        for change, parameter in (({"prompt": "b" * 51}, "prompt"), ({"max_tokens": 21}, "max_tokens")):
            refused = httpx2.post(url, json={"model": MODEL, "prompt": "ab", **change})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter)
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert b"408" in connection.recv(4096)


def test_too_many_requests_at_once_get_503() -> None:
    """Over `requests` open ones, with Retry-After."""
    engine = slowed(tiny_engine(), 0.01)
    with (
        serving(engine, limits=Limits(requests=1)) as running,
        running.client.completions.create(**LONG, stream=True) as stream,
    ):
        next(stream)
        refused = httpx2.get(f"{running.url}/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "full")
        assert int(refused.headers["Retry-After"]) >= 1


def test_a_text_whose_time_is_up_is_cut() -> None:
    """It ends with what it has, and the reason `abort`, streamed or not; it is a prefix of the whole text."""
    with serving() as running:
        whole = running.client.completions.create(**LONG).choices[0].text
    with serving(slowed(tiny_engine(), 0.01), limits=Limits(request_seconds=0.5)) as running:
        answer = running.client.completions.create(**LONG).choices[0]
        assert answer.finish_reason == "abort"  # vLLM's word
        assert 0 < len(answer.text) < len(whole)
        assert whole.startswith(answer.text)
        chunks = list(running.client.completions.create(**LONG, stream=True))
        assert chunks[-1].choices[0].finish_reason == "abort"
        assert whole.startswith("".join(chunk.choices[0].text for chunk in chunks))
        settled(running)


def test_a_text_that_never_began_gets_503() -> None:
    """Its time was up while it waited: there is no text to cut, and the client may come again."""
    engine = slowed(tiny_engine(batch_size=1), 0.4)  # the second comes well within a step of the first
    with serving(engine, limits=Limits(request_seconds=1.0)) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.client.completions.create, **LONG)
        wait_until(lambda: running.engine.busy)
        with pytest.raises(openai.APIStatusError) as refused:
            running.client.completions.create(**{**LONG, "extra_body": {"ignore_eos": True}, "timeout": 30})
        first.result()
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["Retry-After"]) >= 1


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    """New requests get 503 and /health says so; a running stream comes to its end."""
    with serving(slowed(tiny_engine(), 0.005), limits=Limits(drain_seconds=20)) as running:
        stream = running.client.completions.create(**{**LONG, "max_tokens": 100}, stream=True)
        next(stream)
        loop = running.service.thread._loop
        assert loop is not None
        drained = asyncio.run_coroutine_threadsafe(running.service.drain(), loop)
        wait_until(lambda: running.service.draining)
        with pytest.raises(openai.APIStatusError) as refused:
            running.client.completions.create(model=MODEL, prompt="ab", max_tokens=1)
        assert refused.value.status_code == 503
        assert httpx2.get(f"{running.url}/health").status_code == 503
        assert list(stream)[-1].choices[0].finish_reason == "length"
        drained.result(10)


def test_a_drain_cuts_what_takes_too_long() -> None:
    """The stream ends with a proper last chunk."""
    with serving(slowed(tiny_engine(), 0.01), limits=Limits(drain_seconds=0.2)) as running:
        stream = running.client.completions.create(**LONG, stream=True)
        next(stream)
        loop = running.service.thread._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(running.service.drain(), loop).result(10)
        assert list(stream)[-1].choices[0].finish_reason == "abort"
        settled(running)


def test_a_step_that_fails_ends_its_texts_and_not_the_server() -> None:
    """500 for those that were in it; the next request is answered as if nothing had been."""
    engine = tiny_engine()
    forward, broken = engine.runner.forward, threading.Event()

    def failing(*arguments: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("a kernel failed")
        return forward(*arguments)

    engine.runner.forward = failing  # type: ignore[method-assign]
    with serving(engine) as running:
        good = running.client.completions.create(model=MODEL, prompt="abab", max_tokens=9, temperature=0)
        broken.set()
        with pytest.raises(openai.InternalServerError) as failed:
            running.client.completions.create(model=MODEL, prompt="abab", max_tokens=9, temperature=0, n=3)
        assert "kernel" not in failed.value.message  # the inside of the server is nothing for its clients
        with pytest.raises(openai.InternalServerError):
            running.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
        stream = httpx2.post(
            f"{running.url}/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True},
        )
        assert stream.status_code == 200  # the role was sent before the first step
        assert '"error"' in stream.text
        broken.clear()
        again = running.client.completions.create(model=MODEL, prompt="abab", max_tokens=9, temperature=0)
        assert again.choices == good.choices
        settled(running)
        assert running.service.thread.faults == 3


def test_a_text_that_cannot_be_drawn_ends_alone() -> None:
    """A penalty that leaves no number is the request's own fault, 400; its neighbour in the batch is answered."""
    with serving(slowed(tiny_engine(), 0.005)) as running, ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(running.client.completions.create, **{**LONG, "max_tokens": 50})
        wait_until(lambda: running.engine.busy)
        refused = httpx2.post(
            f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "ab", "repetition_penalty": 1e-60}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "repetition_penalty")
        assert len(neighbour.result().choices[0].text) > 30
        settled(running)


def test_other_hosts_names_are_not_answered() -> None:
    """A page that a name server made to point at this machine comes with its own name, and gets 403."""
    with serving(hosts=("127.0.0.1", "localhost")) as running:
        assert httpx2.get(f"{running.url}/v1/models").status_code == 200
        refused = httpx2.get(f"{running.url}/v1/models", headers={"Host": "evil.example:8000"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unknown_host")
        assert httpx2.get(f"{running.url}/v1/models", headers={"Host": "[::1"}).status_code in (400, 403)


def test_other_pages_may_call_only_if_the_operator_says_so() -> None:
    """No CORS header by default; with an origin, that one only."""
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with serving() as running:
        answer = httpx2.request("OPTIONS", f"{running.url}/v1/completions", headers=asked)
        assert "access-control-allow-origin" not in answer.headers
    with serving(cors_origins=("https://app.example",)) as running:
        answer = httpx2.request("OPTIONS", f"{running.url}/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = httpx2.get(f"{running.url}/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_an_open_address_needs_a_key() -> None:
    """127.0.0.1 and ::1 do not; any other address is refused without a key unless anybody may come."""
    none = Keys({})
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(host, none, allow_anonymous=False)
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(SettingsError, match="--allow-anonymous"):
            check_exposure(host, none, allow_anonymous=False)
        check_exposure(host, none, allow_anonymous=True)
        check_exposure(host, Keys({"a": "a-long-key"}), allow_anonymous=False)


def test_keys_come_from_options_and_files(tmp_path: Any) -> None:
    """Named by the file, or by their order; a short key, a broken line and a name given twice are refused."""
    file = tmp_path / "keys"
    file.write_text("# people\nann  ann-secret-1\nbob bob-secret-2  # until May\n\n")
    keys = Keys.read(["first-secret"], file)
    assert [keys.name_of(k) for k in ("first-secret", "ann-secret-1", "bob-secret-2", "nobody")] == [
        "key-1",
        "ann",
        "bob",
        None,
    ]
    for text, culprit in (
        ("ann", "line 1"),
        ("ann secret-secret\nann secret-other", "twice"),
        ("ann short", "8 characters"),
        ("ann schlüssel", "ASCII"),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match=culprit):
            Keys.read((), file)


@pytest.mark.filterwarnings("ignore:drafter ngram")
def test_a_drafter_that_fails_is_given_up_and_told() -> None:
    """The text is the same, the answer is 200, and the metrics and the log name it."""
    body: dict[str, Any] = {**LONG, "max_tokens": 40}
    engine = tiny_engine(drafter="ngram")
    with serving(engine) as running:
        good = running.client.completions.create(**body)

        def broken(batch: Any) -> Any:
            raise RuntimeError("it broke")

        engine._drafters["ngram"].propose = broken  # type: ignore[method-assign]
        again = running.client.completions.create(**body)
        assert again.choices == good.choices
        page = httpx2.get(f"{running.url}/metrics").text
        assert f'outrider_drafter_failures_total{{model_name="{MODEL}"}} 1.0' in page
        settled(running)
        assert not running.service.thread.faults


@pytest.mark.parametrize("name", ["self", "variables", "conversation", "__class__"])
def test_a_template_may_have_variables_of_any_name(name: str) -> None:
    with serving(tiny_engine(template="{{ messages[0].content }}{{ variables }}{{ conversation }}")) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}
        sent = httpx2.post(f"{running.url}/v1/chat/completions", json=body | {"chat_template_kwargs": {name: "cd"}})
        assert sent.status_code == 200, sent.text
        assert sent.json()["usage"]["prompt_tokens"] == (4 if name in ("variables", "conversation") else 2)


def test_a_fault_of_the_server_is_told_in_openais_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something breaks in a route: 500 with an object, its cause in the log, and the next request is served."""
    with serving() as running:

        def broken(*_: object) -> None:
            raise RuntimeError("a secret of the server's")

        with monkeypatch.context() as patched:
            patched.setattr(running.service, "check_request", broken)
            answer = httpx2.post(f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "ab"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert running.client.completions.create(model=MODEL, prompt="ab", max_tokens=1).choices


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b'{"model": "\xff"}', {}, "not UTF-8"),
        (b"[" * 200_000, {}, "nested too deeply"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", {}, "cannot be read: Exceeds the limit"),
        (b"{}", {"Content-Encoding": "gzip"}, "Content-Encoding"),
        (json.dumps({f"x{i}": 1 for i in range(9000)}).encode(), {}, "the object has 9,000 names"),
        (json.dumps({"model": MODEL, "prompt": [[5]] * 9000}).encode(), {}, "prompt: list should have at most 4096"),
    ],
    ids=["utf-8", "depth", "number", "coding", "names", "prompts"],
)
def test_a_body_that_cannot_be_read_says_why(content: bytes, headers: dict[str, str], words: str) -> None:
    with serving() as running:
        kind = {"Content-Type": "application/json"}
        answer = httpx2.post(f"{running.url}/v1/completions", content=content, headers=kind | headers)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_an_engine_that_has_ended_is_told() -> None:
    """503 at once, from /health too, and nobody waits for an answer that cannot come."""
    with serving() as running:
        loop = running.service.thread._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(running.service.thread.stop(), loop).result(10)
        with pytest.raises(openai.APIStatusError) as refused:
            running.client.completions.create(model=MODEL, prompt="ab", max_tokens=1)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_ended")
        assert httpx2.get(f"{running.url}/health").status_code == 503
        assert httpx2.get(f"{running.url}/metrics").status_code == 503
