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
from typing import Any

from outrider.core.tree import Tree
from outrider.drafters import registry
from outrider.drafters.base import Context, Drafter, DrafterError, Follower, Observation, PricedOptions, Request
from outrider.drafters.calibration import Agreement, Calibration, share
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


@dataclass(slots=True)
class _Claims:
    """What both sides claim of a guess once its parent is right; None where a side has no guesses in its place."""

    looked_up: float | None
    head: float | None

    @property
    def source(self) -> str:
        """Who made it, as reports name it."""
        if self.looked_up and self.head:
            return f"{Suffix.name}+{_HEAD}"
        return Suffix.name if self.looked_up else _HEAD


class _Beliefs:
    """What such claims are worth: where both sides guess, and where one of them does."""

    __slots__ = ("_both", "_head", "_looked_up")

    def __init__(self) -> None:
        self._both, self._looked_up, self._head = Agreement(), Calibration(), Calibration()

    def chance(self, claims: _Claims) -> float:
        if claims.looked_up is None:
            return self._head.chance(claims.head or 0.0)
        if claims.head is None:
            return self._looked_up.chance(claims.looked_up)
        return self._both.chance(claims.looked_up, claims.head)

    def saw(self, claims: _Claims, right: bool) -> None:
        if claims.looked_up is None:
            self._head.saw(claims.head or 0.0, right)
        elif claims.head is None:
            self._looked_up.saw(claims.looked_up, right)
        else:
            self._both.saw(claims.looked_up, claims.head, right)


@dataclass(slots=True)
class _Merged:
    """A tree of both sides, and what was claimed of each node but the root."""

    guesses: Guesses
    claims: list[_Claims] = field(default_factory=list)


@dataclass(slots=True)
class _Asked:
    """A step in which the head had a part, until it is known what came true."""

    merged: _Merged
    kept: frozenset[int]  # nodes that were proposed
    looked_up: Guesses
    alone: frozenset[int]  # nodes that would have been proposed without the head
    cost: float  # of the head and its rows, in what could have been written in that time
    left: float  # how likely the looked-up guesses were wrong
    end: int  # length of the text


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
        self._asked: dict[int, _Asked] = {}  # by text
        self._beliefs = _Beliefs()
        # what the head brings beyond the looked-up guesses, and how likely those are wrong where it is asked
        self._gain, self._open = 0.8, 0.8

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
        """Whether the head is to see this."""
        pace = self._paces.of(seen.request.id)
        return pace.near if seen.tree is not None and seen.pending == 1 else pace.hopeful

    def forget(self, sequence: int) -> None:
        self._suffix.forget(sequence)
        self._asked.pop(sequence, None)
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
        if not self._paces.wanted(request.id):
            return False
        pace = self._paces.of(request.id)
        return not pace.on or self._gain * left > pace.cost * self._open

    def _both(
        self, request: Request, guesses: Guesses, tree: Tree, step: tuple[int, float, int, float]
    ) -> tuple[Tree, float]:
        """What is proposed of both sides' guesses and what it is to bring; and whether the head was worth its time.

        `step`: rows and tokens so far, texts, seconds of the head.
        """
        rows, gain, texts, seconds = step
        merged = _merged(guesses, tree, self._beliefs)
        sources = ("", *(claims.source for claims in merged.claims))
        kept, won, nodes = self._paying(request, merged.guesses, sources, rows, gain)
        if request.rejection:
            return kept, won
        without, _, alone = self._paying(request, guesses, ("",) * len(guesses.tokens), rows, gain)
        curve, last = self._costs.curve, len(self._costs.curve) - 1
        plain = curve[min(texts, last)] / texts  # what a plain step takes for one text
        before = curve[min(rows + without.guesses, last)] - curve[min(rows, last)]
        more = curve[min(rows + kept.guesses, last)] - curve[min(rows + without.guesses, last)]
        unit = self._steps.unit
        cost = (self._HEAD_COST if unit is None else seconds / unit) + more
        # time is worth what could be written in it without the head
        rate = (1 + sum(guesses.chances[node] for node in alone)) / (1 + before / plain)
        end = len(request.shaping.tokens)
        self._asked[request.id] = _Asked(
            merged, frozenset(nodes), guesses, frozenset(alone), cost / plain * rate, _open(guesses), end
        )
        return kept, won

    def _hear(self, request: Request) -> None:
        """What came true of the last tree that the head had a part in, and would have without it."""
        asked = self._asked.pop(request.id, None)
        if asked is None:
            return
        said = request.shaping.tokens[asked.end :]
        merged = asked.merged
        children, node, came = _children(merged.guesses.parents), 0, 0
        for token in said:
            right = -1
            for child in children[node]:
                hit = merged.guesses.tokens[child] == token
                self._beliefs.saw(merged.claims[child - 1], hit)
                if hit:
                    right = child
            if right < 0:
                break
            node = right
            came += node in asked.kept
        gain = came - _true(asked.looked_up, said, asked.alone)
        self._gain += self._FOLLOW * (gain - self._gain)
        self._open += self._FOLLOW * (asked.left - self._open)
        self._paces.saw(request.id, gain, asked.cost)

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


def _merged(looked_up: Guesses, tree: Tree, beliefs: _Beliefs) -> _Merged:
    """One tree of both, from the root down, each guess with the chance that both sides give it together.

    `beliefs` say what claims are worth.
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
            claims = _Claims(
                share(looked_up.chances, a, here or 0) if a is not None else 0.0 if one else None,
                share(chances, b, there or 0) if b is not None else 0.0 if other else None,
            )
            merged.claims.append(claims)
            out.tokens.append(token)
            out.parents.append(node)
            out.chances.append(out.chances[node] * beliefs.chance(claims))
            left.append((len(out.tokens) - 1, a, b))
    return merged


def _true(guesses: Guesses, said: Sequence[int], nodes: frozenset[int]) -> int:
    """How many of these nodes came true."""
    node = count = 0
    for token in said:
        after = [n for n in nodes if guesses.parents[n] == node and guesses.tokens[n] == token]
        if not after:
            break
        node = after[0]
        count += 1
    return count


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
