"""Suffix decoding: what followed the longest end of this text that occurred before, weighed by how often.

An online suffix automaton (Blumer et al. 1985) over the text so far finds the longest repeated end in constant time
per token; its states count their occurrences, so that continuations become a tree by frequency (Oliaro et al. 2024,
SuffixDecoding, section 4; Hu et al. 2024, SAM-Decoding).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request

__all__ = ["DRAFTER", "Automaton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions(Options):
    max_draft_tokens: int = field(default=12, metadata={"help": "guesses per step at most"})
    min_match: int = field(default=2, metadata={"help": "a shorter match proposes nothing"})
    factor: float = field(default=3.0, metadata={"help": "longest path per matched token"})
    min_probability: float = field(default=0.1, metadata={"help": "a continuation rarer than this is left out"})


class Automaton:
    """A suffix automaton that grows by one token at a time and counts occurrences.

    A state stands for all strings that end at the same places; `link` leads to the state of the longest string that
    ends at more places. Amortised constant time per token, except that counts are passed up at most `_CLIMB` links: a
    text of one repeated token would otherwise cost quadratic time. Counts further up are then too low, which only
    makes those short matches look rarer.
    """

    _CLIMB = 64

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.last = 0
        self.tokens = 0

    def add(self, token: int) -> None:
        new, state = self._state({}, self.length[self.last] + 1, 0), self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state < 0:
            self.link[new] = 0
        else:
            old = self.next[state][token]
            if self.length[old] == self.length[state] + 1:
                self.link[new] = old
            else:
                clone = self._state(dict(self.next[old]), self.length[state] + 1, self.count[old])
                self.link[clone] = self.link[old]
                self.link[old] = self.link[new] = clone
                while state >= 0 and self.next[state].get(token) == old:
                    self.next[state][token] = clone
                    state = self.link[state]
        self.last = new
        self.tokens += 1
        state = new
        for _ in range(self._CLIMB):
            if state <= 0:
                break
            self.count[state] += 1
            state = self.link[state]

    def _state(self, transitions: dict[int, int], length: int, count: int) -> int:
        self.next.append(transitions)
        self.length.append(length)
        self.count.append(count)
        self.link.append(-1)
        return len(self.next) - 1

    def continuations(self, state: int) -> Iterator[tuple[int, int, float]]:
        """Token, state and share of the occurrences of everything that followed a match."""
        total = sum(self.count[after] for after in self.next[state].values())
        for token, after in self.next[state].items():
            yield token, after, self.count[after] / total if total else 0.0


class Suffix:
    name = "suffix"
    summary = "continuations of the longest repeated end of the text, as a tree by frequency"
    needs = "nothing"
    helps = "code edits, agents, structured output: text that repeats its prompt or itself"
    Options = SuffixOptions
    wants: tuple[int, ...] = ()

    def __init__(self, options: SuffixOptions, context: Context) -> None:
        if options.min_match < 1 or not options.factor > 0 or not 0 <= options.min_probability <= 1:
            raise DrafterError("suffix: min_match is at least 1, factor above 0 and min_probability in [0, 1]")
        self.options = options
        self._texts: dict[int, Automaton] = {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def observe(self, step: Sequence[Observation]) -> None: ...

    def forget(self, sequence: int) -> None:
        self._texts.pop(sequence, None)

    @classmethod
    def forecast(cls, options: SuffixOptions, context: Context) -> dict[str, int]:
        return {}  # it grows with the texts

    def memory(self) -> dict[str, int]:
        # measured: a dictionary of about one entry and four list items take 344 bytes
        states = sum(len(text.next) for text in self._texts.values())
        return {"automata": states * 344}

    def _guess(self, request: Request) -> Tree:
        text = self._texts.setdefault(request.id, Automaton())
        tokens = request.shaping.tokens
        for token in tokens[text.tokens :]:
            text.add(token)
        state = text.link[text.last]
        budget = min(request.budget, self.options.max_draft_tokens)
        if state <= 0 or text.length[state] < self.options.min_match or budget <= 0:
            return Tree.root(tokens[-1])
        return self._grow(text, state, tokens[-1], budget)

    def _grow(self, automaton: Automaton, state: int, root: int, budget: int) -> Tree:
        """The `budget` likeliest nodes by the product of shares along the path; longer matches allow longer paths."""
        depth = int(min(self.options.factor * automaton.length[state], budget))
        tokens, parents = [root], [-1]
        heap: list[tuple[float, int, int, int, int, int]] = []  # -probability, order, token, state, parent, depth
        order = 0

        def push(state: int, parent: int, probability: float, level: int) -> None:
            nonlocal order
            if state == automaton.last:  # the text's own end: go on from where that repeats
                state = automaton.link[state]
            for token, after, share in automaton.continuations(state):
                if probability * share >= self.options.min_probability:
                    order += 1
                    heapq.heappush(heap, (-probability * share, order, token, after, parent, level))

        push(state, 0, 1.0, 1)
        while heap and len(tokens) <= budget:
            negative, _, token, after, parent, level = heapq.heappop(heap)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            if level < depth:
                push(after, node, -negative, level + 1)
        return Tree(tuple(tokens), tuple(parents))


DRAFTER = Suffix
