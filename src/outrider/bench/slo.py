"""A service-level objective: what a request may take at most to count as good."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Slo", "SloError"]

_LIMITS = ("ttft", "tpot", "e2e")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


class SloError(ValueError):
    """An objective that cannot be read: names the part and the way out."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds by name: `ttft`, `tpot`, `e2e`."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `ttft=200ms,tpot=20ms`. Raises SloError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            found = _TIME.fullmatch(value)
            if name not in _LIMITS or found is None:
                raise SloError(
                    f"--slo: {part.strip()!r} is not {', '.join(_LIMITS)} with a time, as in ttft=200ms,e2e=2s"
                )
            if name in limits:
                raise SloError(f"--slo: {name!r} is given twice")
            limits[name] = float(found[1]) * (1000 if found[2] == "s" else 1)
        return cls(limits)

    def met(self, times: Mapping[str, float | None]) -> bool:
        """Whether none of `times`, in milliseconds, is above its limit. A text of one token has no TPOT to miss."""
        return all((value := times[name]) is None or value <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {limit:g} ms" for name, limit in self.limits.items())
