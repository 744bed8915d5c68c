"""How far a chain of guesses gets: measured on texts that are known to the end."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.train.loop import Acceptance

__all__ = ["ChainCount"]


class ChainCount:
    """Counts over many texts. Depth d of root t is right if the guess of x_{t + 1 + d} was, all before it given."""

    def __init__(self, depth: int, top: int = 8) -> None:
        self.depth = depth
        self._right = np.zeros(depth)
        self._asked = np.zeros(depth)
        self._steps = self._tokens = 0
        self._top = np.zeros(top)
        self._loss = self._losses = 0.0

    def add(self, right: NDArray[np.bool_], left: NDArray[np.int64]) -> None:
        """One text: `right` [roots, depth] in order, `left` [roots] tokens after each root (the last root has 1)."""
        chain = np.logical_and.accumulate(right, axis=1)
        asked = left[:, None] > np.arange(1, self.depth + 1)[None, :]
        self._right += (chain & asked).sum(0)
        self._asked += asked.sum(0)
        accepted = (chain & asked).sum(1)
        # the walk of a decoder: a root, the guesses that hold, and the target's own token after them
        root = 0
        while root < len(right) and left[root] > 1:
            step = int(accepted[root])
            self._steps += 1
            self._tokens += min(step + 1, int(left[root]) - 1)
            root += step + 1

    def add_ranks(self, ranks: Iterable[int]) -> None:
        """Ranks of the right tokens at depth 1, from 0; anything high for a token outside the draft vocabulary."""
        for rank in ranks:
            if rank < len(self._top):
                self._top[rank] += 1

    def add_loss(self, total: float, rows: int) -> None:
        self._loss += total
        self._losses += rows

    def acceptance(self) -> Acceptance:
        shares = tuple(float(r / max(1.0, a)) for r, a in zip(self._right, self._asked, strict=True))
        top = tuple(float(value) for value in np.cumsum(self._top) / max(1.0, self._asked[0]))
        return Acceptance(shares, self._tokens / max(1, self._steps), top, self._loss / max(1.0, self._losses))
