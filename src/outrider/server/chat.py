"""`/v1/chat/completions`: a conversation gets its answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.params import Constraint, ParameterError
from outrider.engine.results import Result
from outrider.server.answers import EventStream, finish_reason, unless_gone, usage
from outrider.server.body import Body, Listed, SamplingFields, TextPart, joined, names
from outrider.server.completions import MAX_LOGPROBS
from outrider.server.desk import visit_of
from outrider.server.engine_thread import Piece, Work
from outrider.server.errors import ERRORS
from outrider.server.logprobs import chat_logprobs
from outrider.server.metrics import speculative_decoding
from outrider.server.service import Service
from outrider.server.tools import (
    FORMATS,
    TOLD,
    Call,
    CallReader,
    Change,
    Content,
    Tool,
    ToolChoice,
    ToolFormat,
    check_tools,
    format_of,
    grammar_of,
    told,
)
from outrider.server.trace import Trace

__all__ = ["ChatRequest", "Message", "Plan", "plan_of", "rendered", "router"]

UNLIMITED = 2**31 - 1  # the context is the limit


class CalledFunction(Body):
    name: str
    arguments: str  # JSON


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of the assistant
    tool_call_id: str | None = None  # of a tool's answer
    refusal: None = None  # as OpenAI's client sends an answer back


class ChatRequest(SamplingFields):
    """OpenAI's request with vLLM's additions."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raise ParameterError for fields that do not go together."""
        self.check_stream_options()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ParameterError("max_completion_tokens", "max_tokens is its old name; give one of the two")
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", 'it comes with "logprobs": true')
        for key in self.chat_template_kwargs or ():
            if key in ("messages", "tools", "add_generation_prompt"):
                raise ParameterError("chat_template_kwargs", f"{key!r} is not the client's to set")


