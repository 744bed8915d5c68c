"""How much of the drafts is worth checking, and whether drafting pays at all: expected tokens per second.

Costs and acceptance are measured while texts are written (Liu et al. 2024, SmartSpec: goodput; Leviathan et al. 2023,
section 3.3, with a chance for each guess and a cost for each number of rows). Nothing here can be seen in a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.calibration import Calibration
from outrider.drafters.costs import Costs, paying
from outrider.drafters.pace import Paces
from outrider.engine.transitions import Figures, Mode, Reason, Transitions

__all__ = ["Controller", "Drafted"]


@dataclass(slots=True)
class Drafted:
    """What one drafter did in a step."""

    name: str
    seconds: float  # of `propose`, and of its last `observe`
    texts: Sequence[int]  # the sequences that it was asked for
    trees: Sequence[Tree]  # of each, as it was checked
    accepted: Sequence[int]  # guesses of each that came true
    proposed: Sequence[Tree]  # of each, as it was drafted
    said: Sequence[Sequence[int]]  # the tokens that the target wrote behind each root


class _Floor:
    """The operator's floor on the acceptance rate: accepted guesses per checked one, over all texts of a drafter.

    A rate that comes back and soon falls again must show itself longer the next time, and waits longer for it.
    """

    _TRIAL = 24  # steps with guesses before the rate counts
    _PACE = 0.05  # how fast it follows
    _REST, _TRIES = 40, 4  # steps between trials, and steps with guesses of each
    _ABOVE = 0.05  # how far above the floor a trial must come
    _STEADY = 400  # steps with guesses over the floor after which it counts as lasting
    _PATIENCE = 16  # rest and trial grow to so many times their length

    def __init__(self, least: float) -> None:
        self.least = least
        self.holds = False  # whether the drafter is kept from drafting
        self.checked = self.accepted = 0.0  # guesses, lately
        self._steps = 0  # with guesses, since the last change
        self._wait = 0
        self._patience = 1

    @property
    def rate(self) -> float | None:
        return self.accepted / self.checked if self.checked else None

    def wanted(self) -> bool:
        return not self.holds or not self._wait

    def step(self) -> None:
        """A step begins."""
        self._wait -= self._wait > 0

    def saw(self, checked: int, accepted: int) -> None:
        """What the drafter's guesses of a step came to."""
        if not checked:
            return
        self._steps += 1
        pace = 1 / self._steps if self.holds else self._PACE
        self.checked += pace * (checked - self.checked)
        self.accepted += pace * (accepted - self.accepted)
        rate = self.accepted / self.checked
        if not self.holds:
            if self._steps == self._STEADY:
                self._patience = 1
            if self._steps >= self._TRIAL and rate < self.least:
                self.holds, self._steps, self._wait = True, 0, self._REST * self._patience
        elif self._steps >= self._TRIES * self._patience:
            self._steps, self._wait = 0, self._REST * self._patience
            if rate >= min(1.0, self.least + self._ABOVE):
                self.holds, self._wait = False, 0
                self._patience = min(2 * self._patience, self._PATIENCE)


@dataclass(slots=True)
class _Record:
    """What is known of one drafter."""

    floor: _Floor
    paces: Paces = field(default_factory=Paces)
    mode: Mode = "speculative"
    held: bool = False  # whether it is plain because of the floor
    against: int = 0  # steps in a row in which most of its texts went on in the other mode
    loaded: int = 0  # steps for which another class of load may be the reason of what changes
    calibration: Calibration = field(default_factory=Calibration)
    # by depth: the share of the last steps that guessed so deep, and that were right so far
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)


