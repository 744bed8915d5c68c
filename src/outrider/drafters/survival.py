"""How far a match carries: the chance that what followed once follows again, by the length of the match."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Survival"]


class Survival:
    """How often a match of m tokens goes on for one token more: what is usual, and what this text has shown.

    A guess that came true makes the match before the next guess one token longer, so one table serves all depths.
    """

    # Measured on the target's own answers to 700 prompts (code, mathematics, questions, summaries; `train answers`).
    _USUAL = (
        *(0.0, 0.24, 0.50, 0.60, 0.66, 0.70, 0.74, 0.76, 0.80, 0.83, 0.84, 0.86, 0.87),
        *(0.875, 0.89, 0.905, 0.92, 0.92, 0.925, 0.93, 0.935, 0.94, 0.94, 0.945, 0.95),
    )
    LONGEST = len(_USUAL) - 1  # longer matches count as this
    _CLASSES = (1, 2, 3, 4, 6, 9, 16)  # first length of each class that is counted together
    _WEIGHT = 8.0  # observations that the usual table counts for, at first
    _FADE = 0.98  # what all that came before still counts for after an observation of the same class

    def __init__(self) -> None:
        self._right = [0.0] * len(self._CLASSES)
        self._seen = [0.0] * len(self._CLASSES)
        self._usual = [self._WEIGHT] * len(self._CLASSES)

    def chance(self, match: int) -> float:
        """That the token after a match of `match` >= 1 tokens is the one that followed before."""
        match = min(match, self.LONGEST)
        kind = bisect_right(self._CLASSES, match) - 1
        usual = self._usual[kind]
        return (usual * self._USUAL[match] + self._right[kind]) / (usual + self._seen[kind])

    def saw(self, match: int, guesses: int, right: int) -> None:
        """Of `guesses` behind a match of `match` tokens the first `right` came true; the next one, if any, did not."""
        for length in range(match, match + min(right + 1, guesses)):
            kind = bisect_right(self._CLASSES, length) - 1
            self._seen[kind] = self._FADE * self._seen[kind] + 1
            self._right[kind] = self._FADE * self._right[kind] + (length < match + right)
            self._usual[kind] *= self._FADE

    def reaches(self, match: int, guesses: int) -> list[float]:
        """The chance of each of so many guesses behind a match that it and all before it are right. [guesses]"""
        reached, out = 1.0, []
        for length in range(match, match + guesses):
            reached *= self.chance(length)
            out.append(reached)
        return out
