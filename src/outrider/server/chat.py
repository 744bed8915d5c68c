"""`/v1/chat/completions`: a conversation gets its answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.params import ParameterError
from outrider.engine.results import Result
from outrider.server.answers import EventStream, finish_reason, unless_gone, usage
from outrider.server.body import Body, SamplingFields, TextPart, joined, names
from outrider.server.completions import MAX_LOGPROBS
from outrider.server.engine_thread import Piece, Work
from outrider.server.errors import ERRORS
from outrider.server.logprobs import chat_logprobs
from outrider.server.metrics import speculative_decoding
from outrider.server.service import Service, visit_of

__all__ = ["ChatRequest", "Message", "rendered", "router"]

UNLIMITED = 2**31 - 1  # the context is the limit


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(SamplingFields):
    """OpenAI's request with vLLM's additions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ParameterError for fields that do not go together."""
        self.check_stream_options()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ParameterError("max_completion_tokens", "max_tokens is its old name; give one of the two")
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", 'it comes with "logprobs": true')
        for key in self.chat_template_kwargs or ():
            if key in ("messages", "add_generation_prompt"):
                raise ParameterError("chat_template_kwargs", f"{key!r} is not the client's to set")


def rendered(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """The messages as a template wants them; `developer` is `system` to a template that does not know it."""
    out = []
    for message in messages:
        role = "system" if message.role == "developer" and "developer" not in template else message.role
        entry = {"role": role, "content": joined(message.content)}
        out.append(entry if message.name is None else entry | {"name": message.name})
    return out


def _works(body: ChatRequest, service: Service) -> list[Work]:
    """One text per choice. Runs in any thread."""
    body.check()
    service.check_count(body.n or 1)
    wanted = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    params = service.ready(
        body.sampling(
            max_tokens=service.limit_output(wanted, UNLIMITED),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
    )
    extra = body.chat_template_kwargs or {}
    tokens = service.check_prompt(service.render_chat(lambda template: rendered(body.messages, template), extra))
    speculation = body.speculative(service.tokenizer.encode)
    return [Work(tokens, each, speculation) for each in params]


class _Form:
    """Makes OpenAI's objects of one request's texts."""

    def __init__(self, body: ChatRequest, service: Service, id: str, prompt_tokens: int) -> None:
        self._body, self._service, self._prompt_tokens = body, service, prompt_tokens
        self._frame = {
            "id": f"chatcmpl-{id}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def says_something(self, piece: Piece) -> bool:
        """Whether it is worth a chunk: half a character alone is not."""
        return bool(piece.text or piece.result is not None or (piece.logprobs and self._body.logprobs))

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk(piece.index, delta, self._logprobs(piece), piece.result)

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            **self._ending(piece.result),
        }

    def whole(self, choices: list[dict[str, Any]], results: list[Result], *, kind: str) -> dict[str, Any]:
        return self._frame | {
            "object": kind,
            "choices": choices,
            "usage": usage(results, self._prompt_tokens, predicted=self._body.prediction is not None),
            "metrics": {"speculative_decoding": speculative_decoding(results)},
        }

    def _chunk(
        self, index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None, result: Result | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **self._ending(result)}
        out = self._frame | {"object": "chat.completion.chunk", "choices": [choice]}
        return out | {"usage": None} if self._body.include_usage else out

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return chat_logprobs(piece.logprobs, self._service.tokenizer.token_bytes) if self._body.logprobs else None

    def _ending(self, result: Result | None) -> dict[str, Any]:
        if result is None:
            return {"finish_reason": None}
        return {"finish_reason": finish_reason(result), "stop_reason": result.stop_reason}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        name = names(
            body,
            prompt="messages",
            logprobs="top_logprobs",
            max_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        )
        service.check_request(body, request)
        works = await service.refusing(name, lambda: _works(body, service))
        form = _Form(body, service, visit_of(request).id, len(works[0].tokens))

        async def whole() -> dict[str, Any]:
            async with service.job(request, works, name) as job:
                pieces = await job.whole()
            return form.whole([form.choice(piece) for piece in pieces], job.finished, kind="chat.completion")

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            async with service.job(request, works, name) as job:
                for index in range(len(works)):
                    yield form.opening(index)
                async for piece in job.pieces():
                    if form.says_something(piece):
                        yield form.chunk(piece)
            if body.include_usage:
                yield form.whole([], job.finished, kind="chat.completion.chunk")

        if body.stream:
            return EventStream(chunks(), patience=service.settings.limits.send_seconds)
        return JSONResponse(await unless_gone(request, whole()))

    return routes
