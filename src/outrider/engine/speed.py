"""How fast texts were decoded, and how fast they would have been without guesses: the measured speed-up."""

from __future__ import annotations

from typing import NamedTuple

from outrider.drafters.costs import Costs

__all__ = ["Speed", "Speedometer"]


class Speed(NamedTuple):
    """Sums since the start, over steps that did nothing but decode: one that reads a prompt says nothing of either way.

    Replaced and never changed: safe to read from any thread. Between two readings, the speed-up is the growth of
    `plain_seconds` over that of `compared_seconds`.
    """

    tokens: int = 0  # written
    seconds: float = 0.0  # that they took, drafting included
    compared_seconds: float = 0.0  # of these, in steps with a drafter while the time of a plain step was known
    compared_tokens: int = 0  # written in them
    plain_seconds: float = 0.0  # what those would have taken without guesses


class Speedometer:
    """Adds up steps.

    What a plain step takes is measured while texts run: its forward by `Costs`, all else in it (draws, bookkeeping) by
    the steps that had no guesses. With costs that are not measured (`--no-adapt`) nothing is compared.
    """

    _PACE = 0.1  # how fast the time beside a plain forward follows

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._beside: float | None = None  # seconds per text
        self.speed = Speed()

    def record(
        self, *, texts: int, guesses: int, tokens: int, seconds: float, beside: float, wanted: bool = True
    ) -> None:
        """A step that only decoded. `beside`: its seconds besides drafting and the forward.

        `wanted`: whether any of its texts has a drafter; texts that asked for none are no part of the speed-up.
        """
        if not guesses:
            measured = beside / texts
            before = measured if self._beside is None else self._beside
            self._beside = before + self._PACE * (measured - before)
        speed = self.speed._replace(tokens=self.speed.tokens + tokens, seconds=self.speed.seconds + seconds)
        plain = self._plain(texts)
        if wanted and plain is not None:
            speed = speed._replace(
                compared_seconds=speed.compared_seconds + seconds,
                compared_tokens=speed.compared_tokens + tokens,
                plain_seconds=speed.plain_seconds + plain * tokens / texts,
            )
        self.speed = speed

    def _plain(self, texts: int) -> float | None:
        """Seconds of a plain step of so many texts."""
        if self._costs.unit is None or self._beside is None:
            return None
        return self._costs.cost(texts) * self._costs.unit + texts * self._beside
