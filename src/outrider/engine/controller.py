"""How much of the drafts is worth checking, and whether drafting pays at all: expected tokens per second.

Costs and acceptance are measured while texts are written (Liu et al. 2024, SmartSpec: goodput; Leviathan et al. 2023,
section 3.3, with a chance for each guess and a cost for each number of rows). Nothing here can be seen in a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.costs import Costs, paying
from outrider.engine.transitions import Figures, Transitions

__all__ = ["Controller", "Drafted"]

_FIRST_REST = 64  # steps


@dataclass(slots=True)
class Drafted:
    """What one drafter did in a step."""

    name: str
    seconds: float  # of `propose`
    trees: Sequence[Tree]  # as they were checked
    accepted: Sequence[int]  # guesses of each that came true


@dataclass(slots=True)
class _Record:
    """What is known of one drafter."""

    gain: float = 0.0  # seconds saved per second of plain decoding, lately
    steps: int = 0  # since it was switched on
    rest: int = 0  # steps until it may try again
    next_rest: int = _FIRST_REST
    claimed: float = 4.0  # guesses that it said would come true, and those that did
    came_true: float = 4.0
    # by depth: the share of the last steps that guessed so deep, and that were right so far
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)


class Controller:
    """Cuts drafts to what pays, and sends a drafter to rest that does not.

    With `live` false, costs are the usual ones, chances are taken as they are, drafts without chances are left whole,
    and no drafter rests: the same steps in every run.
    """

    _OVERHEAD = 0.01  # of a plain step: what verifying any guess costs beside the rows
    _TRIAL = 16  # steps before a drafter is judged
    _LOSS = -0.08  # gain below which it rests
    _LONGEST_REST = 2048
    _PACE = 0.06
    _VERDICT = 0.03  # how fast the gain follows: a step brings 0 to 5 tokens, and its mean is what counts
    _FORGET = 0.995
    _BASELINE, _LOOKS = 128, 2  # steps between looks at plain decoding, and plain steps of each

    def __init__(self, costs: Costs, *, live: bool = True, transitions: Transitions | None = None) -> None:
        self.live = live
        self.costs = costs
        self._transitions = transitions or Transitions()
        self._steps = 0
        self._records: dict[str, _Record] = {}
        self._drafted_steps = self._BASELINE - 8  # since the last look at plain decoding: the first one comes soon
        self._looks = 0

    def rests(self, name: str) -> bool:
        """Whether this drafter is not to be asked in this step."""
        return self.live and self._record(name).rest > 0

    def choose(self, trees: Sequence[Tree | None], names: Sequence[str | None], rows: int) -> list[Tree | None]:
        """The part of each tree with which the step is expected to give the most tokens per second.

        `rows` are fed in any case: prefill chunks and the trees' roots. `names` are the drafters; None where the text
        depends on the guesses (rejection), so that nothing that was measured may choose them.
        """
        out = list(trees)
        open_ = []
        for index, (tree, name) in enumerate(zip(trees, names, strict=True)):
            if tree is None or not tree.guesses:
                continue
            if name is None:
                if tree.chances is not None:
                    (out[index],) = self._best([tree], [tree.chances], self.costs.assumed, 1, 1.0)
            elif self.live and self._drafted_steps >= self._BASELINE:
                out[index] = tree.cut(0)
            else:
                open_.append((index, tree, self._chances(tree, name)))
        if not open_:
            return out
        judged = [(index, tree, chances) for index, tree, chances in open_ if chances is not None]
        tokens = float(sum(tree is not None for tree in trees))
        best = self._best([t for _, t, _ in judged], [c for _, _, c in judged], self.costs.curve, rows, tokens)
        for (index, _, _), tree in zip(judged, best, strict=True):
            out[index] = tree
        return out

    def _best(
        self,
        trees: Sequence[Tree],
        chances: Sequence[Sequence[float]],
        curve: Sequence[float],
        rows: int,
        tokens: float,
    ) -> list[Tree]:
        """The likeliest nodes of all trees, as many as pay beside `rows` rows that bring `tokens` tokens anyway."""
        ranked = sorted((chance for each in chances for chance in each[1:]), reverse=True)
        count, _ = paying(ranked, curve, rows, tokens, overhead=self._OVERHEAD)
        if count == len(ranked):
            return list(trees)
        floor = ranked[count - 1] if count else math.inf
        return [_above(tree, each, floor) for tree, each in zip(trees, chances, strict=True)]

    def record(self, rows: int, prefill: bool, seconds: float, drafts: Iterable[Drafted]) -> None:
        """A step is done: `rows` with all guesses, `seconds` of its forward."""
        self._steps += 1
        if not self.live:
            return
        drafts = list(drafts)
        guesses = sum(tree.guesses for draft in drafts for tree in draft.trees)
        if guesses:
            self._drafted_steps += 1
        else:
            self._looks += 1
            if self._looks >= self._LOOKS:
                self._drafted_steps = self._looks = 0
        if not prefill:
            self.costs.measured(rows, seconds)
        plain = rows - guesses
        row = (self.costs.cost(rows) - self.costs.cost(plain)) / guesses if guesses else 0.0
        for draft in drafts:
            record = self._record(draft.name)
            self._learn(record, draft)
            if self.costs.unit is not None:
                alone = self.costs.cost(plain) / plain * len(draft.trees)  # plain decoding for the same texts, in steps
                spent = draft.seconds / self.costs.unit + row * sum(tree.guesses for tree in draft.trees)
                tokens = 1 + sum(draft.accepted) / len(draft.trees)
                self._judge(record, draft, tokens - 1 - spent / alone)
        for record in self._records.values():
            record.rest -= record.rest > 0

    def _judge(self, record: _Record, draft: Drafted, gain: float) -> None:
        record.steps += 1
        record.gain += max(self._VERDICT, 1 / record.steps) * (gain - record.gain)
        if record.steps < self._TRIAL:
            return
        if record.gain < self._LOSS:
            record.rest, record.next_rest = record.next_rest, min(2 * record.next_rest, self._LONGEST_REST)
            record.steps = 0
            record.right, record.tried = [], []
            self._transitions.change(
                draft.name, "plain", "does not pay", self._steps, len(draft.trees), Figures(1 + record.gain)
            )
            return
        self._transitions.change(
            draft.name, "speculative", "pays again", self._steps, len(draft.trees), Figures(1 + record.gain)
        )
        if record.gain > -self._LOSS:
            record.next_rest = _FIRST_REST

    def _learn(self, record: _Record, draft: Drafted) -> None:
        for tree, accepted in zip(draft.trees, draft.accepted, strict=True):
            if tree.chances is not None:
                record.claimed += self._PACE * (sum(tree.chances[1:]) - record.claimed * bool(tree.guesses))
                record.came_true += self._PACE * (accepted - record.came_true * bool(tree.guesses))
                continue
            deepest = max(tree.depths())
            record.right += [0.0] * (deepest - len(record.right))
            record.tried += [0.0] * (deepest - len(record.tried))
            for depth in range(len(record.tried)):
                if depth < deepest:
                    record.right[depth] += self._PACE * ((accepted > depth) - record.right[depth])
                    record.tried[depth] += self._PACE * (1 - record.tried[depth])
                else:  # what is not tried is forgotten, and tried again by and by
                    record.right[depth] *= self._FORGET
                    record.tried[depth] *= self._FORGET

    def _chances(self, tree: Tree, name: str) -> Sequence[float] | None:
        """The chance of each node; None where the tree is to be left as it is. [N]"""
        if tree.chances is None:
            return self._by_depth(tree, self._record(name)) if self.live else None
        if not self.live:
            return tree.chances
        record = self._record(name)
        honesty = min(record.came_true / record.claimed, 1.5)
        return [1.0, *(min(1.0, chance * honesty) for chance in tree.chances[1:])]

    def _by_depth(self, tree: Tree, record: _Record) -> list[float]:
        """What is usual at each depth, shared by the nodes there; three in four, where nothing is known yet. [N]"""
        depths = tree.depths()
        reached, shared, widest = 1.0, [1.0], 1
        for depth in range(1, max(depths) + 1):
            known = depth <= len(record.tried)
            right, tried = (record.right[depth - 1], record.tried[depth - 1]) if known else (0.0, 0.0)
            reached = min(reached, right + (1 - tried) * 0.75 * reached)
            widest = max(widest, depths.count(depth))
            shared.append(reached / widest)
        return [shared[depth] for depth in depths]

    def _record(self, name: str) -> _Record:
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record()
            self._transitions.begin(name, "speculative")
        return record


def _above(tree: Tree, chances: Sequence[float], floor: float) -> Tree:
    """The nodes whose chance reaches the floor; none without its parent."""
    keep = [0]
    kept = {0}
    for node in range(1, len(tree)):
        if chances[node] >= floor and tree.parents[node] in kept:
            keep.append(node)
            kept.add(node)
    return tree if len(keep) == len(tree) else tree.select(keep)
