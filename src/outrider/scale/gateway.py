"""What stands before the replicas of a deployment: chooses by conversation, tries anew, and tells what broke.

It reads no answer: bytes pass as they come.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from outrider.scale.replica import Head, ReplicaError, Request
from outrider.scale.router import prefixes_of
from outrider.server.answers import error_answer
from outrider.server.errors import ApiError

__all__ = ["Gateway", "Replicas", "conversation_of", "merged_metrics"]

log = logging.getLogger("outrider.scale")

_TRIES = 3


class Replicas(Protocol):
    """All replicas of the deployment."""

    def ask(self, request: Request, conversation: str) -> AsyncIterator[Head | bytes]:
        """The answer of the conversation's replica. Raises ReplicaError if it ends, FullError if none has room."""

    async def all(self, request: Request) -> Sequence[tuple[str, bytes]]:
        """The name of each replica and its answer's body."""


def conversation_of(headers: Mapping[str, str], body: bytes) -> str:
    """What stays the same from turn to turn: the client's X-Session-Id, or else how its messages begin.

    Requests without either get a name of their own, and so any replica.
    """
    if given := headers.get("x-session-id"):
        return given
    try:
        fields = json.loads(body)
        messages = fields.get("messages")
        # what a conversation begins with: the system's message, if there is one, and the user's first
        shown = fields if messages is None else {**fields, "messages": messages[:2]}
        name, _ = prefixes_of(shown)[-1 if messages else 0]
        return name.hex()
    except (ValueError, TypeError, AttributeError, LookupError):
        return uuid.uuid4().hex


class Gateway:
    """Answers HTTP requests with what a replica answers."""

    def __init__(self, replicas: Replicas, body_bytes: int) -> None:
        self._replicas = replicas
        self._body_bytes = body_bytes

    async def __call__(self, request: HttpRequest) -> Response:
        try:
            body = await self._read(request)
            target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            passed = Request(request.method, target, request.headers.items(), body)
            if request.url.path == "/metrics" and request.method == "GET":
                return await self._metrics(passed)
            return await self._answer(passed, conversation_of(request.headers, body))
        except ApiError as error:
            return error_answer(error)

    async def _read(self, request: HttpRequest) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._body_bytes:
                raise ApiError(413, f"the body is larger than {self._body_bytes:,} bytes", code="body_too_large")
        return b"".join(parts)

    async def _answer(self, request: Request, conversation: str) -> Response:
        """The same text comes from any replica, so a request that has no answer yet may simply be asked again."""
        for left in range(_TRIES - 1, -1, -1):
            answer = self._replicas.ask(request, conversation)
            try:
                head = await anext(answer)
            except ReplicaError as error:
                log.warning("a replica broke off before it answered", extra={"fields": {"reason": str(error)}})
                if not left:
                    raise ApiError(502, "no replica could answer; try again", code="replica_failed") from None
                continue
            assert isinstance(head, Head)
            return _streamed(head, answer)
        raise AssertionError("unreachable")

    async def _metrics(self, request: Request) -> Response:
        pages = await self._replicas.all(request)
        return Response(merged_metrics(pages), media_type="text/plain; version=0.0.4; charset=utf-8")


def _streamed(head: Head, parts: AsyncIterator[Head | bytes]) -> Response:
    events = any(
        name.lower() == "content-type" and value.startswith("text/event-stream") for name, value in head.headers
    )

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(parts):  # type: ignore[type-var]
            try:
                async for part in parts:
                    assert isinstance(part, bytes)
                    yield part
            except ReplicaError as error:
                log.warning("a replica broke off in the middle", extra={"fields": {"reason": str(error)}})
                if not events:
                    raise  # the connection is closed before its length is reached, which no client takes for an answer
                failure = ApiError(502, "the replica ended in the middle of this answer", code="replica_failed")
                yield b"data: " + json.dumps(failure.body()).encode() + b"\n\n"

    answer = StreamingResponse(body(), head.status)
    answer.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
    return answer


def merged_metrics(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """One page of Prometheus' format: the samples of every page, with the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
            ]

    class Families:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    return generate_latest(Families())