class Controller:
    """Cuts drafts to what pays, and lets a text go on plainly where no draft of its drafter does (`drafters.pace`).

    A drafter is in the mode of most of its texts. With `live` false, costs are the usual ones, chances are taken as
    they are, drafts without chances are left whole, and drafters are asked in every step: the same steps in every run.
    `least` is a floor on the acceptance rate, whatever the time says.
    """

    _OVERHEAD = 0.01  # of a plain step: what verifying any guess costs beside the rows
    _PACE = 0.06
    _FORGET = 0.995
    _BASELINE, _LOOKS = 128, 2  # steps between looks at plain decoding, and plain steps of each
    _STEADY = 8  # steps in another mode that make a change of it
    _LOADED = 64  # steps for which a change of load is the reason of what changes

    def __init__(
        self, costs: Costs, transitions: Transitions | None = None, *, live: bool = True, least: float = 0.0
    ) -> None:
        self.live = live
        self.costs = costs
        self._least = least
        self._transitions = transitions or Transitions()
        self._records: dict[str, _Record] = {}
        self._steps = 0
        self._drafted_steps = self._BASELINE - 8  # since the last look at plain decoding: the first one comes soon
        self._looks = 0

    def begin(self, names: Iterable[str], texts: int) -> None:
        """A step with `texts` sequences begins, and these drafters have some of them."""
        self._steps += 1
        self.costs.texts = texts
        for name in names:
            record = self._record(name)
            record.floor.step()
            if record.paces.step(texts):
                record.loaded = self._LOADED

    def wants(self, name: str, text: int) -> bool:
        """Whether the drafter is to be asked for this text in this step. Call once per step."""
        record = self._record(name)
        return record.floor.wanted() and (not self.live or record.paces.wanted(text))

    def near(self, name: str, text: int, *, prompt: bool = False) -> bool:
        """Whether the drafter is to look at the text, or at its prompt: it is asked soon, or may be one day."""
        if not self.live:
            return True
        pace = self._record(name).paces.of(text)
        return pace.hopeful if prompt else pace.near

    def forget(self, name: str, text: int) -> None:
        """The text is gone, or goes on without the drafter."""
        if name in self._records:
            self._records[name].paces.forget(text)

    def failed(self, name: str, texts: int) -> None:
        """The drafter has raised an exception."""
        self._change(name, self._record(name), "plain", "drafter failed", texts)

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
        drafts = list(drafts)
        for draft in drafts:
            self._record(draft.name).floor.saw(sum(tree.guesses for tree in draft.trees), sum(draft.accepted))
        if not self.live:
            return
        guesses = sum(tree.guesses for draft in drafts for tree in draft.trees)
        looked = self._drafted_steps >= self._BASELINE
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
            if self.costs.unit is None or looked:
                continue
            alone = self.costs.cost(plain) / self.costs.texts  # what a plain step takes for one text
            spent = draft.seconds / self.costs.unit / len(draft.trees)
            for text, tree, accepted in zip(draft.texts, draft.trees, draft.accepted, strict=True):
                record.paces.saw(text, accepted, (spent + row * tree.guesses) / alone)

    def settle(self, drafting: Iterable[tuple[str, Sequence[int]]]) -> None:
        """A step is done, and these drafters had these texts in it, asked or not: is it time for another mode?"""
        for name, texts in drafting:
            record = self._record(name)
            record.loaded -= record.loaded > 0
            on = 0 if record.floor.holds else len(texts)
            if on and self.live:
                on = sum(record.paces.of(text).on for text in texts)
            mode: Mode = "speculative" if 2 * on > len(texts) else "plain"
            if mode == record.mode:
                record.against = 0
                continue
            record.against += 1
            if record.against >= self._STEADY:
                self._change(name, record, mode, self._reason(record, mode), len(texts))

    def _reason(self, record: _Record, mode: Mode) -> Reason:
        floor = record.floor
        if floor.holds:
            return "acceptance under the floor"
        if record.held:
            return "acceptance over the floor"
        if record.loaded:
            return "load"
        return "pays again" if mode == "speculative" else "does not pay"

    def _change(self, name: str, record: _Record, mode: Mode, reason: Reason, texts: int) -> None:
        record.mode, record.against, record.held = mode, 0, record.floor.holds
        speedup = plain = None
        if self.live and self.costs.unit is not None:
            speedup = record.paces.usual.speedup
            plain = self.costs.texts / (self.costs.cost(self.costs.texts) * self.costs.unit)
        figures = Figures(speedup, record.floor.rate, plain and speedup and plain * speedup, plain)
        self._transitions.change(name, mode, reason, self._steps, texts, figures)

    def _learn(self, record: _Record, draft: Drafted) -> None:
        for tree, said in zip(draft.proposed, draft.said, strict=True):
            record.calibration.saw_tree(tree, said)
        for tree, accepted in zip(draft.trees, draft.accepted, strict=True):
            if tree.chances is not None:
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
        return self._record(name).calibration.chances(tree)

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
            record = self._records[name] = _Record(_Floor(self._least))
            self._transitions.begin(name, record.mode)
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
