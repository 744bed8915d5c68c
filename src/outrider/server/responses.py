"""`/v1/responses`: OpenAI's newer form of a chat, with text and function tools. Nothing is stored: a conversation comes
whole each time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.params import ParameterError
from outrider.engine.results import Result
from outrider.server.answers import EventStream, finish_reason, unless_gone
from outrider.server.body import Body, JsonSchema, Listed, Prediction, ResponseFormat, SpeculationFields, names
from outrider.server.chat import CalledFunction, ChatRequest, Message, Plan, ToolCall, plan_of
from outrider.server.desk import visit_of
from outrider.server.errors import ERRORS
from outrider.server.items import Event, Output
from outrider.server.metrics import speculative_decoding
from outrider.server.service import Service
from outrider.server.tools import (
    TOOL_NAME,
    CallReader,
    Change,
    Content,
    Function,
    FunctionName,
    NamedChoice,
    Tool,
    ToolChoice,
)

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


class FunctionCall(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None


class FunctionCallOutput(Body):
    """What the function said to a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Literal["completed"] | None = None


def _kind(value: object) -> object:
    return value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")


AnyItem = Annotated[
    Annotated[Item, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="an item is a message, a function_call or a function_call_output",
    ),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: str = Field(pattern=f"^{TOOL_NAME}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the schema is kept either way

    def tool(self) -> Tool:
        """As a chat has it."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


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
    input: str | Annotated[Listed[AnyItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
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
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return ChatRequest(
            model=self.model,
            messages=[*self._instructed(), *(message for message, _ in _messages(items))],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            response_format=self._format(),
            tools=[tool.tool() for tool in self.tools or ()] or None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
            stream=self.stream,
            user=self.user,
            prediction=self.prediction,
            speculation=self.speculation,
        )

    def names(self) -> Mapping[str, str]:
        """What a chat's parameters are called here."""
        out = {
            "prompt": "input",
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "grammar": "tools" if self.tools else "text.format",
            "response_format": "text.format",
            "response_format.json_schema": "text.format.schema",
        }
        for index in range(len(self.tools or ())):
            for field in ("name", "parameters"):
                out[f"tools[{index}].function.{field}"] = f"tools[{index}].{field}"
        if not isinstance(self.input, str):
            first = len(self._instructed())
            for index, (message, places) in enumerate(_messages(self.input), first):
                out[f"messages[{index}].content"] = f"input[{places[0]}].content"
                for number, place in enumerate(places[-len(message.tool_calls or ()) :]):
                    out[f"messages[{index}].tool_calls[{number}].function.arguments"] = f"input[{place}].arguments"
        return names(None, **out)

    def _instructed(self) -> list[Message]:
        return [] if self.instructions is None else [Message(role="system", content=self.instructions)]

    def _choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return NamedChoice(type="function", function=FunctionName(name=choice.name))
        # clients may say the default, `auto`, without tools
        return choice if self.tools or choice != "auto" else None

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if (form.type == "json_schema") != (form.schema_ is not None):
            raise ParameterError("text.format.schema", 'it comes with "type": "json_schema", and only with it')
        schema = None if form.schema_ is None else JsonSchema.model_validate({"schema": form.schema_})
        return ResponseFormat(type=form.type, json_schema=schema)


def _messages(items: Iterable[AnyItem]) -> list[tuple[Message, list[int]]]:
    """The conversation as a chat has it, and the numbers of the items in each message: calls belong to what the
    assistant said before them."""
    out: list[tuple[Message, list[int]]] = []
    for index, item in enumerate(items):
        if isinstance(item, Item):
            out.append((Message(role=item.role, content=_joined(item.content)), [index]))
        elif isinstance(item, FunctionCallOutput):
            out.append((Message(role="tool", tool_call_id=item.call_id, content=_joined(item.output)), [index]))
        else:
            if not out or out[-1][0].role != "assistant":
                out.append((Message(role="assistant"), []))
            message, places = out[-1]
            function = CalledFunction(name=item.name, arguments=item.arguments)
            message.tool_calls = [*(message.tool_calls or ()), ToolCall(id=item.call_id, function=function)]
            places.append(index)
    return out


def _joined(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _Form:
    """Makes OpenAI's objects and events of one request's text."""

    def __init__(self, body: ResponsesRequest, service: Service, id: str, plan: Plan) -> None:
        self._plan = plan
        self._output = Output(id)
        self._reader = None if plan.tools is None else CallReader(plan.tools)
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "error": None,
        }
        self._numbers = count()

    def opening(self) -> Iterator[dict[str, Any]]:
        begun = self._frame | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("created", {"response": begun})
        yield self._event("in_progress", {"response": begun})

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        """The events of another piece of the text."""
        yield from self._events(self._output.take(self._read(text)))

    def closing(self, result: Result) -> Iterator[dict[str, Any]]:
        yield from self._events(self._ending(result))
        response = self._response(result)
        yield self._event(response["status"], {"response": response})

    def whole(self, text: str, result: Result) -> dict[str, Any]:
        """The answer at once."""
        for _ in (*self._output.take(self._read(text)), *self._ending(result)):
            pass  # nobody is told of its growth
        return self._response(result)

    def _read(self, text: str) -> list[Change]:
        if self._reader is not None:
            return self._reader.push(text)
        return [Content(text)] if text else []

    def _ending(self, result: Result) -> Iterator[Event]:
        if self._reader is not None:
            yield from self._output.take(self._reader.end())
        yield from self._output.end("completed" if finish_reason(result) == "stop" else "incomplete")

    def _response(self, result: Result) -> dict[str, Any]:
        reason = finish_reason(result)
        prompt, written = len(self._plan.works[0].tokens), result.usage.completion_tokens
        return self._frame | {
            "status": "completed" if reason == "stop" else "incomplete",
            "incomplete_details": None
            if reason == "stop"
            else {"reason": "max_output_tokens" if reason == "length" else reason},
            "output": self._output.items,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": result.usage.cached_tokens},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + written,
            },
            "metrics": {"speculative_decoding": speculative_decoding([result])},
        }

    def _events(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        return (self._event(name, content) for name, content in events)

    def _event(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **content}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", responses=ERRORS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation."""
        name = body.names()
        chat = await service.refusing(name, body.chat)
        service.check_request(chat, request)
        plan = await service.refusing(name, lambda: plan_of(chat, service))
        form = _Form(body, service, visit_of(request).id, plan)

        async def whole() -> dict[str, Any]:
            async with service.job(request, plan.works, name) as job:
                (piece,) = await job.whole()
            return form.whole(piece.text, job.finished[0])

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            async with service.job(request, plan.works, name) as job:
                for event in form.opening():
                    yield event
                async for piece in job.pieces():
                    for event in form.more(piece.text):
                        yield event
            for event in form.closing(job.finished[0]):
                yield event

        if body.stream:
            return EventStream(events(), patience=service.settings.limits.send_seconds, done=False)
        return JSONResponse(await unless_gone(request, whole()))

    return routes
