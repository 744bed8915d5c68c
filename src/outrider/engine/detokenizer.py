"""Tokens to text, one at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["Detokenizer"]


class Detokenizer:
    """The text of one sequence. Depends on its tokens alone, however they were grouped into steps.

    `token_bytes` gives the exact bytes of a token, `skip` says which tokens have no text (special ones).
    `push` reports the stop string that a token completes; the caller then ends the text with `end`.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skip: Callable[[int], bool],
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._token_bytes, self._skip = token_bytes, skip
        self._stop, self._include_stop = tuple(stop), include_stop
        self._longest = max((len(s) for s in self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._last = 0  # characters before the last token's
        self._hit: tuple[int, int] | None = None  # start and end of a stop string completed by the last token
        self._sent = 0
        self._ended = False

    @property
    def text(self) -> str:
        """The text so far; after the end, the text."""
        return self._text

    def push(self, token: int) -> str | None:
        """Append a token; the earliest stop string that it completes, or None."""
        self._hit = None
        self._last = len(self._text)
        if self._skip(token):
            return None
        new = self._decoder.decode(self._token_bytes(token))
        if not new:
            return None
        self._text += new
        if not self._stop:
            return None
        start = max(0, self._last - self._longest + 1)
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, start)
            # a stop string that ended before this token was passed over on purpose (min_tokens)
            while at >= 0 and at + len(stop) <= self._last:
                at = self._text.find(stop, at + 1)
            if at >= 0 and (best is None or at < best[0]):
                best = (at, at + len(stop), stop)
        if best is None:
            return None
        self._hit = best[:2]
        return best[2]

    def end(self, token: int | None) -> None:
        """Close the text: cut the stop string, or the text of the token that ended it; else flush half characters."""
        if token is not None and not self._skip(token):
            if not self._include_stop:
                self._text = self._text[: self._last]
        elif self._hit is not None:
            self._text = self._text[: self._hit[1] if self._include_stop else self._hit[0]]
        else:
            self._text += self._decoder.decode(b"", final=True)
        self._ended = True

    def take(self) -> str:
        """The text that is safe to send and was not taken before."""
        safe = len(self._text)
        if not self._ended:
            safe -= self._held()
        if safe <= self._sent:
            return ""
        out = self._text[self._sent : safe]
        self._sent = safe
        return out

    def _held(self) -> int:
        """Length of the longest end of the text that may still grow into a stop string."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
