"""The default: per step, the guesses that pay most, from the text itself, from a learned head, from both or from none.

What stood before in the text is looked up at little cost (`suffix`); a head that fits the target (`eagle`) guesses what
is new, and costs time. Both say how likely each of their guesses is, and are believed as far as earlier guesses of the
same kind came true. The head is asked while it raises tokens per second in this text (`pace`), where the suffix match
leaves something to win. The two trees are merged, and the likeliest nodes are kept for as long as they raise tokens per
second. (Combining by length of match: Hu et al. 2024, SAM-Decoding, section 3.4; here both sides are weighed by
probability.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from outrider.core.tree import Tree
from outrider.drafters import registry
from outrider.drafters.base import Context, Drafter, DrafterError, Follower, Observation, PricedOptions, Request
from outrider.drafters.costs import paying
from outrider.drafters.pace import Paces
from outrider.drafters.suffix import Guesses, Suffix, SuffixOptions

__all__ = ["DRAFTER"]

_HEAD = "eagle"
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


# Kinds of guesses in a tree of both sides: who made them, and whether the other side has other guesses in their place.
_BOTH, _LOOKED_UP, _LOOKED_UP_ALONE, _HEAD_CONTESTED, _HEAD_ALONE = range(5)
_SOURCES = (f"{Suffix.name}+{_HEAD}", Suffix.name, Suffix.name, _HEAD, _HEAD)  # by kind, as reports name them


@dataclass(slots=True)
class _Merged:
    """A tree of both sides, and what was believed of its nodes."""

    guesses: Guesses
    kinds: list[int] = field(default_factory=lambda: [-1])
    shares: list[float] = field(default_factory=lambda: [1.0])  # claimed of each, once its parent is right
    kept: frozenset[int] = frozenset()  # nodes that were proposed
    end: int = 0  # length of the text


@dataclass(slots=True)
class _Text:
    """What the head has been worth in one text."""

    asked: _Merged | None = None  # the last tree with its guesses, until it is known what came true
    expected: float = 0.0  # tokens that such trees were to bring lately, and those that they brought
    came: float = 0.0

    _PRIOR: ClassVar[float] = 4.0
    _KEPT: ClassVar[float] = 0.95  # what is left of an old tree's weight after each one

    @property
    def honesty(self) -> float:
        """Tokens that came of one that was expected."""
        return (self.came + self._PRIOR) / (self.expected + self._PRIOR)

    def saw(self, expected: float, came: int) -> None:
        self.expected = self._KEPT * self.expected + expected
        self.came = self._KEPT * self.came + came


class _Belief:
    """How often guesses of one kind come true, of those whose parent did, against what was claimed of them."""

    __slots__ = ("_claimed", "_right")

    _PRIOR = 2.0  # guesses that a belief begins with
    _KEPT = 0.995
    _MOST = 1.2

    def __init__(self) -> None:
        self._claimed = self._right = 0.0

    @property
    def scale(self) -> float:
        """What to multiply claims with."""
        return min((self._right + self._PRIOR) / (self._claimed + self._PRIOR), self._MOST)

    def saw(self, claimed: float, right: bool) -> None:
        self._claimed = self._KEPT * self._claimed + claimed
        self._right = self._KEPT * self._right + right


class Auto(Follower):
    name = "auto"
    summary = "per step the best of suffix matches and a learned head, merged into one tree where that pays"
    needs = "nothing; better with a head for the model"
    helps = "everything; it falls back to plain decoding where nothing pays"
    Options = AutoOptions

    # Under rejection the text depends on the guesses, and nothing that was measured elsewhere may choose them: what a
    # head's tree is taken to bring, and, in plain steps, to cost.
    _WORTH, _HEAD_COST = 1.3, 0.3
    _FOLLOW = 0.02

    def __init__(self, options: AutoOptions, context: Context) -> None:
        self.options = options
        self._suffix = Suffix(_suffix_options(options), context)
        self._costs = self._suffix.costs
        self._steps = context.costs  # of the engine, whatever a row is said to cost
        self._head = _head(options, context)
        self.wants: tuple[int, ...] = self._head.wants if self._head else ()
        self._paces = Paces()  # of the head
        self._texts: dict[int, _Text] = {}
        self._beliefs = [_Belief() for _ in range(5)]
        self._open = 0.8  # how likely the looked-up guesses are wrong where the head is asked

    @classmethod
    def forecast(cls, options: AutoOptions, context: Context) -> dict[str, int]:
        head = Suffix.forecast(_suffix_options(options), context)
        return {**head, **_forecast_head(options, context)}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        texts = max(len(batch), self._steps.texts)
        looked_up = [self._suffix.candidates(request) for request in batch]
        self._paces.step(texts)
        asked = [i for i, request in enumerate(batch) if self._asks(request, looked_up[i], texts)]
        trees: list[Tree | None] = [None] * len(batch)
        seconds = 0.0
        if asked and self._head is not None:
            began = time.perf_counter()
            for i, grown in zip(asked, self._head.propose([batch[i] for i in asked]), strict=True):
                trees[i] = grown
            seconds = (time.perf_counter() - began) / len(asked)
        rows, gain = texts, float(texts)
        out: list[Tree] = []
        for request, guesses, tree in zip(batch, looked_up, trees, strict=True):
            base, tokens = (1, 1.0) if request.rejection else (rows, gain)
            if tree is None:
                sources = (Suffix.name,) * len(guesses.tokens)
                kept, won, _ = self._paying(request, guesses, sources, base, tokens)
            elif request.rejection and tree.guesses:
                # drawn guesses stand alone: a law covers all children of its node
                kept, won = replace(tree, sources=(_HEAD,) * len(tree)), 0.0
            else:
                kept, won = self._both(request, guesses, tree, (base, tokens, texts, seconds))
            out.append(kept)
            rows += kept.guesses
            gain += won
        return out

    def observe(self, step: Sequence[Observation]) -> None:
        if self._head is None:
            return
        seen = [one for one in step if one.request.rejection or self._reads(one)]
        if seen:
            self._head.observe(seen)

    def _reads(self, seen: Observation) -> bool:
        """Whether the head is to see this. A prompt is long, and read where the head is likely to be asked."""
        pace = self._paces.of(seen.request.id)
        return pace.near if seen.tree is not None and seen.pending == 1 else pace.on

    def forget(self, sequence: int) -> None:
        self._suffix.forget(sequence)
        self._texts.pop(sequence, None)
        self._paces.forget(sequence)
        if self._head is not None:
            self._head.forget(sequence)

    def follows(self, request: Request, length: int) -> int:
        return self._head.follows(request, length) if isinstance(self._head, Follower) else 0

    def skip(self, request: Request, length: int) -> None:
        if isinstance(self._head, Follower):
            self._head.skip(request, length)

    def memory(self) -> dict[str, int]:
        return {**self._suffix.memory(), **(self._head.memory() if self._head else {})}

    def _curve(self, request: Request) -> Sequence[float]:
        # under rejection the text depends on the guesses: only what is the same in every run may choose them
        return self._costs.assumed if request.rejection else self._costs.curve

    def _asks(self, request: Request, guesses: Guesses, texts: int) -> bool:
        """Whether the head is to guess for this text in this step."""
        if self._head is None or request.budget <= 0:
            return False
        left = _open(guesses)
        if request.rejection:
            curve = self._costs.assumed
            count, won = _best(sorted(guesses.chances[1:], reverse=True), curve, 1, 1.0, request.budget)
            both = 1 + won + left * self._WORTH
            return both / (curve[1 + max(count, 8)] + self._HEAD_COST) > (1 + won) / curve[1 + count]
        self._hear(request)
        pace = self._paces.of(request.id)
        if not pace.wanted():
            return False
        return not pace.on or max(pace.gain, pace.cost) * left > pace.cost * self._open

    def _both(
        self, request: Request, guesses: Guesses, tree: Tree, step: tuple[int, float, int, float]
    ) -> tuple[Tree, float]:
        """What is proposed of both sides' guesses and what it is to bring; and whether the head was worth its time.

        `step`: rows and tokens so far, texts, seconds of the head.
        """
        rows, gain, texts, seconds = step
        merged = _merged(guesses, tree, [belief.scale for belief in self._beliefs])
        sources = ("", *(_SOURCES[kind] for kind in merged.kinds[1:]))
        kept, won, nodes = self._paying(request, merged.guesses, sources, rows, gain)
        if request.rejection:
            return kept, won
        self._open += self._FOLLOW * (_open(guesses) - self._open)
        text = self._texts.setdefault(request.id, _Text())
        merged.kept, merged.end = frozenset(nodes), len(request.shaping.tokens)
        text.asked = merged
        curve = self._costs.curve
        count, alone = _best(sorted(guesses.chances[1:], reverse=True), curve, rows, gain, request.budget)
        last = len(curve) - 1
        plain = curve[min(texts, last)] / texts  # what a plain step takes for one text
        before = curve[min(rows + count, last)] - curve[min(rows, last)]
        more = curve[min(rows + kept.guesses, last)] - curve[min(rows + count, last)]
        unit = self._steps.unit
        cost = (self._HEAD_COST if unit is None else seconds / unit) + more
        # time is worth what could be written in it without the head
        rate = (1 + alone) / (1 + before / plain)
        self._paces.saw(request.id, won * text.honesty - alone, cost / plain * rate)
        return kept, won

    def _hear(self, request: Request) -> None:
        """What came true of the last tree that the head had a part in."""
        text = self._texts.get(request.id)
        if text is None or text.asked is None:
            return
        asked, text.asked = text.asked, None
        children = _children(asked.guesses.parents)
        node, came = 0, 0
        for token in request.shaping.tokens[asked.end :]:
            right = -1
            for child in children[node]:
                hit = asked.guesses.tokens[child] == token
                self._beliefs[asked.kinds[child]].saw(asked.shares[child], hit)
                if hit:
                    right = child
            if right < 0:
                break
            node = right
            came += node in asked.kept
        text.saw(sum(asked.guesses.chances[node] for node in asked.kept), came)

    def _paying(
        self, request: Request, guesses: Guesses, sources: tuple[str, ...], rows: int, gain: float
    ) -> tuple[Tree, float, Sequence[int]]:
        """The tree of the likeliest nodes, as many as pay, the tokens that it is expected to bring, and the nodes."""
        chances = guesses.chances
        # a child is never likelier than its parent, and comes after it: the first of this order are a tree
        order = sorted(range(1, len(chances)), key=lambda node: -chances[node])
        most = min(request.budget, self.options.max_draft_tokens)
        count, won = _best([chances[node] for node in order], self._curve(request), rows, gain, most)
        tree = replace(guesses.tree(), sources=sources)
        return (tree if count == tree.guesses else tree.select([0, *sorted(order[:count])])), won, order[:count]


def _best(chances: Sequence[float], curve: Sequence[float], rows: int, gain: float, most: int) -> tuple[int, float]:
    """`paying` within `most` guesses and the rows whose cost is known."""
    return paying(chances[: max(0, min(most, len(curve) - 1 - rows))], curve, rows, gain)


def _open(guesses: Guesses) -> float:
    """How likely what was looked up for the next token is wrong: where it is right, a head mostly says the same."""
    return 1.0 - min(1.0, sum(c for c, parent in zip(guesses.chances, guesses.parents, strict=True) if parent == 0))


def _merged(looked_up: Guesses, tree: Tree, scales: Sequence[float]) -> _Merged:
    """One tree of both, from the root down, each guess with the chance that both sides give it together.

    `scales` are what claims of each kind are multiplied with.
    """
    own, theirs = _children(looked_up.parents), _children(tree.parents)
    chances = tree.chances or (1.0,) * len(tree)
    merged = _Merged(Guesses([looked_up.tokens[0]], [-1], [1.0]))
    out = merged.guesses
    left: deque[tuple[int, int | None, int | None]] = deque([(0, 0, 0)])  # a node, and where it stands on each side
    while left:
        node, here, there = left.popleft()
        one = {} if here is None else {looked_up.tokens[child]: child for child in own[here]}
        other = {} if there is None else {tree.tokens[child]: child for child in theirs[there]}
        for token in dict.fromkeys((*one, *other)):
            a, b = one.get(token), other.get(token)
            share, kind = _together(
                None if a is None or here is None else _share(looked_up.chances, a, here),
                None if b is None or there is None else _share(chances, b, there),
                contested=bool(one and other),
            )
            merged.shares.append(share)
            merged.kinds.append(kind)
            out.tokens.append(token)
            out.parents.append(node)
            out.chances.append(out.chances[node] * min(1.0, share * scales[kind]))
            left.append((len(out.tokens) - 1, a, b))
    return merged


def _together(looked_up: float | None, head: float | None, *, contested: bool) -> tuple[float, int]:
    """What is claimed of a guess behind its parent by the sides that make it, and its kind.

    Two that agree are nearly as good as two independent witnesses; a guess that the other side, which has others, does
    not share is right less often than it claims, a short match most of all. How much less is learned (`_Belief`).
    """
    if looked_up is not None and head is not None:
        return min(1.0, (max(looked_up, head) + 1 - (1 - looked_up) * (1 - head)) / 2), _BOTH
    if looked_up is not None:
        if contested:
            return looked_up * (1 + looked_up) / 2, _LOOKED_UP
        return looked_up, _LOOKED_UP_ALONE
    assert head is not None
    return head, _HEAD_CONTESTED if contested else _HEAD_ALONE


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
