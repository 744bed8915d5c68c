"""`/v1/completions`: a text goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.params import ParameterError
from outrider.engine.results import Result
from outrider.server.answers import EventStream, finish_reason, unless_gone, usage
from outrider.server.body import Listed, SamplingFields, names
from outrider.server.desk import visit_of
from outrider.server.engine_thread import Piece, Work
from outrider.server.errors import ERRORS
from outrider.server.logprobs import CompletionLogprobs
from outrider.server.metrics import speculative_decoding
from outrider.server.service import Service
from outrider.server.trace import Trace

__all__ = ["CompletionRequest", "router"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's
MAX_LOGPROBS = 20


T = TypeVar("T")
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=4096)]  # `--choices` allows fewer, as a rule


class CompletionRequest(SamplingFields):
    """OpenAI's request with vLLM's additions."""

    prompt: str | Prompts[str] | Listed[int] | Prompts[Listed[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None  # only as n

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ParameterError("prompt", "it is empty")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def check(self) -> None:
        """Raise ParameterError for fields that do not go together."""
        self.check_stream_options()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ParameterError("best_of", "only the value of n is supported: all texts are handed out")
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise ParameterError("max_tokens", "0 is for a prompt that is only judged, with echo and logprobs")


def _works(body: CompletionRequest, service: Service) -> tuple[list[Work], list[str]]:
    """The texts to write, prompt by prompt, and what each one begins with (`echo`). Runs in any thread."""
    body.check()
    prompts = body.prompts()
    service.check_count(len(prompts) * (body.n or 1))
    works: list[Work] = []
    starts: list[str] = []
    limit = service.limit_output(body.max_tokens, DEFAULT_MAX_TOKENS)
    judged = body.logprobs if body.echo else None
    params = service.ready(body.sampling(max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=judged))
    speculation = body.speculative(service.tokenizer.encode)
    for prompt in prompts:
        tokens = service.encode(prompt)
        start = "" if not body.echo else prompt if isinstance(prompt, str) else service.tokenizer.decode(tokens)
        works += [Work(tokens, each, speculation) for each in params]
        starts += [start] * len(params)
    return works, starts


class _Form:
    """Makes OpenAI's objects of one request's texts."""

    def __init__(
        self, body: CompletionRequest, service: Service, id: str, works: list[Work], starts: list[str]
    ) -> None:
        self._body, self._works, self._starts = body, works, starts
        self._prompt_tokens = sum(len(work.tokens) for work in works) // (body.n or 1)
        tokenizer = service.tokenizer
        self._traces = [Trace(tokenizer) for _ in works] if body.traced else []
        self._logprobs = [CompletionLogprobs(tokenizer.token_bytes, tokenizer.is_special, s) for s in starts]
        self._frame = {
            "id": f"cmpl-{id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def choice(self, piece: Piece, text: str) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._entries(piece),
            "finish_reason": None if piece.result is None else finish_reason(piece.result),
            "stop_reason": None if piece.result is None else piece.result.stop_reason,
        }
        return choice | {"outrider": self._traces[piece.index].take(piece)} if self._traces else choice

    def _entries(self, piece: Piece) -> dict[str, Any]:
        form = self._logprobs[piece.index]
        if not piece.prompt_logprobs:
            return form.take(piece.logprobs)
        prompt = form.prompt(self._works[piece.index].tokens, piece.prompt_logprobs)
        text = form.take(piece.logprobs)
        return {name: prompt[name] + text[name] for name in prompt}

    def says_something(self, piece: Piece) -> bool:
        """Whether it is worth a chunk: half a character alone is not, unless its making is asked for."""
        asked = self._traces or (piece.logprobs and self._body.logprobs is not None)
        return bool(piece.text or piece.result is not None or asked)

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        text = (self._starts[piece.index] if first else "") + piece.text
        out = self._frame | {"choices": [self.choice(piece, text)]}
        return out | {"usage": None} if self._body.include_usage else out

    def whole(self, choices: list[dict[str, Any]], results: list[Result]) -> dict[str, Any]:
        return self._frame | {
            "choices": choices,
            "usage": usage(
                results, self._prompt_tokens, self._body.n or 1, predicted=self._body.prediction is not None
            ),
            "metrics": {"speculative_decoding": speculative_decoding(results)},
        }


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more texts."""
        name = names(body)
        service.check_request(body, request)
        works, starts = await service.refusing(name, lambda: _works(body, service))
        form = _Form(body, service, visit_of(request).id, works, starts)

        async def whole() -> dict[str, Any]:
            async with service.job(request, works, name) as job:
                pieces = await job.whole()
            choices = [form.choice(piece, starts[piece.index] + piece.text) for piece in pieces]
            return form.whole(choices, job.finished)

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            begun: set[int] = set()
            async with service.job(request, works, name) as job:
                async for piece in job.pieces():
                    if not form.says_something(piece):
                        continue
                    yield form.chunk(piece, first=piece.index not in begun)
                    begun.add(piece.index)
            if body.include_usage:
                yield form.whole([], job.finished)

        if body.stream:
            return EventStream(chunks(), patience=service.settings.limits.send_seconds)
        return JSONResponse(await unless_gone(request, whole()))

    return routes