def rendered(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """The messages as a template wants them; `developer` is `system` to a template that does not know it.

    Raises ParameterError.
    """
    out = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = "system" if message.role == "developer" and "developer" not in template else message.role
        if message.content is None and not (role == "assistant" and message.tool_calls):
            raise ParameterError(f"{where}.content", "it is missing")
        if message.tool_calls is not None and role != "assistant":
            raise ParameterError(f"{where}.tool_calls", f"a message of the role {role!r} has none")
        if (message.tool_call_id is not None) != (role == "tool"):
            raise ParameterError(f"{where}.tool_call_id", "it belongs to a message of the role 'tool', which needs it")
        entry: dict[str, Any] = {"role": role, "content": joined(message.content or "")}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            entry["tool_calls"] = [
                _called(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
            ]
        out.append(entry)
    # a template without a word for calls would drop them
    return out if "tool_calls" in template or "tools" in template else told(out)


def _refused(constant: str) -> None:
    """NaN and infinities: Python's parser takes them, JSON has none."""
    raise ValueError(constant)


def _called(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}", parse_constant=_refused)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ParameterError(f"{where}.function.arguments", "it is not a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be written, and how it is to be read."""

    works: list[Work]
    tools: ToolFormat | None  # if calls may be in the texts


def plan_of(body: ChatRequest, service: Service) -> Plan:
    """One text per choice. Runs in any thread."""
    body.check()
    service.check_count(body.n or 1)
    template = "" if service.tokenizer.template is None else service.tokenizer.template.source
    form, grammar = _tools(body, template, service)
    messages = rendered(body.messages, template)
    wanted = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    params = service.ready(
        body.sampling(
            max_tokens=service.limit_output(wanted, UNLIMITED),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
            # where calls begin with a special token, its name must be there to be read
            skip_special=form is None or not form.opening.startswith("["),
        )
    )
    extra = dict(body.chat_template_kwargs or {})
    if form is TOLD:
        messages = told(messages, body.tools or ())
    elif form is not None:
        extra["tools"] = [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()
        ]
    tokens = service.check_prompt(service.render_chat(messages, extra))
    speculation = body.speculative(service.tokenizer.encode)
    return Plan([Work(tokens, each, speculation) for each in params], form)


def _tools(body: ChatRequest, template: str, service: Service) -> tuple[ToolFormat | None, Constraint | None]:
    """How calls are written, and the grammar that keeps them sound; nothing of both without tools to call."""
    if body.tools is None:
        for name, value in (("tool_choice", body.tool_choice), ("parallel_tool_calls", body.parallel_tool_calls)):
            if value is not None and value != "none":
                raise ParameterError(name, "it comes with tools")
        return None, None
    callable_ = check_tools(body.tools, body.tool_choice)
    if body.tool_choice == "none":
        return None, None
    form = format_of(template)
    if form is None:
        known = ", ".join(form.name for form in FORMATS)
        raise ParameterError(
            "tools", f"the model's chat template calls none in a way that is known here ({known}); see --chat-template"
        )
    if body.constraint() is not None:
        raise ParameterError("response_format", "the text's form is that of its tool calls; leave out one of the two")
    required = body.tool_choice not in (None, "auto")
    tokenizer = service.tokenizer

    def special(name: str) -> int | None:
        token = tokenizer.token_id(name)
        return token if token is not None and tokenizer.is_special(token) else None

    parallel = body.parallel_tool_calls is not False
    return form, grammar_of(form, callable_, required=required, parallel=parallel, special=special)


class _Form:
    """Makes OpenAI's objects of one request's texts."""

    def __init__(self, body: ChatRequest, service: Service, id: str, plan: Plan) -> None:
        self._body, self._service, self._plan = body, service, plan
        self._traces = [Trace(service.tokenizer) for _ in plan.works] if body.traced else []
        self._readers = [None if plan.tools is None else CallReader(plan.tools) for _ in plan.works]
        self._frame = {
            "id": f"chatcmpl-{id}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece is worth: a chunk for each change, none for half a character alone."""
        deltas = [_delta(change) for change in self._read(piece)]
        logprobs = self._logprobs(piece)
        if not deltas and piece.result is None and not (logprobs and piece.logprobs) and not self._traces:
            return []
        *first, last = deltas or [{}]
        chunks = [
            *(self._chunk(piece.index, delta, None, None) for delta in first),
            self._chunk(piece.index, last, logprobs, piece.result),
        ]
        chunks[-1]["choices"][0] |= self._traced(piece)
        return chunks

    def choice(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        calls: list[dict[str, Any]] = []
        for change in self._read(piece):
            if isinstance(change, Content):
                message["content"] += change.text
            elif isinstance(change, Call):
                calls.append({"id": change.id, "type": "function", "function": {"name": change.name, "arguments": ""}})
            else:
                calls[change.index]["function"]["arguments"] += change.text
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {
            "index": piece.index,
            "message": message,
            "logprobs": self._logprobs(piece),
            **self._ending(piece.index, piece.result),
            **self._traced(piece),
        }

    def whole(self, choices: list[dict[str, Any]], results: list[Result], *, kind: str) -> dict[str, Any]:
        prompt_tokens = len(self._plan.works[0].tokens)
        return self._frame | {
            "object": kind,
            "choices": choices,
            "usage": usage(results, prompt_tokens, len(self._plan.works), predicted=self._body.prediction is not None),
            "metrics": {"speculative_decoding": speculative_decoding(results)},
        }

    def _read(self, piece: Piece) -> list[Change]:
        reader = self._readers[piece.index]
        if reader is None:
            return [Content(piece.text)] if piece.text else []
        changes = reader.push(piece.text)
        return changes if piece.result is None else changes + reader.end()

    def _chunk(
        self, index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None, result: Result | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **self._ending(index, result)}
        out = self._frame | {"object": "chat.completion.chunk", "choices": [choice]}
        return out | {"usage": None} if self._body.include_usage else out

    def _traced(self, piece: Piece) -> dict[str, Any]:
        return {"outrider": self._traces[piece.index].take(piece)} if self._traces else {}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return chat_logprobs(piece.logprobs, self._service.tokenizer.token_bytes) if self._body.logprobs else None

    def _ending(self, index: int, result: Result | None) -> dict[str, Any]:
        if result is None:
            return {"finish_reason": None}
        reason, reader = finish_reason(result), self._readers[index]
        if reason == "stop" and reader is not None and reader.calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": result.stop_reason}


def _delta(change: Change) -> dict[str, Any]:
    if isinstance(change, Content):
        return {"content": change.text}
    if isinstance(change, Call):
        function = {"name": change.name, "arguments": ""}
        return {"tool_calls": [{"index": change.index, "id": change.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": change.index, "function": {"arguments": change.text}}]}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        name = names(
            body,
            **({} if body.tools is None else {"grammar": "tools"}),
            prompt="messages",
            logprobs="top_logprobs",
            max_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        )
        service.check_request(body, request)
        plan = await service.refusing(name, lambda: plan_of(body, service))
        form = _Form(body, service, visit_of(request).id, plan)

        async def whole() -> dict[str, Any]:
            async with service.job(request, plan.works, name) as job:
                pieces = await job.whole()
            return form.whole([form.choice(piece) for piece in pieces], job.finished, kind="chat.completion")

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            async with service.job(request, plan.works, name) as job:
                for index in range(len(plan.works)):
                    yield form.opening(index)
                async for piece in job.pieces():
                    for chunk in form.chunks(piece):
                        yield chunk
            if body.include_usage:
                yield form.whole([], job.finished, kind="chat.completion.chunk")

        if body.stream:
            return EventStream(chunks(), patience=service.settings.limits.send_seconds)
        return JSONResponse(await unless_gone(request, whole()))

    return routes
