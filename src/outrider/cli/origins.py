"""Text with each token marked by who wrote it: by colour on a terminal, by brackets elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from outrider.engine.attribution import Attribution
from outrider.engine.results import Delta, Origin

__all__ = ["OriginPainter", "wants_colour"]

_COLOURS: dict[Origin, str] = {"drafted": "\x1b[32m", "corrected": "\x1b[33m", "bonus": "\x1b[36m", "plain": ""}
_BRACKETS: dict[Origin, tuple[str, str]] = {
    "drafted": ("[", "]"),
    "corrected": ("{", "}"),
    "bonus": ("<", ">"),
    "plain": ("", ""),
}
_MEANING: dict[Origin, str] = {
    "drafted": "guessed, and right",
    "corrected": "the model's own, after a wrong guess",
    "bonus": "the model's own, after a guess that was right to its end",
    "plain": "the model's own, nothing was guessed",
}
_RESET = "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour what goes to the stream: NO_COLOR and FORCE_COLOR decide, or else whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


class OriginPainter:
    """Marks the text of one sequence, delta by delta."""

    def __init__(self, token_bytes: Callable[[int], bytes], skip: Callable[[int], bool], *, colour: bool) -> None:
        self._attribution, self._colour = Attribution(token_bytes, skip), colour

    def paint(self, delta: Delta) -> str:
        """The delta's text with its marks."""
        self._attribution.add(delta)
        return "".join(self._mark(span.text, span.origin) for span in self._attribution.take(delta.text))

    def legend(self) -> str:
        """One line per kind of token."""
        width = max(map(len, _MEANING)) + 4
        return "\n".join(
            self._mark(kind, kind)
            + " " * (width - len(kind) - (0 if self._colour else 2 * (kind != "plain")))
            + meaning
            for kind, meaning in _MEANING.items()
        )

    def _mark(self, text: str, origin: Origin) -> str:
        if not self._colour:
            opening, closing = _BRACKETS[origin]
            return f"{opening}{text}{closing}"
        return f"{_COLOURS[origin]}{text}{_RESET}" if _COLOURS[origin] else text
