"""Which characters of a text came from whom, token by token."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.engine.results import Delta, Origin

__all__ = ["Attribution", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """The text of one token, or what has come of it so far."""

    text: str
    origin: Origin
    source: str  # who guessed a drafted token (`Step.sources`); empty for the target's own
    step: int  # of the text, from 0


class Attribution:
    """Follows one sequence.

    A text may lag behind its tokens (half a character, the start of a stop string), so each token's share waits in a
    queue until its characters come.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skip: Callable[[int], bool]) -> None:
        self._token_bytes, self._skip = token_bytes, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: deque[tuple[Span, int]] = deque()  # what a token's span will say, and its characters to come
        self._last = Span("", "plain", "", 0)
        self._steps = 0

    def add(self, delta: Delta) -> None:
        """A step's tokens; their text is asked for with `take`."""
        sources = () if delta.step is None else delta.step.sources
        for index, (token, origin) in enumerate(zip(delta.tokens, delta.origins, strict=True)):
            characters = 0 if self._skip(token) else len(self._decoder.decode(self._token_bytes(token)))
            if characters:
                source = sources[index] if origin == "drafted" and index < len(sources) else ""
                self._waiting.append((Span("", origin, source, self._steps), characters))
        self._steps += bool(delta.tokens)

    def take(self, text: str) -> list[Span]:
        """The text that follows what was taken before, in spans."""
        out: list[Span] = []
        while text:
            span, characters = self._waiting.popleft() if self._waiting else (self._last, len(text))
            if characters > len(text):
                self._waiting.appendleft((span, characters - len(text)))
            out.append(replace(span, text=text[:characters]))
            self._last, text = span, text[characters:]
        return out
