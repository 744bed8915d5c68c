"""How answers travel: at once or as server-sent events, and what ends when the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from outrider.engine.results import Result
from outrider.server.errors import ApiError

__all__ = ["ClientGoneError", "EventStream", "error_answer", "finish_reason", "unless_gone", "usage"]

T = TypeVar("T")
log = logging.getLogger("outrider.server")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


def error_answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())


def finish_reason(result: Result) -> str:
    """OpenAI's word; `abort` (vLLM's) for a text that was cut by the server: its time was up, or the server ends."""
    return "abort" if result.finish_reason == "cancelled" else result.finish_reason


def usage(results: Sequence[Result], prompt_tokens: int, choices: int, *, predicted: bool) -> dict[str, Any]:
    """OpenAI's usage of prompts with so many choices each, the texts of one prompt behind one another.

    A prompt counts once, and what its first text took from the cache. Tokens of a prediction count if there was one.
    """
    written = sum(result.usage.completion_tokens for result in results)
    accepted = sum(result.usage.accepted_prediction_tokens for result in results) if predicted else 0
    rejected = sum(result.usage.rejected_prediction_tokens for result in results) if predicted else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens for result in results[::choices])},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; cancelled with ClientGoneError as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: JSON objects, or bytes that are sent as they are; `[DONE]` at the end if `done`.

    The status is sent with the first event: what is refused before it gets a status of its own. A later error is an
    event. A client that has gone, or does not read for `patience` seconds, closes `events` at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Mapping[str, Any] | bytes, None], *, patience: float, done: bool = True
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events, self._patience, self._done = events, patience, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._write(scope, receive, send))
        watch = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            task.result()
        finally:
            for other in (task, watch):
                other.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)
            await self._events.aclose()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except ApiError as error:
            await error_answer(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send(send, _event(first))
        try:
            async for event in self._events:
                await self._send(send, _event(event))
        except ApiError as error:
            await self._send(send, _event(error.body() if self._done else _told(error)))
        if self._done:
            await self._send(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": True}
        try:
            async with asyncio.timeout(self._patience):
                await send(message)
        except TimeoutError:
            raise ClientGoneError from None


def _told(error: ApiError) -> dict[str, Any]:
    """An error as an event of `/v1/responses`."""
    return {"type": "error", "code": error.code, "message": error.message, "param": error.parameter}


def _event(content: Mapping[str, Any] | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
