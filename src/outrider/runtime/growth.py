"""Grows draft trees over any runner, level by level: the contract, and the plain way that native code must agree with.

Under match verification (Li et al. 2024, EAGLE-2, section 4): each node of a level gets its likeliest children, the
best `width` of all the level's children are fed next, and the `guesses` best nodes of all that were found are the
tree. At T > 0 children are the draft's own draws with the target's noise.

Under rejection a node's children are drawn without replacement with the draft's own noise. How many is known before
they are drawn, from their law and from the way to the node: as many as may come to stand often enough. Nothing that was
drawn is left out again. What grows behind a guess may hang on it, for the guess itself is tested all the same.

Letters: V vocabulary of the target, F floats of the target's states at a row (W * D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core import noise, sampling
from outrider.core.cache import Pages, Rows
from outrider.core.sampling import DrawError
from outrider.core.shaping import Shaping
from outrider.core.tree import Law, Tree
from outrider.core.verify import draw_children
from outrider.runtime.runner import Feed, Scores

__all__ = ["Grower", "Plan", "Sprout", "grow", "siblings", "standing"]

_GOLDEN = 0x9E3779B97F4A7C15  # sets the noise of nodes at one depth apart


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of trees, the same for all sequences of a call."""

    vocabulary: int  # V
    width: int = 1  # children of a node, and nodes of a level that are fed
    least: float = 0.0  # match only: a node with less confidence than this is not kept
    reach: float = 0.0  # a level is grown only if its parents are reached with this chance, together
    gain: float = 0.1  # rejection only: a child is drawn if it comes to stand with this chance
    layers: tuple[int, ...] = ()  # of the model; none given: all

    def rows(self, guesses: int, depth: int) -> int:
        """Cache rows that a tree needs behind the pending ones."""
        return max(guesses, (depth - 1) * self.width)


@dataclass(slots=True)
class Sprout:
    """One sequence. Rows are reserved: the pending ones and `Plan.rows` behind them. Nothing is committed.

    `pending` are the text's tokens from `rows.length` on, at least the last one, the root. Without guesses they are fed
    and nothing is grown. A head that reads the target's states gets those of the rows, one row earlier than the token
    that stands beside them: [pending, F].
    """

    rows: Rows
    pending: Sequence[int]
    shaping: Shaping
    guesses: int
    depth: int
    rejection: bool = False
    states: NDArray[np.float32] | None = None


