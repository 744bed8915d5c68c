"""One replica of a deployment: an `outrider serve` of its own, and the way to it.

The engine runs in a process of its own, so that neither the deployment's event loop nor its interpreter lock takes time
from it, and every option, limit and record is the very same as without a deployment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

__all__ = ["Head", "Replica", "ReplicaError", "Request", "command_of", "ledger_of"]

log = logging.getLogger("outrider.scale")

_SERVING = re.compile(r"^serving .* at (http://\S+)/v1$")
_LAST = 20  # lines of a replica's log that are told when it ends too soon
# Headers that belong to one connection, RFC 9110 section 7.6.1, and those that the next one sets anew.
_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
_ANEW = {*_HOP, "content-length"}


class ReplicaError(RuntimeError):
    """The replica cannot begin, or has ended."""


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request to pass on, its body read."""

    method: str
    target: str  # path and query
    headers: Sequence[tuple[str, str]]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Head:
    """How the answer to a request begins."""

    status: int
    headers: Sequence[tuple[str, str]]


def ledger_of(file: str, replica: str) -> str:
    """The replica's own ledger beside `file`: audit.db -> audit-REPLICA.db. Each keeps a chain of its own."""
    path = Path(file)
    return str(path.with_name(f"{path.stem}-{replica}{path.suffix}"))


def command_of(options: Sequence[str], replica: str) -> list[str]:
    """The replica's command line. `options` are those of `outrider serve`, without --host and --port."""
    words = list(options)
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != "--ledger":
            continue
        if equals:
            words[i] = f"{name}={ledger_of(value, replica)}"
        elif i + 1 < len(words):
            words[i + 1] = ledger_of(words[i + 1], replica)
    return [sys.executable, "-m", "outrider", "serve", *words, "--host", "127.0.0.1", "--port", "0", "--log-json"]


class Replica:
    """Belongs to the event loop that started it."""

    def __init__(
        self, process: asyncio.subprocess.Process, last: deque[str], url: str, logs: asyncio.Task[None]
    ) -> None:
        self.url = url
        self._process, self._last, self._logs = process, last, logs
        self._http = httpx2.AsyncClient(
            base_url=url,
            timeout=None,  # the replica's own limits end a request
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Replica:
        """Begin the process and wait until it serves. Raises ReplicaError with its last words if it ends before."""
        kept = {name: value for name, value in os.environ.items() if name != "OUTRIDER_LEDGER"}
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**kept, **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        last: deque[str] = deque(maxlen=_LAST)
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        logs = asyncio.create_task(_read_log(process, last, found))
        try:
            url = await found
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.gather(logs, process.wait(), return_exceptions=True)
            raise
        return cls(process, last, url, logs)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def _check_alive(self) -> None:
        if not self.alive:
            raise ReplicaError(f"the replica ended with {self._process.returncode}: {_words(self._last)}")

    async def check(self) -> None:
        """Raise ReplicaError if it does not serve."""
        self._check_alive()
        try:
            answer = await self._http.get("/health", timeout=30.0)
        except httpx2.HTTPError as error:
            raise ReplicaError(f"the replica at {self.url} does not answer: {error!r}") from None
        if answer.status_code != 200:
            raise ReplicaError(f"the replica at {self.url} is not well: {answer.text}")

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        """The head of the answer, then its bytes as they come. Leaving the loop closes the connection.

        Raises ReplicaError if the replica ends meanwhile.
        """
        self._check_alive()
        headers = [(name, value) for name, value in request.headers if name.lower() not in _ANEW]
        try:
            async with self._http.stream(
                request.method, request.target, headers=headers, content=request.body or None
            ) as answer:
                yield Head(
                    answer.status_code,
                    [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in _HOP],
                )
                async for part in answer.aiter_raw():
                    yield part
        except httpx2.HTTPError as error:
            raise ReplicaError(f"the replica at {self.url} broke off: {error!r}") from None

    async def stop(self) -> None:
        """Let running texts end as at SIGTERM, and wait for the process."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        await self._logs
        await self._http.aclose()


async def _read_log(process: asyncio.subprocess.Process, last: deque[str], found: asyncio.Future[str]) -> None:
    """Pass the replica's log on, and find in it where it listens."""
    assert process.stderr is not None
    async for raw in process.stderr:
        line = raw.decode("utf-8", "replace").rstrip()
        print(line, file=sys.stderr, flush=True)
        last.append(line)
        if not found.done() and (match := _SERVING.match(_message(line))):
            found.set_result(match[1])
    code = await process.wait()
    if not found.done():
        found.set_exception(ReplicaError(f"the replica ended with {code} before it served: {_words(last)}"))


def _message(line: str) -> str:
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _words(last: Sequence[str]) -> str:
    return " | ".join(_message(line) or line for line in last) or "it said nothing"
