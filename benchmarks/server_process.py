"""`outrider serve`, or another OpenAI-compatible server, as a process of its own. For the benchmarks of the server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

import httpx2

__all__ = ["Server", "foreign", "serving"]

STOP_SECONDS = 60  # that a server gets to end


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    pid: int


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Server]:
    """`outrider serve` with these arguments, on a free port."""
    command = [sys.executable, "-m", "outrider", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                found = re.search(r"http://[^/\s]+", line)
                if found:
                    break
            else:
                raise SystemExit(f"the server did not start: {''.join(said[-3:]).strip()}")
            Thread(target=_drain, args=(process.stderr,), daemon=True).start()  # its log never fills the pipe
            yield Server(found[0], process.pid)
        finally:
            _end(process)


@contextmanager
def foreign(command: Sequence[str], environment: Mapping[str, str], seconds: float = 120) -> Iterator[Server]:
    """Another server. `{port}` in its command becomes a free one; it is there when /v1/models answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    given = [part.replace("{port}", str(port)) for part in command]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | environment
    ) as process:
        try:
            end = time.monotonic() + seconds
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{given[0]} did not start: try the command by hand: {' '.join(given)}")
                time.sleep(0.2)
            yield Server(url, process.pid)
        finally:
            _end(process)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/v1/models", timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False


def _drain(stream: object) -> None:
    for _ in stream:  # type: ignore[attr-defined]
        pass


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
