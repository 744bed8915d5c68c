"""The items of a response's output as they grow, and the events that tell of them, as OpenAI documents both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from outrider.server.tools import Call, Change

__all__ = ["Event", "Output", "Status"]

Event = tuple[str, dict[str, Any]]  # its type without the `response.` before it, and what it tells
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(ABC):
    """A message or a call. `place` is where the events say that it stands."""

    def __init__(self, id: str, index: int) -> None:
        self.id, self.index = id, index
        self.text = ""

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    @abstractmethod
    def shown(self, status: Status) -> dict[str, Any]:
        """The item as it is now."""

    @abstractmethod
    def opening(self) -> Iterator[Event]: ...

    @abstractmethod
    def more(self, text: str) -> Event: ...

    @abstractmethod
    def closing(self) -> Iterator[Event]: ...


class _Message(_Item):
    @property
    def place(self) -> dict[str, Any]:
        return super().place | {"content_index": 0}

    def shown(self, status: Status) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_part(self.text)]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def opening(self) -> Iterator[Event]:
        yield "content_part.added", self.place | {"part": _part("")}

    def more(self, text: str) -> Event:
        return "output_text.delta", self.place | {"delta": text, "logprobs": []}

    def closing(self) -> Iterator[Event]:
        yield "output_text.done", self.place | {"text": self.text, "logprobs": []}
        yield "content_part.done", self.place | {"part": _part(self.text)}


class _FunctionCall(_Item):
    def __init__(self, id: str, index: int, call: Call) -> None:
        super().__init__(id, index)
        self._call = call

    def shown(self, status: Status) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": self.text,
        }

    def opening(self) -> Iterator[Event]:
        yield from ()

    def more(self, text: str) -> Event:
        return "function_call_arguments.delta", self.place | {"delta": text}

    def closing(self) -> Iterator[Event]:
        yield (
            "function_call_arguments.done",
            self.place | {"name": self._call.name, "arguments": self.text},
        )


class Output:
    """All items of one answer. Only the last one grows."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._open: _Item | None = None
        self.items: list[dict[str, Any]] = []  # those that are whole

    def take(self, changes: Iterable[Change]) -> Iterator[Event]:
        """More of the text, as `tools.CallReader` understood it."""
        for change in changes:
            if isinstance(change, Call):
                yield from self._close("completed")
                yield from self._begin(_FunctionCall(f"fc_{self._id}_{change.index}", len(self.items), change))
                continue
            if self._open is None:
                yield from self._begin(self._message())
            assert self._open is not None
            self._open.text += change.text
            yield self._open.more(change.text)

    def end(self, status: Status) -> Iterator[Event]:
        """The text has ended. An answer of nothing is an empty message."""
        if self._open is None:
            yield from self._begin(self._message())
        yield from self._close(status)

    def _message(self) -> _Item:
        return _Message(f"msg_{self._id}", len(self.items))

    def _begin(self, item: _Item) -> Iterator[Event]:
        self._open = item
        yield "output_item.added", {"output_index": item.index, "item": item.shown("in_progress")}
        yield from item.opening()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._open.closing()
        self.items.append(self._open.shown(status))
        yield "output_item.done", {"output_index": self._open.index, "item": self.items[-1]}
        self._open = None


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
