"""The default: per step, the guesses that pay most, from the text itself, from a learned head, from both or from none.

What stood before in the text is looked up at no cost (`suffix`); a head that fits the target (`eagle`) guesses what is
new, and costs time. Both say how likely each of their guesses is. The head is asked where it is expected to raise
tokens per second: by what it has been worth lately, what the suffix match leaves for it to win, what it and the rows
cost. The two trees are merged, and the likeliest nodes are kept for as long as they raise tokens per second.
(Combining by length of match: Hu et al. 2024, SAM-Decoding, section 3.4; here both sides are weighed by probability.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.core.tree import Tree
from outrider.drafters import registry
from outrider.drafters.base import Context, Drafter, DrafterError, Observation, PricedOptions, Request, SelfPaced
from outrider.drafters.costs import paying
from outrider.drafters.suffix import Guesses, Suffix, SuffixOptions

__all__ = ["DRAFTER"]

_HEAD = "eagle"
_BOTH = f"{Suffix.name}+{_HEAD}"
_REACH = 0.35
_LEAST = 0.03  # a guess less likely than this is not worth its row anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions(PricedOptions):
    max_draft_tokens: int = field(default=32, metadata={"help": "guesses per step at most; fewer where it pays"})
    head: str = field(
        default="", metadata={"help": "folder of an EAGLE head; empty: the one shipped for the model, if any; none: no"}
    )
    memory_mb: float = field(
        default=0.0,
        metadata={"help": "memory for what earlier requests were answered, whoever asked; the oldest half goes first"},
    )


class Auto(SelfPaced):
    name = "auto"
    summary = "per step the best of suffix matches and a learned head, merged into one tree where that pays"
    needs = "nothing; better with a head for the model"
    helps = "everything; it falls back to plain decoding where nothing pays"
    Options = AutoOptions

    _WORTH = 1.3  # tokens that a head's tree is expected to bring before the first one
    _PACE = 0.1  # how fast expectations follow
    _RETURN = 0.02  # how fast they return to the usual while the head is not asked
    _AGREEING = 1.5  # what its tree is worth beside a first guess that is wrong, and more: two witnesses are surer
    _HEAD_COST = 0.3  # of a head's tree, in plain steps, before the first one

    def __init__(self, options: AutoOptions, context: Context) -> None:
        self.options = options
        self._suffix = Suffix(_suffix_options(options), context)
        self._costs = self._suffix.costs
        self._head = _head(options, context)
        self.wants: tuple[int, ...] = self._head.wants if self._head else ()
        self._worth: dict[int, float] = {}  # by text, tokens expected of the head's trees beyond the plain one
        self._usual = self._WORTH
        self._head_cost = self._HEAD_COST  # of a tree, in plain steps

    @classmethod
    def forecast(cls, options: AutoOptions, context: Context) -> dict[str, int]:
        head = Suffix.forecast(_suffix_options(options), context)
        return {**head, **_forecast_head(options, context)}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        looked_up = [self._suffix.candidates(request) for request in batch]
        asked = [i for i, request in enumerate(batch) if self._asks(request, looked_up[i], len(batch))]
        trees: list[Tree | None] = [None] * len(batch)
        if asked and self._head is not None:
            began = time.perf_counter()
            for i, grown in zip(asked, self._head.propose([batch[i] for i in asked]), strict=True):
                trees[i] = grown
            self._measure(time.perf_counter() - began)
        rows, gain = len(batch), float(len(batch))
        out: list[Tree] = []
        for request, guesses, tree in zip(batch, looked_up, trees, strict=True):
            if tree is not None and tree.guesses and tree.chances is None:
                # drawn guesses stand alone: a law covers all children of its node
                out.append(replace(tree, sources=(_HEAD,) * len(tree)))
            else:
                sources = (Suffix.name,) * len(guesses.tokens)
                if tree is not None and tree.chances is not None:
                    self._learn(request, tree.chances)
                    guesses, sources = _merged(guesses, tree, tree.chances)
                kept, won = self._paying(request, guesses, sources, rows, gain)
                gain += won
                out.append(kept)
            rows += out[-1].guesses
        return out

    def observe(self, step: Sequence[Observation]) -> None:
        if self._head is not None:
            self._head.observe(step)

    def forget(self, sequence: int) -> None:
        self._suffix.forget(sequence)
        self._worth.pop(sequence, None)
        if self._head is not None:
            self._head.forget(sequence)

    def memory(self) -> dict[str, int]:
        return {**self._suffix.memory(), **(self._head.memory() if self._head else {})}

    def _curve(self, request: Request) -> Sequence[float]:
        # under rejection the text depends on the guesses: only what is the same in every run may choose them
        return self._costs.assumed if request.rejection else self._costs.curve

    def _asks(self, request: Request, guesses: Guesses, batch: int) -> bool:
        """Whether the head is expected to raise tokens per second, beside what was looked up."""
        if self._head is None or request.budget <= 0:
            return False
        curve = self._curve(request)
        count, won = _best(sorted(guesses.chances[1:], reverse=True), curve, batch, float(batch), request.budget)
        alone = (batch + won) / curve[min(batch + count, len(curve) - 1)]
        first = sum(c for c, parent in zip(guesses.chances, guesses.parents, strict=True) if parent == 0)
        head = self._usual if request.rejection else self._worth.get(request.id, self._usual)
        # where the first guess that was looked up is right, the head would mostly have said the same
        both = batch + won + max(0.0, 1.0 - first) * head * self._AGREEING
        cost = self._HEAD_COST if request.rejection else self._head_cost
        rows = min(batch + max(count, 8), len(curve) - 1)
        if both / (curve[rows] + cost) > alone:
            return True
        # not asked, it cannot show that it has become better or cheaper: expectations go back to the first ones, slowly
        worth = self._worth.get(request.id)
        if worth is not None:
            self._worth[request.id] = worth + self._RETURN * (self._usual - worth)
        self._usual += self._RETURN / 10 * (self._WORTH - self._usual)
        self._head_cost += self._RETURN * (self._HEAD_COST - self._head_cost)
        return False

    def _measure(self, seconds: float) -> None:
        """What a head's tree took, in plain steps. One that also fed much of the text counts as half as dear again."""
        unit = self._costs.unit
        if unit is not None:
            self._head_cost += self._PACE * (min(seconds / unit, 1.5 * self._head_cost) - self._head_cost)

    def _learn(self, request: Request, chances: Sequence[float]) -> None:
        """What the head expects of its own tree: in this text, and in texts at large."""
        expected = sum(chances[1:])
        worth = self._worth.get(request.id, self._usual)
        self._worth[request.id] = worth + self._PACE * (expected - worth)
        self._usual += self._PACE / 10 * (expected - self._usual)

    def _paying(
        self, request: Request, guesses: Guesses, sources: tuple[str, ...], rows: int, gain: float
    ) -> tuple[Tree, float]:
        """The tree of the likeliest nodes, as many as pay, and the tokens that it is expected to bring."""
        chances = guesses.chances
        # a child is never likelier than its parent, and comes after it: the first of this order are a tree
        order = sorted(range(1, len(chances)), key=lambda node: -chances[node])
        most = min(request.budget, self.options.max_draft_tokens)
        count, won = _best([chances[node] for node in order], self._curve(request), rows, gain, most)
        tree = replace(guesses.tree(), sources=sources)
        return (tree if count == tree.guesses else tree.select([0, *sorted(order[:count])])), won


