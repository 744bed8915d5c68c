"""Prompt lookup: what followed the last few tokens where they stood before, in prompt or output.

Source: Saxena 2023 (prompt lookup decoding); Yang et al. 2023 (LLMA, inference with reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request, Stateless
from outrider.drafters.survival import Survival

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(Options):
    max_draft_tokens: int = field(default=15, metadata={"help": "guesses per step at most"})
    min_ngram: int = field(default=1, metadata={"help": "shortest run of tokens that counts as a match"})
    max_ngram: int = field(default=24, metadata={"help": "a longer match is not looked for"})


@dataclass(slots=True)
class _Text:
    """One text: where each run of `min_ngram` tokens ended, and how far its matches have carried."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    survival: Survival = field(default_factory=Survival)
    match: int = 0  # tokens of the match that was found last
    guess: int = -1  # the first token of the last draft
    untold: bool = False  # whether the target has not said yet what it thinks of that


class Ngram(Stateless):
    name = "ngram"
    summary = "what followed the same tokens before (prompt lookup)"
    needs = "nothing"
    helps = "code edits, summaries, extraction, agents: text that repeats its prompt"
    Options = NgramOptions

    _REMEMBERED = 32  # places kept per run of tokens

    def __init__(self, options: NgramOptions, context: Context) -> None:
        if not 1 <= options.min_ngram <= options.max_ngram:
            raise DrafterError(
                f"ngram: min_ngram {options.min_ngram} and max_ngram {options.max_ngram}: 1 <= min_ngram <= max_ngram"
            )
        self.options = options
        self._texts: dict[int, _Text] = {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def observe(self, step: Sequence[Observation]) -> None:
        for seen in step:
            text = self._texts.get(seen.request.id)
            if text is not None and seen.tree is not None and seen.tree.guesses:
                text.survival.saw(text.match, seen.tree.guesses, len(seen.path))
                text.untold = False

    def forget(self, sequence: int) -> None:
        self._texts.pop(sequence, None)

    def memory(self) -> dict[str, int]:
        # a list entry and a tuple of small integers per indexed token
        return {"index": sum(len(text.tokens) for text in self._texts.values()) * (72 + 8 * self.options.min_ngram)}

    def _guess(self, request: Request) -> Tree:
        text, tokens = self._texts.setdefault(request.id, _Text()), request.shaping.tokens
        known = text.tokens
        if text.untold and len(tokens) > len(known):  # a guess that was not checked because it did not seem to pay
            text.survival.saw(text.match, 1, int(tokens[len(known)] == text.guess))
        self._grow(text, tokens)
        place, text.match = self._longest(text)
        count = min(request.budget, self.options.max_draft_tokens) if text.match else 0
        text.untold = count > 0
        if not count:
            return Tree.root(known[-1])
        guesses = known[place : place + count]
        while len(guesses) < count:  # the match overlaps its own continuation: a period
            guesses.append(guesses[len(guesses) - (len(known) - place)])
        text.guess = guesses[0]
        return Tree.chain(known[-1], guesses, chances=text.survival.reaches(text.match, count))

    def _longest(self, text: _Text) -> tuple[int, int]:
        """Where the longest run that equals the text's end goes on, the latest of equals, and its length; 0 if none."""
        known, shortest, longest = text.tokens, self.options.min_ngram, self.options.max_ngram
        best = length = 0
        for place in reversed(text.ends.get(tuple(known[-shortest:]), ())):
            if place == len(known):
                continue
            match = shortest
            while match < longest and match < place and known[place - 1 - match] == known[-1 - match]:
                match += 1
            if match > length:
                best, length = place, match
                if match == longest:
                    break
        return best, length

    def _grow(self, text: _Text, tokens: Sequence[int]) -> None:
        shortest, known = self.options.min_ngram, text.tokens
        for token in tokens[len(known) :]:
            known.append(token)
            if len(known) >= shortest:
                places = text.ends.setdefault(tuple(known[-shortest:]), [])
                places.append(len(known))
                if len(places) > self._REMEMBERED:
                    del places[0]


DRAFTER = Ngram
