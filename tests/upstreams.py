"""Upstreams for the tests of the front: an in-memory transport whose servers answer as they are told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from outrider.scale.fleet import Fleet
from outrider.scale.router import Ask, prefixes_of, weight_of
from outrider.scale.upstream import Address, Pool

MODEL = "tiny"
Part = bytes | Exception | asyncio.Event  # sent, raised, waited for


def chunk(text: str, *, model: str = "theirs", index: int = 0, end: str | None = None, **more: Any) -> bytes:
    """An event of a text completion's stream."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": end}
    return event({"id": "cmpl-1", "model": model, "choices": [choice], **more})


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def usage(tokens: int, **more: Any) -> bytes:
    told = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    return event({"id": "cmpl-1", "model": "theirs", "choices": [], "usage": told, **more})


DONE = b"data: [DONE]\n\n"


def text(*words: str) -> list[Part]:
    """A whole stream."""
    *first, last = words
    return [*(chunk(word) for word in first), chunk(last, end="length"), usage(len(words)), DONE]


def whole(written: str, tokens: int = 2) -> httpx2.Response:
    """An answer at once."""
    choice = {"index": 0, "text": written, "finish_reason": "length"}
    told = {"prompt_tokens": 3, "completion_tokens": tokens}
    return httpx2.Response(200, json={"id": "cmpl-1", "model": "theirs", "choices": [choice], "usage": told})


@dataclass
class Server:
    """One scripted upstream. `answers` are taken one after the other, the last one again and again."""

    answers: list[list[Part] | httpx2.Response | Exception] = field(default_factory=list)
    health: int | Exception | asyncio.Event = 200  # an event: no answer until it is set
    page: str = ""
    card: dict[str, Any] = field(default_factory=lambda: {"id": "theirs", "owned_by": "vllm", "max_model_len": 512})
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[httpx2.Headers] = field(default_factory=list)
    closed: int = 0  # streams that were given up or read to their end


class _Body(httpx2.AsyncByteStream):
    def __init__(self, server: Server, parts: list[Part]) -> None:
        self._server, self._parts = server, parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                yield part

    async def aclose(self) -> None:
        self._server.closed += 1


class Script(httpx2.AsyncBaseTransport):
    """Servers by host name."""

    def __init__(self, **servers: Server) -> None:
        self.servers = servers

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        server, path = self.servers[request.url.host], request.url.path
        if path == "/health":
            if isinstance(server.health, Exception):
                raise server.health
            if isinstance(server.health, asyncio.Event):
                await server.health.wait()
                return httpx2.Response(200)
            return httpx2.Response(server.health)
        if path == "/v1/models":
            return httpx2.Response(200, json={"data": [server.card]})
        if path == "/version":
            return httpx2.Response(200, json={"version": "0.32.0"})
        if path == "/metrics":
            return httpx2.Response(200, text=server.page)
        if path == "/dashboard/state":
            return httpx2.Response(404)
        server.asked.append(json.loads(await request.aread()))
        server.headers.append(request.headers)
        answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx2.Response):
            return httpx2.Response(answer.status_code, headers=answer.headers, content=answer.content)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=_Body(server, answer))


def fleet_of(plain: tuple[str, ...] = (), **servers: Server) -> Fleet:
    """A fleet of scripted servers; those named in `plain` are the plain pool."""

    def pool(name: str) -> Pool:
        return "plain" if name in plain else "speculative"

    addresses = [Address.at(f"http://{name}", pool(name)) for name in servers]
    return Fleet(addresses, transport=Script(**servers))


def ask(prompt: str = "abc", *, stream: bool = True, **more: Any) -> Ask:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": stream, **more}
    return Ask("/v1/completions", body, 1, weight_of(body, 1, 40), prefixes_of(body), with_usage=False)


def run(test: Callable[[], Any]) -> None:
    """An asynchronous test, which hangs for no longer than a minute."""
    asyncio.run(asyncio.wait_for(test(), 60))
