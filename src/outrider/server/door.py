"""What every HTTP request passes before any route sees it: a name, a key, room, and a body of bounded size.

Pure ASGI, so that nothing stands between a route and the client's connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.answers import ClientGoneError, error_answer
from outrider.server.dashboard import FREE_PATHS, STATE_PATH
from outrider.server.errors import ApiError
from outrider.server.visit import Visit

if TYPE_CHECKING:
    from outrider.server.desk import Desk

__all__ = ["Door"]

log = logging.getLogger("outrider.server")
requests = logging.getLogger("outrider.request")

GONE = 499  # nginx's status for a client that closed the connection
OPEN_PATHS = ("/health", *FREE_PATHS)  # answered without a key
QUIET_PATHS = (*OPEN_PATHS, "/metrics", STATE_PATH)  # asked for again and again: in the log for debugging only


class Door:
    """The outermost layer. One line of the log and one count in the metrics per request, however it ends."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self._app, self._desk = app, desk
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = scope.get("client")
        visit = Visit.new(headers.get("x-request-id", ""), scope["method"], scope["path"], client[0] if client else "")
        scope.setdefault("state", {})["visit"] = visit

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = visit.id
            await send(message)

        self._inside += 1
        try:
            await self._serve(scope, headers, receive, reply, visit)
        except ClientGoneError:
            visit.status = GONE
        except Exception:
            begun, visit.status = bool(visit.status), 500
            log.exception("a request failed", extra={"fields": {"request_id": visit.id}})
            if not begun:
                await error_answer(ApiError(500, "the server failed at this request; it is in its log"))(
                    scope, receive, reply
                )
        finally:
            self._inside -= 1
            self._note(scope, headers, visit)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, reply: Send, visit: Visit) -> None:
        try:
            self._check_host(headers)
            visit.key = self._check_key(scope["path"], headers)
            self._check_room()
            self._check_coding(headers)
            body = await self._read(headers, receive)
        except ApiError as error:
            await error_answer(error)(scope, receive, reply)
            return
        told = False

        async def replay() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, reply)

    def _check_host(self, headers: Headers) -> None:
        """Against pages that a name server made to look like this machine's own (DNS rebinding)."""
        hosts = self._desk.settings.hosts
        if not hosts:
            return
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:
            name = None
        if name not in hosts:
            raise ApiError(403, f"the host {name!r} is not answered here", code="unknown_host")

    def _check_key(self, path: str, headers: Headers) -> str | None:
        keys = self._desk.settings.keys
        if not keys or path in OPEN_PATHS:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="missing_api_key")
        name = keys.name_of(key.strip())
        if name is None:
            raise ApiError(401, "the API key is not known here", code="invalid_api_key")
        return name

    def _check_room(self) -> None:
        most = self._desk.settings.limits.requests
        if self._inside > most:
            raise ApiError(
                503, f"{most} requests are open, which is all", code="full", retry_after=self._desk.patience()
            )

    def _check_coding(self, headers: Headers) -> None:
        coding = headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(400, f"Content-Encoding: {coding!r} is not undone here; send the body as it is")

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limits = self._desk.settings.limits
        too_large = ApiError(413, f"the body is larger than {limits.body_bytes:,} bytes", code="body_too_large")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > limits.body_bytes:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {limits.body_seconds:g} seconds", code="timeout"
            ) from None

    def _note(self, scope: Scope, headers: Headers, visit: Visit) -> None:
        seconds = time.perf_counter() - visit.started
        route = getattr(scope.get("route"), "path", "none")
        self._desk.metrics.answered(route, visit.method, visit.status, seconds)
        if self._desk.tracing is not None:
            self._desk.tracing.visited(visit, route, headers, seconds)
        if self._desk.recorder is not None:
            self._desk.recorder.visited(visit, route, seconds)
        fields = {
            "request_id": visit.id,
            "method": visit.method,
            "path": visit.path,
            "status": visit.status,
            "client": visit.client,
            "key": visit.key,
            "duration": round(seconds, 4),
            **visit.record,
        }
        level = logging.DEBUG if route in QUIET_PATHS else logging.INFO
        requests.log(level, "%s %s %d", visit.method, visit.path, visit.status, extra={"fields": fields})
