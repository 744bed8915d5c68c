"""What claims are worth: how often guesses come true, of those whose parent did, by what was claimed of them.

A head is trained for its probabilities, and the target's choice at temperature 0 is another thing: what is claimed with
0.4 may come true in 60 % of cases, and what is claimed with 0.05 in 4 %. So the claims are not multiplied with one
number: a curve is learned, straight between knots, from each guess whose parent was right. Depth needs no curves of its
own: measured with the shipped heads, equal claims are worth the same at each.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.tree import Tree

__all__ = ["Agreement", "Calibration", "share"]


class Calibration:
    """Of one kind of guesses. Begins by believing each claim."""

    _STEPS = 10  # between the knots 0, 1/10 ... 1
    _TRUST = 6.0  # observations near a knot that the first belief counts for
    _LEAST = 0.01  # how fast a knot follows an observation, however many came before
    _SURE = 0.995  # nothing is surer

    __slots__ = ("_knots", "_pace")

    def __init__(self) -> None:
        self._knots = [min(step / self._STEPS, self._SURE) for step in range(self._STEPS + 1)]
        self._pace = [1 / self._TRUST] * (self._STEPS + 1)

    def chance(self, claimed: float) -> float:
        """That a guess comes true once its parent did."""
        place = claimed * self._STEPS
        low = min(int(place), self._STEPS - 1)
        below = self._knots[low]
        return below + (place - low) * (self._knots[low + 1] - below)

    def chances(self, tree: Tree) -> list[float]:
        """Of each node of a tree that makes claims: that it and its ancestors are right. [N]"""
        claims = tree.chances
        assert claims is not None
        out = [1.0]
        for node in range(1, len(claims)):
            parent = tree.parents[node]
            out.append(out[parent] * self.chance(share(claims, node, parent)))
        return out

    def saw(self, claimed: float, right: bool) -> None:
        """A guess whose parent was right has been judged."""
        place = claimed * self._STEPS
        low = min(int(place), self._STEPS - 1)
        high, part = low + 1, place - low
        knots = self._knots
        surprise = right - (knots[low] + part * (knots[high] - knots[low]))
        for knot, weight in ((low, 1 - part), (high, part)):
            if knot:  # nothing is claimed, nothing comes
                pace = self._pace[knot]
                knots[knot] = min(max(knots[knot] + pace * weight * surprise, 0.0), self._SURE)
                self._pace[knot] = max(pace / (1 + pace * weight * weight), self._LEAST)

    def saw_tree(self, tree: Tree, said: Sequence[int]) -> None:
        """The target wrote these tokens behind the root: of the children of each node on their way one may be right.

        So guesses are judged that were not checked too.
        """
        claims = tree.chances
        if claims is None or len(tree) == 1:
            return
        children = tree.children()
        node = 0
        for token in said:
            after = -1
            for child in children[node]:
                right = tree.tokens[child] == token
                self.saw(share(claims, child, node), right)
                if right:
                    after = child
            if after < 0:
                break
            node = after


class Agreement:
    """Of guesses where two witnesses have spoken: what both claim of one, 0 where a witness has only other guesses.

    A surface instead of a curve: bilinear between knots.
    """

    _STEPS = 5
    _TRUST = 6.0
    _LEAST = 0.01
    _SURE = 0.995

    __slots__ = ("_knots", "_pace")

    def __init__(self) -> None:
        grid = [step / self._STEPS for step in range(self._STEPS + 1)]
        self._knots = [[_usual(a, b) for b in grid] for a in grid]
        self._pace = [[1 / self._TRUST] * len(grid) for _ in grid]

    def chance(self, one: float, other: float) -> float:
        """That a guess comes true once its parent did."""
        return sum(weight * self._knots[i][j] for i, j, weight in self._around(one, other))

    def saw(self, one: float, other: float, right: bool) -> None:
        """A guess whose parent was right has been judged."""
        around = self._around(one, other)
        surprise = right - sum(weight * self._knots[i][j] for i, j, weight in around)
        for i, j, weight in around:
            if weight and (i or j):
                pace = self._pace[i][j]
                self._knots[i][j] = min(max(self._knots[i][j] + pace * weight * surprise, 0.0), self._SURE)
                self._pace[i][j] = max(pace / (1 + pace * weight * weight), self._LEAST)

    def _around(self, one: float, other: float) -> tuple[tuple[int, int, float], ...]:
        """The four knots around a place, with their weights."""
        x, y = one * self._STEPS, other * self._STEPS
        i, j = min(int(x), self._STEPS - 1), min(int(y), self._STEPS - 1)
        a, b = x - i, y - j
        return (
            (i, j, (1 - a) * (1 - b)),
            (i + 1, j, a * (1 - b)),
            (i, j + 1, (1 - a) * b),
            (i + 1, j + 1, a * b),
        )


def _usual(one: float, other: float) -> float:
    """Two that agree are nearly as good as two independent witnesses; one that stands alone loses a part."""
    if one and other:
        return min(0.995, (max(one, other) + 1 - (1 - one) * (1 - other)) / 2)
    return min(0.995, other or one * (1 + one) / 2)


def share(chances: Sequence[float], node: int, parent: int) -> float:
    """The chance of a node once its parent is right."""
    return min(1.0, chances[node] / chances[parent]) if chances[parent] > 0 else 0.0
