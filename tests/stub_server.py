"""A stub of OpenAI's API for the tests of the benchmark: an in-memory transport that answers as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass
class Clock:
    """Time that only moves when it is moved."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Whatever else is under way goes on to its end meanwhile."""
        end = self.now + seconds
        for _ in range(200):
            await asyncio.sleep(0)
        self.now = max(self.now, end)


class Events(httpx2.AsyncByteStream):
    """A stream of server-sent events, before each of which the clock moves on."""

    def __init__(self, clock: Clock, events: list[tuple[float, Any]]) -> None:
        self._clock, self._events = clock, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, event in self._events:
            self._clock.now += seconds
            if isinstance(event, Exception):
                raise event
            data = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {data}\n\n".encode()


def words(text: str, *, ttft: float = 0.2, gap: float = 0.1, **last: Any) -> list[tuple[float, Any]]:
    """A chat's events: a role, a chunk per word, the ending, usage and what `last` adds to it."""
    parts = text.split(" ")
    chunks = [{"choices": [{"delta": {"content": f"{part} "}}]} for part in parts]
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": len(parts)}, "choices": [], **last}
    return [
        (0.0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        *((gap if index else ttft, chunk) for index, chunk in enumerate(chunks)),
        (0.0, {"choices": [{"delta": {}, "finish_reason": "length"}]}),
        (0.0, usage),
        (0.0, "[DONE]"),
    ]


Answering = Callable[[dict[str, Any]], "list[tuple[float, Any]] | httpx2.Response | Exception"]


@dataclass
class Stub(httpx2.AsyncBaseTransport):
    """Servers by host name. `answers[host]` makes an answer of a request's body; `metrics[host]` are pages in turn."""

    clock: Clock
    answers: dict[str, Answering]
    metrics: dict[str, list[str]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)  # host, path, body
    headers: list[httpx2.Headers] = field(default_factory=list)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host, path = request.url.host, request.url.path
        if path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": f"model-of-{host}"}]})
        if path == "/metrics":
            pages = self.metrics.get(host)
            return httpx2.Response(200, text=pages.pop(0)) if pages else httpx2.Response(404)
        body = json.loads(await request.aread())
        self.asked.append((host, path, body))
        self.headers.append(request.headers)
        answer = self.answers[host](body)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx2.Response):
            return answer
        return httpx2.Response(200, stream=Events(self.clock, answer))
