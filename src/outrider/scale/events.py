"""Server-sent events on their way through: cut apart, looked at, and parsed where something hangs on it.

Most events of a stream carry a piece of text and pass as they came. What says which do is a search for bytes, which
JSON cannot hide: a quotation mark within a text has a backslash before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["DONE", "BrokenStreamError", "EventCutter", "Rewriter", "ends", "error_in", "object_of", "sums_up", "writes"]

DONE = b"[DONE]"
_LONGEST = 16 << 20  # bytes of one event
_SUM = re.compile(rb'"choices": ?\[\]')
_END = re.compile(rb'"finish_reason": ?"')
_NO_USAGE = re.compile(rb', ?"usage": ?null')


class BrokenStreamError(ValueError):
    """What came is no stream of events as OpenAI's API has them."""


class EventCutter:
    """Cuts what arrives into the payloads of events: what stands behind `data:`. Comments are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. Raises BrokenStreamError."""
        whole = self._rest + data
        if b"\r" in whole:
            whole = whole.replace(b"\r\n", b"\n")
        *events, self._rest = whole.split(b"\n\n")
        if len(self._rest) > _LONGEST:
            raise BrokenStreamError(f"an event of more than {_LONGEST:,} bytes")
        return [payload for event in events if (payload := _payload(event)) is not None]

    def end(self) -> None:
        """Nothing comes any more. Raises BrokenStreamError where something was left half said."""
        if self._rest.strip():
            raise BrokenStreamError("it ended within an event")


def _payload(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all of them
        return event[6:]
    lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
    data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    if lines and not data:
        raise BrokenStreamError(f"an event without data: {lines[0][:80]!r}")
    return b"\n".join(data) if data else None


def sums_up(payload: bytes) -> bool:
    """Whether it is the one with the usage, behind all texts."""
    return _SUM.search(payload) is not None


def ends(payload: bytes) -> bool:
    """Whether a text has its finish reason in it."""
    return _END.search(payload) is not None


def object_of(payload: bytes) -> dict[str, Any]:
    """Raises BrokenStreamError."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        raise BrokenStreamError("an event that is not JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("choices", []), list):
        raise BrokenStreamError("an event in another shape than OpenAI's")
    return found


def error_in(payload: bytes) -> Mapping[str, Any] | None:
    """What an event that tells of an error says."""
    if not payload.startswith((b'{"error"', b'{"object":"error"', b'{"object": "error"')):
        return None
    found = object_of(payload)
    error = found.get("error", found)
    return error if isinstance(error, dict) else {"message": str(error)}


def writes(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk has something of its text: more than the role that opens an answer."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


class Rewriter:
    """Puts the name that the client used in place of the upstream's, and takes out the usage that nobody asked for."""

    def __init__(self, theirs: str, ours: str, *, with_usage: bool) -> None:
        name = json.dumps(theirs).encode()
        self._names = [] if theirs == ours else [b'"model":' + name, b'"model": ' + name]
        self._name = b'"model":' + json.dumps(ours).encode()
        self._with_usage = with_usage

    def __call__(self, payload: bytes) -> bytes:
        for name in self._names:
            payload = payload.replace(name, self._name, 1)
        return payload if self._with_usage else _NO_USAGE.sub(b"", payload, count=1)