def _best(chances: Sequence[float], curve: Sequence[float], rows: int, gain: float, most: int) -> tuple[int, float]:
    """`paying` within `most` guesses and the rows whose cost is known."""
    return paying(chances[: max(0, min(most, len(curve) - 1 - rows))], curve, rows, gain)


def _merged(looked_up: Guesses, tree: Tree, chances: Sequence[float]) -> tuple[Guesses, tuple[str, ...]]:
    """One tree of both, from the root down, each guess with the chance that both sides give it together.

    And which side guessed each node.
    """
    own, theirs = _children(looked_up.parents), _children(tree.parents)
    out = Guesses([looked_up.tokens[0]], [-1], [1.0])
    sources = [""]
    left: deque[tuple[int, int | None, int | None]] = deque([(0, 0, 0)])  # a node, and where it stands on each side
    while left:
        node, here, there = left.popleft()
        one = {} if here is None else {looked_up.tokens[child]: child for child in own[here]}
        other = {} if there is None else {tree.tokens[child]: child for child in theirs[there]}
        for token in dict.fromkeys((*one, *other)):
            a, b = one.get(token), other.get(token)
            chance = _together(
                None if a is None or here is None else _share(looked_up.chances, a, here),
                None if b is None or there is None else _share(chances, b, there),
                contested=bool(one and other),
            )
            out.tokens.append(token)
            out.parents.append(node)
            out.chances.append(out.chances[node] * chance)
            sources.append(_BOTH if a is not None and b is not None else _HEAD if a is None else Suffix.name)
            left.append((len(out.tokens) - 1, a, b))
    return out, tuple(sources)


def _together(looked_up: float | None, head: float | None, *, contested: bool) -> float:
    """The chance of a guess behind its parent, from what each side says of it; None where it says nothing.

    Measured on SmolLM2-135M: two that agree are nearly as good as two independent witnesses; a guess that the other
    side, which has others, does not share is right less often than it claims, a short match most of all.
    """
    if looked_up is not None and head is not None:
        return min(1.0, (max(looked_up, head) + 1 - (1 - looked_up) * (1 - head)) / 2)
    if looked_up is not None:
        return looked_up * (0.28 + 0.5 * looked_up) if contested else looked_up
    assert head is not None
    return head * 0.95 if contested else head


def _share(chances: Sequence[float], node: int, parent: int) -> float:
    """The chance of a node once its parent is right."""
    return min(1.0, chances[node] / chances[parent]) if chances[parent] > 0 else 0.0


def _children(parents: Sequence[int]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            out[parent].append(node)
    return out


def _suffix_options(options: AutoOptions) -> SuffixOptions:
    return SuffixOptions(
        max_draft_tokens=options.max_draft_tokens,
        min_probability=_LEAST,
        memory_mb=options.memory_mb,
        row_cost=options.row_cost,
    )


def _head(options: AutoOptions, context: Context) -> Drafter | None:
    """The head that was named, or the one that fits the target; None where there is none or none is wanted."""
    found = _head_class(options)
    if found is None:
        return None
    try:
        return found[0](found[1], context)
    except DrafterError:
        if options.head:  # named, so it is wanted
            raise
        return None


def _forecast_head(options: AutoOptions, context: Context) -> dict[str, int]:
    found = _head_class(options)
    if found is None:
        return {}
    try:
        return found[0].forecast(found[1], context)
    except DrafterError:
        if options.head:
            raise
        return {}


def _head_class(options: AutoOptions) -> tuple[type[Drafter], Any] | None:
    if options.head == "none" or _HEAD not in registry.names():
        return None
    # beside a match, a level that is seldom reached pays less: fewer levels than the head alone would grow
    return registry.find(_HEAD), registry.options(_HEAD, {"head": options.head, "min_reach": _REACH})


DRAFTER = Auto
