"""`outrider serve` as a process: what it refuses to start with, how it says where it is, and what the signals do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from outrider.cli import main
from outrider.server.process import listen
from tiny import tiny_model, write_gguf

BODY: dict[str, Any] = {"model": "tiny", "prompt": "abcd abcd", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("serve") / "tiny.gguf", tiny_model(context=100_000))


@contextmanager
def served(
    model: Path, *options: str, limit: Callable[[], None] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its URL as its log tells it. `limit` is called in the process before it begins."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(model),
        "--port",
        "0",
        "--threads",
        "1",
        "--cache-tokens",
        "100000",
    ]
    with subprocess.Popen(
        [*command, "--log-json", *options], stderr=subprocess.PIPE, text=True, preexec_fn=limit
    ) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:  # with a ledger, its head may come first
                line = process.stderr.readline()
                assert line, "it ended"
                found = re.search(r"http://[^/]+", json.loads(line)["message"])
            yield process, found[0]
        finally:
            process.kill()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cuts_what_takes_too_long_and_ends(model: Path, sig: int) -> None:
    """The stream gets its last chunk and [DONE]; the process ends with 0, and its log is JSON without the prompt."""
    with served(model, "--drain-seconds", "0.3") as (process, url):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        stream = client.completions.create(**BODY, max_tokens=90_000, stream=True)
        next(stream)
        process.send_signal(sig)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons[-1] == "abort"
        assert process.wait(20) == 0
        assert process.stderr is not None
        log = process.stderr.read()
        client.close()
    lines = [json.loads(line) for line in log.splitlines()]
    (line,) = [line for line in lines if line["logger"] == "outrider.request"]
    assert (line["status"], line["finish_reasons"], line["path"]) == (200, ["cancelled"], "/v1/completions")
    assert line["completion_tokens"] > 0
    assert "abcd" not in log


def test_a_second_signal_ends_at_once(model: Path) -> None:
    """Whatever still runs."""
    with served(model, "--drain-seconds", "60") as (process, url):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        stream = client.completions.create(**BODY, max_tokens=90_000, stream=True)
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert any("SIGTERM" in line for line in process.stderr)  # a change of mode may be told before
        assert httpx2.get(f"{url}/health").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        stream.close()
        client.close()


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--host", "0.0.0.0"], "--allow-anonymous"),
        (["--api-key", "short"], "8 characters"),
        (["--queue", "-5"], "--queue"),
        (["--request-drafters", "nothing"], "nothing"),
        (["--host", "192.0.2.1", "--api-key", "long-enough"], "cannot listen"),
        (["--model", "other.gguf"], "--model"),
    ],
)
def test_a_server_that_may_not_start_says_why(
    model: Path, options: list[str], culprit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that names the option, before any model is loaded."""
    assert main(["serve", str(model), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert culprit in line


def test_a_port_that_is_taken_is_told_with_the_way_out(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(model), "--port", str(taken.getsockname()[1])]) == 2
    assert "give another --port" in capsys.readouterr().err


def test_help_loads_no_server() -> None:
    """`outrider --help` imports neither FastAPI nor pydantic nor numpy."""
    code = (
        "import sys; sys.argv = ['outrider', '--help']; from outrider.cli import main; main();"
        "print({'fastapi', 'pydantic', 'numpy', 'prometheus_client', 'llguidance'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.stderr == "set()\n"
    assert "serve" in done.stdout


def test_a_chunk_of_a_stream_is_sent_at_once() -> None:
    """No connection waits for the acknowledgement of an earlier chunk (Nagle's algorithm)."""

    async def delays() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await accepted

    assert asyncio.run(delays()) != 0
