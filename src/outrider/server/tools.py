"""Tools: how a model family writes its calls, a grammar that keeps them sound, and calls read out of a growing text.

A text with calls has one form:  [content] opening call (separator call)* ending
A call has one form:             before NAME between ARGUMENTS after

A model whose template knows no tools is told of them in words. The grammar allows nothing else behind an opening, and
arguments of the tool's own schema only. So what is read here is sound by construction, however many tokens come at a
time; only `max_tokens` can cut it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from outrider.core.params import Constraint, ParameterError
from outrider.server.body import Body

__all__ = [
    "FORMATS",
    "TOOL_NAME",
    "Arguments",
    "Call",
    "CallReader",
    "Change",
    "Content",
    "Function",
    "FunctionName",
    "NamedChoice",
    "Tool",
    "ToolChoice",
    "ToolFormat",
    "check_tools",
    "format_of",
    "grammar_of",
    "told",
]

TOOL_NAME = r"[A-Za-z0-9_.-]{1,64}"


class Function(Body):
    name: str = Field(pattern=f"^{TOOL_NAME}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the schema is kept either way


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the models of a family write calls."""

    name: str
    marks: tuple[str, ...]  # what their chat template is known by: all of them stand in it
    before: str  # of a call
    between: str  # name and arguments
    after: str
    opening: str  # empty: a text that begins as a call does is one
    separator: str | None  # None: one call in a text
    ending: str
    short_ids: bool = False  # nine letters and digits, which is all that their template takes

    @property
    def head(self) -> re.Pattern[str]:
        return re.compile(f"{re.escape(self.before)}({TOOL_NAME}){re.escape(self.between)}")

    def call_id(self) -> str:
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"


_BEFORE, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '

# The first one whose marks stand in a template is its own.
FORMATS = (
    ToolFormat("mistral-args", ("[ARGS]",), "", "[ARGS]", "", "[TOOL_CALLS]", "[TOOL_CALLS]", "", short_ids=True),
    ToolFormat(
        "mistral-7b",
        ("[TOOL_CALLS] [",),
        _BEFORE,
        _ARGUMENTS,
        "}",
        opening="[TOOL_CALLS] [",
        separator=", ",
        ending="]",
        short_ids=True,
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        _BEFORE,
        _ARGUMENTS,
        "}",
        opening="[TOOL_CALLS][",
        separator=", ",
        ending="]",
        short_ids=True,
    ),
    ToolFormat(
        "hermes",  # Qwen's too
        ("<tool_call>",),
        _BEFORE,
        _ARGUMENTS,
        "}",
        opening="<tool_call>\n",
        separator="\n</tool_call>\n<tool_call>\n",
        ending="\n</tool_call>",
    ),
    ToolFormat("llama3", ("ipython",), _BEFORE, _PARAMETERS, "}", opening="", separator=None, ending=""),
)
# For models whose template knows no tools, as SmolLM2 was trained: they are told in the system message.
TOLD = ToolFormat("told", (), _BEFORE, _ARGUMENTS, "}", opening="<tool_call>[", separator=", ", ending="]</tool_call>")


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; `TOLD` if it teaches none, None if one not known here."""
    if "tools" not in template:
        return TOLD
    return next((form for form in FORMATS if all(mark in template for mark in form.marks)), None)


def told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()) -> list[dict[str, Any]]:
    """The conversation for a template that knows nothing of tools: they, calls and their answers are written out."""
    out: list[dict[str, Any]] = []
    for message in messages:
        entry = dict(message)
        calls = entry.pop("tool_calls", None)
        if calls:
            written = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            entry["content"] = f"{entry['content']}{TOLD.opening[:-1]}{written}{TOLD.ending[1:]}"
        if entry["role"] == "tool":
            entry.pop("tool_call_id")
            entry |= {"role": "user", "content": f"<tool_response>\n{entry['content']}\n</tool_response>"}
        out.append(entry)
    if tools:
        listed = "\n".join(
            json.dumps(tool.function.model_dump(exclude_none=True, exclude={"strict"})) for tool in tools
        )
        words = (
            "You can call these functions, one JSON object on each line:\n"
            f"<tools>\n{listed}\n</tools>\n"
            'Call them where they help, with <tool_call>[{"name": NAME, "arguments": {...}}]</tool_call> at the end.'
        )
        if out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{words}"
        else:
            out.insert(0, {"role": "system", "content": words})
    return out


def grammar_of(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    special: Callable[[str], int | None] = lambda name: None,
) -> Constraint:
    """What a text with these tools may be: with `required`, calls only; else anything, or calls at its end.

    `special`: the id of a special token of this name; it is written as itself, and not letter by letter.
    """

    def quoted(text: str | None) -> str:
        parts = re.split(r"(\[[A-Z_]+\])", text or "")
        return " ".join(
            json.dumps(part) if (token := special(part)) is None else f"<[{token}]>" for part in parts if part
        )

    lines = ["%llguidance {}"]
    for index, tool in enumerate(tools):
        schema = tool.function.parameters or {"type": "object"}
        spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        head = quoted(f"{form.before}{tool.function.name}{form.between}")
        lines.append(f"call_{index}: {head} args_{index} {quoted(form.after)}".rstrip())
        lines.append(f"args_{index}: %json {json.dumps({**schema, 'x-guidance': spaces})}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f" ({quoted(form.separator)} call)*" if parallel and form.separator is not None else ""
    lines.append(f"calls: call{more} {quoted(form.ending)}".rstrip())
    opening = quoted(form.opening)
    if required:
        lines.append(f"start: {opening} calls")
    elif opening.startswith("<["):  # no text has it
        lines += [f"start: text ({opening} calls)?", "text: TEXT", r"TEXT: /(.|\n)*/"]
    elif opening:
        lines += ["start: text | opening calls", "text: TEXT", r"TEXT: /(.|\n)*/"]
        lines.append(f"opening[lazy]: TEXT {opening}")
    else:
        lines += ["start: text? | calls", "text: TEXT", r"TEXT: /[^{](.|\n)*/"]
    return Constraint("grammar", "\n".join(lines))


@dataclass(frozen=True, slots=True)
class Content:
    """More text before the calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON, a piece at a time."""

    index: int
    text: str


Change = Content | Call | Arguments


@dataclass(slots=True)
class CallReader:
    """Reads calls out of a text that comes in pieces. What it says in all does not depend on how the text was cut."""

    form: ToolFormat
    calls: int = 0
    _state: str = "text"  # text -> head -> arguments -> after -> head or end; a text without calls stays where it is
    _rest: str = ""  # not yet understood
    _value: _Value = field(init=False)

    def push(self, text: str) -> list[Change]:
        """What the next piece of the text says."""
        self._rest += text
        out: list[Change] = []
        while self._step(out):
            pass
        return out

    def end(self) -> list[Change]:
        """The text has ended: what was held back because it could have become an opening is content."""
        rest, self._rest = self._rest, ""
        return [Content(rest)] if rest and self._state in ("text", "content") else []

    def _step(self, out: list[Change]) -> bool:
        """Understand some more of the rest; False if more of the text is needed."""
        return bool(getattr(self, f"_in_{self._state}")(out))

    def _in_text(self, out: list[Change]) -> bool:
        opening = self.form.opening
        if not opening:
            if self._rest:
                self._state = "head" if self._rest.startswith("{") else "content"
            return bool(self._rest)
        at = self._rest.find(opening)
        if at < 0:
            self._say(out, len(self._rest) - self._held())
            return False
        content, self._rest = self._rest[:at].rstrip(), self._rest[at + len(opening) :]
        if content:
            out.append(Content(content))
        self._state = "head"
        return True

    def _in_content(self, out: list[Change]) -> bool:
        self._say(out, len(self._rest))
        return False

    def _in_head(self, out: list[Change]) -> bool:
        found = self.form.head.match(self._rest)
        if found is None:
            return False
        out.append(Call(self.calls, self.form.call_id(), found[1]))
        self._rest = self._rest[found.end() :]
        self._value = _Value()
        self._state = "arguments"
        return True

    def _in_arguments(self, out: list[Change]) -> bool:
        taken = self._value.take(self._rest)
        if taken:
            out.append(Arguments(self.calls, self._rest[:taken]))
            self._rest = self._rest[taken:]
        if self._value.whole:
            self.calls += 1
            self._state = "after"
        return self._value.whole

    def _in_after(self, out: list[Change]) -> bool:
        separator = self.form.separator
        if separator is not None and self._rest.startswith(self.form.after + separator):
            self._rest = self._rest[len(self.form.after + separator) :]
            self._state = "head"
            return True
        return False

    def _say(self, out: list[Change], length: int) -> None:
        if length > 0:
            out.append(Content(self._rest[:length]))
            self._rest = self._rest[length:]

    def _held(self) -> int:
        """Characters at the end of the rest that may belong to an opening, and the space before it."""
        opening = self.form.opening
        length = next((n for n in range(len(opening) - 1, 0, -1) if self._rest.endswith(opening[:n])), 0)
        before = self._rest[: len(self._rest) - length]
        return length + len(before) - len(before.rstrip())


class _Value:
    """Finds the end of a JSON object in pieces of text."""

    def __init__(self) -> None:
        self.whole = False
        self._depth = 0
        self._quoted = self._escaped = False

    def take(self, text: str) -> int:
        """How many of the characters belong to the object."""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            if not self._depth:
                self.whole = True
                return at + 1
        return len(text)


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """The tools that may be called, all of one name if the choice names it. Raises ParameterError."""
    names = [tool.function.name for tool in tools]
    for index, tool in enumerate(tools):
        if tool.function.name in names[:index]:
            raise ParameterError(f"tools[{index}].function.name", f"{tool.function.name!r} is given twice")
        if tool.function.parameters is not None and tool.function.parameters.get("type", "object") != "object":
            raise ParameterError(f"tools[{index}].function.parameters", "it is not the schema of an object")
    if isinstance(choice, NamedChoice):
        wanted = choice.function.name
        if wanted not in names:
            raise ParameterError("tool_choice", f"{wanted!r} is none of the tools: {', '.join(names)}")
        return [tool for tool in tools if tool.function.name == wanted]
    return list(tools)