class Grower(Protocol):
    """What guesses: a runner of a draft model, of the target's own layers, or of a head."""

    pages: Pages

    def grow(self, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
        """A tree per sprout in the target's tokens, with chances under match. Broken logits end its growth, no more."""
        ...

    def memory(self) -> dict[str, int]: ...


def grow(score: Callable[[list[Feed], list[Sprout]], Scores], batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
    """`Grower.grow` by whole forwards: the tree is fed anew at each level. `score` gives logits [V]."""
    growths = [_Growth(sprout, plan) for sprout in batch]
    live = list(range(len(batch)))
    while live:
        feeds = [Feed(batch[i].rows, batch[i].pending, growths[i].fed()) for i in live]
        scores = score(feeds, [batch[i] for i in live])
        for index, i in enumerate(live):
            growths[i].extend(scores, index)
        live = [i for i in live if growths[i].choose()]
    return [growth.tree() for growth in growths]


@dataclass(slots=True)
class _Node:
    parent: int
    token: int
    confidence: float  # log, of the whole path
    depth: int
    path: tuple[int, ...] = ()
    fed: int = -1  # in the order of feeding


@dataclass(slots=True)
class _Growth:
    sprout: Sprout
    plan: Plan
    nodes: list[_Node] = field(init=False)
    order: list[int] = field(init=False)  # nodes in the order of feeding
    laws: dict[int, Law] = field(init=False)
    fresh: int = 0  # fed nodes before this level
    level: int = 0

    def __post_init__(self) -> None:
        self.nodes = [_Node(-1, self.sprout.pending[-1], 0.0, 0, fed=0)]
        self.order, self.laws = [0], {}

    def fed(self) -> Tree | None:
        """The nodes that are fed; None where nothing is wanted but the rows."""
        if self.sprout.guesses <= 0:
            return None
        nodes = [self.nodes[i] for i in self.order]
        parents = tuple(-1 if n.parent < 0 else self.nodes[n.parent].fed for n in nodes)
        return Tree(tuple(n.token for n in nodes), parents)

    def extend(self, scores: Scores, feed: int) -> None:
        """Children of the nodes that this level fed."""
        if self.sprout.guesses <= 0 or self.level >= self.sprout.depth:
            return
        for place in range(self.fresh, len(self.order)):
            logits = self._fit(scores.logits(feed, place))
            try:
                self.nodes += (self._sample if self.sprout.rejection else self._rank)(logits, place)
            except DrawError:  # the draft's own logits are broken
                continue

    def choose(self) -> bool:
        """Feed the best nodes of the next level. Whether there are any that are worth a forward."""
        sprout = self.sprout
        self.level += 1
        self.fresh = len(self.order)
        if sprout.guesses <= 0 or self.level >= sprout.depth:
            return False
        found = [i for i, node in enumerate(self.nodes) if node.depth == self.level]
        found = self._best(found)[: self.plan.width]
        if not self._worth(found):
            return False
        for i in found:
            self.nodes[i].fed = len(self.order)
            self.order.append(i)
        return bool(found)

    def tree(self) -> Tree:
        kept = list(range(1, len(self.nodes)))
        if len(kept) > self.sprout.guesses:
            # a parent is never less likely than its child and comes before it, so the first of this order are a tree
            kept = sorted(self._best(kept)[: max(0, self.sprout.guesses)])
        kept = [0, *kept]
        place = {node: index for index, node in enumerate(kept)}
        nodes = [self.nodes[i] for i in kept]
        return Tree(
            tuple(n.token for n in nodes),
            tuple(-1 if n.parent < 0 else place[n.parent] for n in nodes),
            {place[i]: law for i, law in self.laws.items() if i in place},
            # under rejection what is checked must not depend on what was drawn
            None if self.sprout.rejection else tuple(math.exp(n.confidence) for n in nodes),
        )

    def _best(self, nodes: Sequence[int]) -> list[int]:
        return sorted(nodes, key=lambda i: -self.nodes[i].confidence)

    def _worth(self, found: Sequence[int]) -> bool:
        """Whether children of these may enter the tree, and are reached often enough to pay for a forward."""
        if not found or sum(math.exp(self.nodes[i].confidence) for i in found) < self.plan.reach:
            return False
        if self.sprout.rejection:
            return self._left() > 0
        best = self.nodes[found[0]].confidence
        return sum(node.confidence >= best for node in self.nodes[1:]) < self.sprout.guesses

    def _left(self) -> int:
        """Guesses that may still be made."""
        return self.sprout.guesses - (len(self.nodes) - 1)

    def _fit(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A row over the target's vocabulary, whatever the draft's is padded to. [V]"""
        row = np.full(self.plan.vocabulary, -np.inf, np.float32)
        size = min(len(logits), len(row))
        row[:size] = logits[:size]
        return row

    def _rank(self, logits: NDArray[np.float32], place: int) -> list[_Node]:
        shaping, parent, width = self.sprout.shaping, self.order[place], self.plan.width
        node = self.nodes[parent]
        floor = math.log(self.plan.least) if self.plan.least > 0 else -math.inf
        made = [
            _Node(parent, token, node.confidence + sure, node.depth + 1, (*node.path, token))
            for token, sure in sampling.ranked(logits, width, shaping, node.path)
        ]
        return [child for child in made if child.confidence >= floor]

    def _sample(self, logits: NDArray[np.float32], place: int) -> list[_Node]:
        shaping, parent = self.sprout.shaping, self.order[place]
        node = self.nodes[parent]
        law = sampling.draft_law(logits, shaping, node.path)
        reach = math.exp(node.confidence)
        count = min(siblings(law, reach, self.plan.gain), self.plan.width, self._left())
        if not count:
            return []
        gumbel = noise.gumbel(
            # nodes of one depth share the position, so their place in the tree gives each its own noise
            shaping.seed ^ (parent * _GOLDEN & (2**64 - 1)),
            len(shaping.tokens) + len(node.path),
            np.arange(len(law), dtype=np.int64),
            noise.DRAFT,
        )
        self.laws[parent] = law
        drawn = draw_children(law, count, gumbel)
        return [
            _Node(parent, token, math.log(stands), node.depth + 1, (*node.path, token))
            for token, stands in zip(drawn, standing(law, reach, drawn), strict=True)
        ]


def siblings(law: Law, reach: float, gain: float) -> int:
    """How many children to draw under rejection at a node that is reached with this chance: each comes to stand with
    the chance `gain` or more. Depends on the law and not on what is drawn from it. [V]

    A token that the draft drew with chance q is taken to stand with the chance sqrt(q): nearer to one than q, for the
    draft was taught by the target. Only the shape of trees hangs on that.
    """
    usual = float((law * np.sqrt(law)).sum())  # the chance that a child stands
    stands, count = reach * usual, 0
    while stands >= gain and count < len(law):
        count, stands = count + 1, stands * (1 - usual)
    return count


def standing(law: Law, reach: float, drawn: Sequence[int]) -> list[float]:
    """The chance that each of these children, drawn one after the other, comes to stand. [V]"""
    out, left, tested = [], 1.0, reach  # left: mass of the law; tested: chance that the earlier ones are refused
    for token in drawn:
        stands = math.sqrt(min(1.0, float(law[token]) / left))
        out.append(tested * stands)
        left, tested = max(left - float(law[token]), 1e-9), max(tested * (1 - stands), 1e-9)
    return out
