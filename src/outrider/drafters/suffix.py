"""Suffix decoding: what followed the ends of this text where they stood before, as a tree of the likeliest guesses.

A suffix automaton over the text so far finds the longest repeated end in constant time per token (Hu et al. 2024,
SAM-Decoding); its states count what followed (Oliaro et al. 2024, SuffixDecoding, section 4). How likely a continuation
is comes from an interpolation of the matches of all lengths with a discount for each length, as in Kneser and Ney 1995
and in compression by partial matching: where a match of L tokens was followed by t in c of n cases,

    p(t | L) = (c - d[L]) / n + d[L] * kinds / n * p(t | next shorter match)

What no match explains may go to a model of shorter n-grams than a text can teach (`Base`, `ngram_model.py`).

A tree takes the likeliest nodes for as long as a row more raises tokens per second (`costs`), so it is long behind a
long match and empty where nothing matches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.automaton import STATE_BYTES, Automaton
from outrider.drafters.base import Context, DrafterError, Observation, PricedOptions, Request

__all__ = ["DRAFTER", "Base", "Guesses", "Suffix"]

# d[L], the share of cases in which what followed a match of L tokens once did not follow again. Measured on answers of
# SmolLM2-135M at temperature 0 to problems, instructions, code and country profiles; the last holds from there on.
_DISCOUNTS = (1.0, 0.65, 0.43, 0.31, 0.29, 0.22, 0.20, 0.16, 0.15, 0.14, 0.12, 0.12, 0.12, 0.11, 0.11, 0.10, 0.03)
# The same where a base takes what they leave: it knows more of short ends than one text does.
_DISCOUNTS_OVER_BASE = (1.0, 0.9, 0.6, 0.4, *_DISCOUNTS[4:])
# Where the end of a text occurred before: in an automaton, at a state, by a match of so many tokens; the longest first.
_Contexts = tuple[tuple[Automaton, int, int], ...]
_NOWHERE: tuple[float, _Contexts] = (0.0, ())
_LONG = len(_DISCOUNTS) - 1
_AHEAD = 6  # nodes that are tried beyond the best number
_WIDE = 16  # a match with more kinds of continuations says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions(PricedOptions):
    max_draft_tokens: int = field(default=24, metadata={"help": "guesses per step at most"})
    min_match: int = field(default=1, metadata={"help": "a shorter match proposes nothing"})
    min_probability: float = field(default=0.01, metadata={"help": "a guess less likely than this is left out"})
    memory_mb: float = field(
        default=0.0,
        metadata={"help": "memory for what earlier requests were answered, whoever asked; the oldest half goes first"},
    )


class Base(Protocol):
    """What is likely after a text's last tokens, whatever the text."""

    @property
    def order(self) -> int:
        """Tokens that it looks at, at most."""
        ...

    def after(self, last: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Next tokens with their probabilities; together at most 1."""
        ...


@dataclass(slots=True)
class Guesses:
    """A tree with the probability of each node: that it and all its ancestors are right."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]

    def tree(self) -> Tree:
        return Tree(tuple(self.tokens), tuple(self.parents), chances=tuple(self.chances))

    def last(self, text: Sequence[int], node: int, count: int) -> list[int]:
        """The last `count` tokens at a node, those of the text before its root included."""
        found: list[int] = []
        while node > 0 and len(found) < count:
            found.append(self.tokens[node])
            node = self.parents[node]
        found.reverse()
        missing = count - len(found)
        return [*text[-missing:], *found] if missing else found


@dataclass(slots=True)
class _Text:
    """One sequence: its automaton, where it stands in the memory, and how far its guesses can be trusted."""

    shaping: Shaping
    automaton: Automaton = field(default_factory=Automaton)
    cursors: list[tuple[int, int]] = field(default_factory=list)  # state and length in each generation of the memory
    generation: int = -1  # of the memory's youngest when the cursors were set
    followed: int = 0  # tokens that the cursors stand behind
    expected: float = 0.0  # sum of the first guesses' probabilities, lately
    right: float = 0.0  # how many of them were right
    firsts: tuple[int, ...] = ()  # what might have come next, proposed or not
    asked: float = 0.0  # its probability


class Suffix:
    name = "suffix"
    summary = "what followed the ends of this text before, all match lengths weighed, as a tree"
    needs = "nothing"
    helps = "code edits, agents, summaries, structured output: text that repeats its prompt or itself"
    Options = SuffixOptions
    wants: tuple[int, ...] = ()

    _PRIOR = 3.0  # first guesses that a new text's trust begins with
    _KEPT = 0.97  # what is left of an old guess's weight after each step
    _MOST_TRUST = 1.2

    def __init__(self, options: SuffixOptions, context: Context, base: Base | None = None) -> None:
        if options.min_match < 1 or not 0 < options.min_probability <= 1 or options.memory_mb < 0:
            raise DrafterError("suffix: min_match is at least 1, min_probability in (0, 1] and memory_mb not below 0")
        self.options = options
        self.costs = options.costs(context)
        self._texts: dict[int, _Text] = {}
        self._memory = _Memory(options.memory_mb)
        self._base = base
        self._discounts = _DISCOUNTS if base is None else _DISCOUNTS_OVER_BASE

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        trees: list[Tree] = []
        rows, gain = float(len(batch)), float(len(batch))  # of the whole batch so far
        for request in batch:
            guesses = self.guess(request, int(rows), gain)
            rows += len(guesses.tokens) - 1
            gain += sum(guesses.chances) - 1
            trees.append(guesses.tree())
        return trees

    def observe(self, step: Sequence[Observation]) -> None: ...

    def forget(self, sequence: int) -> None:
        text = self._texts.pop(sequence, None)
        if text is not None and self._memory.limit:
            self._memory.learn(text.shaping.tokens[text.shaping.prompt_length :])

    @classmethod
    def forecast(cls, options: SuffixOptions, context: Context) -> dict[str, int]:
        return {}  # it grows with the texts

    def memory(self) -> dict[str, int]:
        out = {"automata": sum(text.automaton.bytes for text in self._texts.values())}
        if self._memory.limit:
            out["memory"] = self._memory.bytes
        return out

    def guess(self, request: Request, rows: int = 1, gain: float = 1.0) -> Guesses:
        """The guesses that pay beside `rows` rows that the forward has anyway, which are worth `gain` tokens."""
        # under rejection the text depends on the guesses: only what is the same in every run may choose them
        return self._guess(request, self.costs.assumed if request.rejection else self.costs.curve, rows, gain)

    def candidates(self, request: Request) -> Guesses:
        """All guesses that are likely enough, whatever they cost."""
        return self._guess(request, self._FREE, 1, 1.0)

    _FREE = (1.0,) * 130

    def _guess(self, request: Request, curve: Sequence[float], rows: int, gain: float) -> Guesses:
        tokens = request.shaping.tokens
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(request.shaping)
        self._read(text, tokens)
        budget = min(request.budget, self.options.max_draft_tokens)
        guesses = Guesses([tokens[-1]], [-1], [1.0])
        if budget <= 0:
            return guesses
        contexts = self._contexts(text)
        trust = min((text.right + self._PRIOR) / (text.expected + self._PRIOR), self._MOST_TRUST)
        first = self._following(contexts, trust, self._last(guesses, tokens, 0))
        text.firsts = tuple(first)
        text.asked = trust * sum([share for share, _ in first.values()])
        if first:
            self._grow(guesses, text, first, budget, trust, curve, rows, gain)
        return guesses

    def _last(self, guesses: Guesses, tokens: Sequence[int], node: int) -> Sequence[int]:
        """What the base is told of a node."""
        return () if self._base is None else guesses.last(tokens, node, self._base.order)

    def _read(self, text: _Text, tokens: Sequence[int]) -> None:
        automaton = text.automaton
        if text.firsts and len(tokens) > automaton.tokens:
            text.expected = self._KEPT * text.expected + text.asked
            text.right = self._KEPT * text.right + (tokens[automaton.tokens] in text.firsts)
            text.firsts = ()
        for token in tokens[automaton.tokens :]:
            automaton.add(token)
        if self._memory.limit:
            self._memory.follow(text, tokens)

    def _contexts(self, text: _Text) -> _Contexts:
        """Where the text's end occurred before: an automaton, a state, the length of the match."""
        automaton = text.automaton
        own = automaton.link[automaton.last]
        found = [(automaton, own, automaton.length[own])] if own > 0 else []
        if text.cursors:
            found += [
                (old, state, length)
                for old, (state, length) in zip(self._memory.generations, text.cursors, strict=True)
                if state > 0
            ]
            found.sort(key=lambda context: -context[2])
        return tuple(found)

    def _grow(
        self,
        guesses: Guesses,
        text: _Text,
        following: dict[int, tuple[float, _Contexts]],
        budget: int,
        trust: float,
        curve: Sequence[float],
        rows: int,
        gain: float,
    ) -> None:
        """Best first: the likeliest node is taken, and what may follow it becomes possible.

        The best number of nodes is kept. A few are tried beyond it: the first guess may cost more than the next seven.
        """
        tokens, parents, chances = guesses.tokens, guesses.parents, guesses.chances
        most = min(budget, len(curve) - rows - 1)
        if most <= 0:  # so many rows that nobody has measured what another one costs
            return
        heap: list[tuple[float, int, int, int, _Contexts]] = []
        order = 0
        chance, node = trust, 0
        kept, rate = 1, gain / curve[rows]
        while True:
            for token, (share, after) in following.items():
                if chance * share >= self.options.min_probability:
                    order += 1
                    heapq.heappush(heap, (-min(chance * share, chances[node]), order, token, node, after))
            if not heap or len(tokens) > most or len(tokens) > kept + _AHEAD:
                break
            negative, _, token, parent, contexts = heapq.heappop(heap)
            chance = -negative
            rows += 1
            gain += chance
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
            if gain / curve[rows] > rate:
                kept, rate = node + 1, gain / curve[rows]
            if not contexts:  # a guess of the base: the text may know its token from elsewhere
                contexts = self._known(text, token)
            following = self._following(contexts, chance, self._last(guesses, text.shaping.tokens, node))
        del tokens[kept:], parents[kept:], chances[kept:]

    def _known(self, text: _Text, token: int) -> _Contexts:
        """Where the token alone occurred in the text."""
        state = text.automaton.next[0].get(token)
        return () if state is None else ((text.automaton, state, 1),)

    def _following(self, contexts: _Contexts, chance: float, last: Sequence[int]) -> dict[int, tuple[float, _Contexts]]:
        """What may come next, with its probability and with where the longest match then stands."""
        floor = self.options.min_probability
        shortest = self.options.min_match
        found: dict[int, tuple[float, _Contexts]] = {}
        left = 1.0  # the share of the shorter matches
        discounts = self._discounts
        for automaton, state, matched in contexts:
            nexts, links, counts, lengths = automaton.next, automaton.link, automaton.count, automaton.length
            while state > 0 and matched >= shortest and left * chance >= floor:
                branches = nexts[state]
                kinds = len(branches)
                if kinds > _WIDE:
                    break
                if kinds:
                    discount = discounts[matched if matched < _LONG else _LONG]
                    n = sum([counts[after] or 1 for after in branches.values()])
                    for token, after in branches.items():
                        share = left * ((counts[after] or 1) - discount) / n
                        if token in found:
                            before, where = found[token]
                            if where[-1][0] is not automaton:
                                where = (*where, (automaton, after, matched + 1))
                            found[token] = before + share, where
                        elif token >= 0:
                            found[token] = share, ((automaton, after, matched + 1),)
                    left *= discount * kinds / n
                state = links[state]
                matched = lengths[state]
        if self._base is not None and left * chance >= floor:
            for token, share in self._base.after(last):
                before, where = found.get(token, _NOWHERE)
                found[token] = before + left * share, where
        return found


class _Memory:
    """What earlier requests were answered, in two generations: the older goes when the younger has half the room."""

    _MARK = -1  # between two texts: never guessed
    _LOOK_BACK = 64  # tokens of a text that find its place in the memory

    def __init__(self, megabytes: float) -> None:
        self.limit = int(megabytes * 1e6)
        self.generations: tuple[Automaton, ...] = (Automaton(),)  # the youngest first
        self.number = 0  # of the youngest

    @property
    def bytes(self) -> int:
        return sum(automaton.bytes for automaton in self.generations)

    def learn(self, output: Sequence[int]) -> None:
        """Keep a text's output, whole where it fits."""
        for token in (*output, self._MARK):
            young = self.generations[0]
            if 2 * young.bytes + 4 * STATE_BYTES > self.limit:  # a token makes two states at most
                self.generations = (Automaton(), young)
                self.number += 1
                young = self.generations[0]
            young.add(token)

    def follow(self, text: _Text, tokens: Sequence[int]) -> None:
        """Bring a text's places in the memory up to its end."""
        if text.generation != self.number:
            text.generation = self.number
            text.cursors = [(0, 0)] * len(self.generations)
            text.followed = 0
        first = max(text.followed, len(tokens) - self._LOOK_BACK)
        for index, automaton in enumerate(self.generations):
            state, matched = text.cursors[index]
            if first > text.followed:
                state, matched = 0, 0
            for token in tokens[first:]:
                state, matched = automaton.follow(state, matched, token)
            text.cursors[index] = state, matched
        text.followed = len(tokens)


DRAFTER = Suffix
