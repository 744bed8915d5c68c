"""Prompt lookup: what followed the last few tokens where they stood before, in prompt or output.

Source: Saxena 2023 (prompt lookup decoding); Yang et al. 2023 (LLMA, inference with reference).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request, Stateless

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(Options):
    min_ngram: int = field(default=2, metadata={"help": "shortest run of tokens that counts as a match"})
    max_ngram: int = field(default=8, metadata={"help": "a longer match is not looked for"})
    factor: float = field(default=4.0, metadata={"help": "guesses per matched token at most"})


@dataclass(slots=True)
class _Index:
    """Where each run of `min_ngram` tokens of one text ended last, kept up as the text grows."""

    tokens: list[int] = field(default_factory=list)
    trust: float = 0.5  # how often the first guess was right lately
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class Ngram(Stateless):
    name = "ngram"
    summary = "what followed the same tokens before (prompt lookup)"
    needs = "nothing"
    helps = "code edits, summaries, extraction, agents: text that repeats its prompt"
    Options = NgramOptions

    _REMEMBERED = 8  # places kept per run of tokens
    _PACE = 0.15  # how fast trust follows the last draft
    # Measured on chat: a guess behind an accepted one is right 7 times in 10, and a row more costs 2 to 4 % of a step.
    # Guesses deeper than pay by this are left out.
    _NEXT, _COST = 0.7, 0.04

    def __init__(self, options: NgramOptions, context: Context) -> None:
        if not 1 <= options.min_ngram <= options.max_ngram:
            raise DrafterError(
                f"ngram: min_ngram {options.min_ngram} and max_ngram {options.max_ngram}: 1 <= min_ngram <= max_ngram"
            )
        if not options.factor > 0:
            raise DrafterError(f"ngram: factor {options.factor} is not above 0")
        self.options = options
        self._indexes: dict[int, _Index] = {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def observe(self, step: Sequence[Observation]) -> None:
        for seen in step:
            index = self._indexes.get(seen.request.id)
            if index is not None and seen.tree is not None and seen.tree.guesses:
                index.trust += self._PACE * (bool(seen.path) - index.trust)

    def forget(self, sequence: int) -> None:
        self._indexes.pop(sequence, None)

    def memory(self) -> dict[str, int]:
        # a list entry and a tuple of small integers per indexed token
        return {"index": sum(len(index.tokens) for index in self._indexes.values()) * (72 + 8 * self.options.min_ngram)}

    def _guess(self, request: Request) -> Tree:
        index = self._indexes.setdefault(request.id, _Index())
        tokens = request.shaping.tokens
        self._grow(index, tokens)
        known, n = index.tokens, self.options.min_ngram
        end = len(known)
        best, best_length = 0, 0
        for place in reversed(index.ends.get(tuple(known[end - n :]), ())):
            if place == end:
                continue
            length = n
            while (
                length < self.options.max_ngram and length < place and known[place - 1 - length] == known[-1 - length]
            ):
                length += 1
            if length > best_length:
                best, best_length = place, length
        count = int(min(request.budget, self.options.max_draft_tokens, self.options.factor * best_length))
        if best_length < self.options.max_ngram:  # a long match is better than its text's average
            count = min(count, max(1, 1 + int(math.log(index.trust / self._COST) / -math.log(self._NEXT))))
        if not best_length or count <= 0:
            return Tree.root(known[-1])
        guesses = known[best : best + count]
        while len(guesses) < count:  # the match overlaps its own continuation: a period
            guesses.append(guesses[len(guesses) - (end - best)])
        return Tree.chain(known[-1], guesses)

    def _grow(self, index: _Index, tokens: Sequence[int]) -> None:
        n, known = self.options.min_ngram, index.tokens
        for token in tokens[len(known) :]:
            known.append(token)
            if len(known) >= n:
                places = index.ends.setdefault(tuple(known[-n:]), [])
                places.append(len(known))
                if len(places) > self._REMEMBERED:
                    del places[0]


DRAFTER = Ngram
