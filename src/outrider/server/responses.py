"""`/v1/responses`: OpenAI's newer form of a chat, for text. Nothing is stored: a conversation comes whole each time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.params import ParameterError
from outrider.engine.results import Result
from outrider.server.answers import EventStream, finish_reason, unless_gone
from outrider.server.body import Body, JsonSchema, Prediction, ResponseFormat, SpeculationFields, names
from outrider.server.chat import ChatRequest, Message, plan_of
from outrider.server.desk import visit_of
from outrider.server.errors import ERRORS
from outrider.server.metrics import speculative_decoding
from outrider.server.service import Service

__all__ = ["ResponsesRequest", "router"]


class Part(Body):
    """Text of a message. The last two are what an answer's own text has when it is sent back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class Item(Body):
    """A message. `id` and `status` are an answer's own when it is sent back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None
    phase: None = None  # as OpenAI's client sends an answer back


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextSettings(Body):
    format: Format | None = None


class ResponsesRequest(Body):
    """OpenAI's request, with a seed and speculation."""

    model: str
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None  # handed back
    user: str | None = None  # kept in the log
    prediction: Prediction | None = None
    speculation: SpeculationFields | None = None

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises ParameterError."""
        if self.speculation is not None and self.speculation.trace:
            raise ParameterError("speculation.trace", "it is told in chats and completions, not here")
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            content = item.content if isinstance(item.content, str) else "\n".join(part.text for part in item.content)
            messages.append(Message(role=item.role, content=content))
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            response_format=self._format(),
            stream=self.stream,
            user=self.user,
            prediction=self.prediction,
            speculation=self.speculation,
        )

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if (form.type == "json_schema") != (form.schema_ is not None):
            raise ParameterError("text.format.schema", 'it comes with "type": "json_schema", and only with it')
        schema = None if form.schema_ is None else JsonSchema.model_validate({"schema": form.schema_})
        return ResponseFormat(type=form.type, json_schema=schema)


class _Form:
    """Makes OpenAI's objects and events of one request's text."""

    def __init__(self, body: ResponsesRequest, service: Service, id: str, prompt_tokens: int) -> None:
        self._body, self._prompt_tokens = body, prompt_tokens
        self._item_id = f"msg_{id}"
        self._frame: dict[str, Any] = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": {"type": "text"}}
            if body.text is None
            else body.text.model_dump(by_alias=True, exclude_none=True),
            "metadata": body.metadata or {},
            "user": body.user,
            "store": False,
            "truncation": "disabled",
            "previous_response_id": None,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "error": None,
        }
        self._numbers = count()

    def begun(self) -> dict[str, Any]:
        return self._frame | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}

    def ended(self, text: str, result: Result) -> dict[str, Any]:
        reason = finish_reason(result)
        written = result.usage.completion_tokens
        return self._frame | {
            "status": "completed" if reason == "stop" else "incomplete",
            "incomplete_details": None
            if reason == "stop"
            else {"reason": "max_output_tokens" if reason == "length" else reason},
            "output": [self._item(text, "completed" if reason == "stop" else "incomplete")],
            "usage": {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {"cached_tokens": result.usage.cached_tokens},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._prompt_tokens + written,
            },
            "metrics": {"speculative_decoding": speculative_decoding([result])},
        }

    def event(self, name: str, **content: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **content}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self.event("created", response=self.begun())
        yield self.event("in_progress", response=self.begun())
        item = self._item("", "in_progress") | {"content": []}
        yield self.event("output_item.added", output_index=0, item=item)
        yield self.event("content_part.added", **self._place, part=_part(""))

    def delta(self, text: str) -> dict[str, Any]:
        return self.event("output_text.delta", **self._place, delta=text, logprobs=[])

    def closing(self, text: str, result: Result) -> Iterator[dict[str, Any]]:
        response = self.ended(text, result)
        yield self.event("output_text.done", **self._place, text=text, logprobs=[])
        yield self.event("content_part.done", **self._place, part=_part(text))
        yield self.event("output_item.done", output_index=0, item=response["output"][0])
        yield self.event(response["status"], response=response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", responses=ERRORS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation."""
        name = names(prompt="input", messages="input", max_tokens="max_output_tokens", grammar="text.format")
        chat = await service.refusing(name, body.chat)
        service.check_request(chat, request)
        works = (await service.refusing(name, lambda: plan_of(chat, service))).works
        form = _Form(body, service, visit_of(request).id, len(works[0].tokens))

        async def whole() -> dict[str, Any]:
            async with service.job(request, works, name) as job:
                (piece,) = await job.whole()
            return form.ended(piece.text, job.finished[0])

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            text = ""
            async with service.job(request, works, name) as job:
                for event in form.opening():
                    yield event
                async for piece in job.pieces():
                    text += piece.text
                    if piece.text:
                        yield form.delta(piece.text)
            for event in form.closing(text, job.finished[0]):
                yield event

        if body.stream:
            return EventStream(events(), patience=service.settings.limits.send_seconds, done=False)
        return JSONResponse(await unless_gone(request, whole()))

    return routes
