"""What a forward of so many rows takes, measured while it is used: how a drafter knows which guesses pay.

A guess is one more row. It pays if it raises tokens per second: with E tokens expected of a step that takes c (in plain
steps), a guess that is right with probability p and raises the time by dc is worth its row if p / dc > E / c.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["Costs", "paying"]

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Usual for a small model on a CPU (`outrider bench kernels`, int8 and bf16): flat where the weights' way through
# the bus costs, a straight line where arithmetic does. The first guess also pays for being looked up.
_USUAL = (1.0, 1.03, 1.04, 1.06, 1.12, 1.2, 1.5, 1.75, 2.5, 3.2, 4.7, 6.2, 9.2, 12.2)


class Costs:
    """Times of forwards by rows, relative to a forward of one row.

    How soon they rise changes from machine to machine and, on a shared one, from minute to minute. Unless `live`,
    nothing is measured, and choices are the same in every run. `row` fixes the price: each row more costs this share
    of a plain step.
    """

    # How fast the time of a plain step follows a plain step and, in case the machine as a whole has changed, another;
    # and how fast the relative cost of more rows does.
    _PLAIN_PACE, _UNIT_PACE, _PACE = 0.3, 0.04, 0.06
    _HELD_UP = 1.5  # a step counts as this much slower than expected at most: the machine may have been busy
    _EVERY = 8  # measurements between two new curves

    def __init__(self, row: float | None = None, *, live: bool = True) -> None:
        self._fixed = row is not None or not live
        self._start = _USUAL if row is None else tuple(1 + row * (rows - 1) for rows in _KNOTS)
        self._relative = list(self._start)
        self._unit: float | None = None  # seconds of a plain step
        self._seen = 0
        self.assumed = _spread(self._start)  # [r]: the cost of r rows before anything was measured; [0] is unused
        self.curve = self.assumed
        self.texts = 1  # that the step which is drafted for brings on, whoever drafts for them

    @property
    def unit(self) -> float | None:
        """Seconds of a plain step; None as long as nothing was measured."""
        return self._unit

    def cost(self, rows: int) -> float:
        """Of a forward of so many rows, in plain steps."""
        if rows < len(self.curve):
            return self.curve[rows]
        return self.curve[-1] + (rows - len(self.curve) + 1) * (self.curve[-1] - self.curve[-2])

    def begin(self, known: Sequence[tuple[int, float]]) -> None:
        """Go on from what was measured earlier: (rows, cost in forwards of one row), rows ascending, the first 1."""
        if self._fixed:
            return
        for knot, rows in enumerate(_KNOTS):
            high = bisect_left([point[0] for point in known], rows)
            if high == len(known):
                break  # beyond what is known
            (r1, c1), (r0, c0) = known[high], known[max(high - 1, 0)]
            self._relative[knot] = c1 if r1 == rows else c0 + (c1 - c0) * (rows - r0) / (r1 - r0)
        self.curve = _spread(self._measured_curve())

    def measured(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took so long."""
        if self._fixed or not _KNOTS[0] <= rows <= _KNOTS[-1]:
            return
        knot = bisect_left(_KNOTS, rows)
        if knot and rows - _KNOTS[knot - 1] < _KNOTS[knot] - rows:
            knot -= 1
        seconds *= self._start[knot] / _between(self._start, rows)
        relative = self._relative[knot]
        if self._unit is None:
            self._unit = seconds / relative
        surprise = min(max(seconds / (relative * self._unit), 1 / self._HELD_UP), self._HELD_UP)
        self._unit *= surprise ** (self._UNIT_PACE if knot else self._PLAIN_PACE)
        if knot:
            self._relative[knot] = relative * surprise**self._PACE
        self._seen += 1
        if self._seen % self._EVERY == 0:
            self.curve = _spread(self._measured_curve())

    def _measured_curve(self) -> list[float]:
        """More rows are never cheaper, and never free: noise must not say so."""
        out = [1.0]
        for relative in self._relative[1:]:
            out.append(max(relative, out[-1] * 1.002))
        return out


def paying(
    chances: Sequence[float], curve: Sequence[float], rows: int, tokens: float, *, overhead: float = 0.0
) -> tuple[int, float]:
    """How many guesses of falling chances give the most tokens per time, and what they bring.

    They come beside `rows` rows that the forward has anyway and that bring `tokens`. `overhead` is what any guess at
    all costs, in plain steps. Beyond the end of the curve rows cost what its last one does.
    """
    last = len(curve) - 1
    kept, won, best = 0, 0.0, tokens / curve[min(rows, last)]
    expected = tokens
    for count, chance in enumerate(chances, start=1):
        expected += chance
        rate = expected / (curve[min(rows + count, last)] + overhead)
        if rate > best:
            kept, won, best = count, expected - tokens, rate
    return kept, won


def _between(curve: Sequence[float], rows: int) -> float:
    """The curve at any number of rows within the knots, linear between two of them."""
    high = bisect_left(_KNOTS, rows)
    if _KNOTS[high] == rows:
        return curve[high]
    low = high - 1
    share = (rows - _KNOTS[low]) / (_KNOTS[high] - _KNOTS[low])
    return curve[low] + share * (curve[high] - curve[low])


def _spread(curve: Sequence[float]) -> list[float]:
    return [0.0, *(_between(curve, rows) for rows in range(1, _KNOTS[-1] + 1))]
