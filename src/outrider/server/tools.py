"""Tools: how a model family writes its calls, a grammar that keeps them sound, and calls read out of a growing text.

A text with calls has one form:  [content] opening call (separator call)* ending
A call has one form:             {"name": "N", KEY: ARGUMENTS}

The grammar allows nothing else behind an opening, and arguments of the tool's own schema only. So what is read here is
sound by construction, however many tokens come at a time; only `max_tokens` can cut it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from outrider.core.params import Constraint, ParameterError
from outrider.server.body import Body

__all__ = [
    "FORMATS",
    "Arguments",
    "Call",
    "CallReader",
    "Change",
    "Content",
    "Tool",
    "ToolChoice",
    "ToolFormat",
    "check_tools",
    "format_of",
    "grammar_of",
]

_NAME = r"[A-Za-z0-9_.-]{1,64}"


class Function(Body):
    name: str = Field(pattern=f"^{_NAME}$")
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
    mark: str  # what their chat template is known by
    key: str  # what they call the arguments
    opening: str  # empty: a text that begins with { is a call
    separator: str | None  # None: one call in a text
    ending: str


FORMATS = (
    ToolFormat(
        "hermes", "<tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
    ),
    ToolFormat("llama3", "ipython", "parameters", "", None, ""),
)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model, if it is one of those known here."""
    if "tools" not in template:
        return None
    return next((form for form in FORMATS if form.mark in template), None)


def grammar_of(form: ToolFormat, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Constraint:
    """What a text with these tools may be: with `required`, calls only; else anything, or calls at its end."""
    lines = ["%llguidance {}"]
    for index, tool in enumerate(tools):
        schema = tool.function.parameters or {"type": "object"}
        spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        head = _quoted(f'{{"name": "{tool.function.name}", "{form.key}": ')
        lines.append(f'call_{index}: {head} args_{index} "}}"')
        lines.append(f"args_{index}: %json {json.dumps({**schema, 'x-guidance': spaces})}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f" ({_quoted(form.separator)} call)*" if parallel and form.separator is not None else ""
    lines.append(f"calls: call{more} {_quoted(form.ending)}".rstrip())
    if required:
        lines.append(f"start: {_quoted(form.opening)} calls")
    elif form.opening:
        lines += ["start: text | opening calls", "text: TEXT", r"TEXT: /(.|\n)*/"]
        lines.append(f"opening[lazy]: TEXT {_quoted(form.opening)}")
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
        found = re.match(rf'\{{"name": "({_NAME})", "{self.form.key}": ', self._rest)
        if found is None:
            return False
        out.append(Call(self.calls, f"call_{uuid.uuid4().hex[:24]}", found[1]))
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
        if separator is not None and self._rest.startswith("}" + separator):
            self._rest = self._rest[1 + len(separator) :]
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


def _quoted(text: str | None) -> str:
    return json.dumps(text) if text else ""
