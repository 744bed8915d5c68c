"""Predicted outputs: the caller knows most of the text beforehand (an edited file, a filled form) and says so.

The draft follows the expected text. Where the output leaves it, the draft waits until the last tokens stand in the
expected text again, and goes on from there (OpenAI's predicted outputs; Yang et al. 2023, LLMA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Options, Request, Stateless

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions(Options):
    max_draft_tokens: int = field(default=32, metadata={"help": "guesses per step at most"})
    first: int = field(default=8, metadata={"help": "guesses when the output has just come back to the prediction"})
    anchor: int = field(
        default=3, metadata={"help": "tokens that must agree before the draft goes on after a difference"}
    )


@dataclass(slots=True)
class _Place:
    """How far one output has followed its prediction."""

    seen: int = 0  # output tokens looked at
    at: int = 0  # index of the next expected token; -1 = the output has left the prediction
    run: int = 0  # tokens that agreed since then
    anchors: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # run of tokens -> where it ends


class Prediction(Stateless):
    name = "prediction"
    summary = "the output that the caller expects, re-aligned after each difference"
    needs = "the expected text (--prediction FILE, or `prediction` in a request)"
    helps = "edits of a known text: code, documents, forms"
    Options = PredictionOptions

    def __init__(self, options: PredictionOptions, context: Context) -> None:
        if options.first < 1 or options.anchor < 1:
            raise DrafterError("prediction: first and anchor are at least 1")
        self.options = options
        self._places: dict[int, _Place] = {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def forget(self, sequence: int) -> None:
        self._places.pop(sequence, None)

    def memory(self) -> dict[str, int]:
        return {"anchors": sum(len(place.anchors) for place in self._places.values()) * 200}

    def _guess(self, request: Request) -> Tree:
        tokens, expected = request.shaping.tokens, request.prediction
        if not expected:
            return Tree.root(tokens[-1])
        place = self._places.get(request.id)
        if place is None:
            place = self._places[request.id] = _Place(anchors=self._index(expected))
        self._follow(place, tokens[request.shaping.prompt_length + place.seen :], expected)
        if place.at < 0:
            self._find(place, tokens)
        # twice as far each time the whole draft was right: a long agreement earns a long draft
        count = min(request.budget, self.options.max_draft_tokens, max(self.options.first, place.run))
        return Tree.chain(tokens[-1], expected[place.at : place.at + count] if place.at >= 0 else ())

    def _index(self, expected: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
        n, out = self.options.anchor, dict[tuple[int, ...], list[int]]()
        for end in range(n, len(expected) + 1):
            out.setdefault(tuple(expected[end - n : end]), []).append(end)
        return out

    def _follow(self, place: _Place, news: Sequence[int], expected: Sequence[int]) -> None:
        place.seen += len(news)
        for token in news:
            if place.at < 0:
                continue
            if place.at < len(expected) and expected[place.at] == token:
                place.at += 1
                place.run += 1
            else:
                place.at, place.run = -1, 0

    def _find(self, place: _Place, tokens: Sequence[int]) -> None:
        """Go on behind the last tokens' place in the prediction, the nearest one to where the output left it."""
        ends = place.anchors.get(tuple(tokens[-self.options.anchor :]))
        if ends and place.seen >= self.options.anchor:
            place.at = ends[0] if len(ends) == 1 else min(ends, key=lambda end: abs(end - place.seen))


DRAFTER = Prediction
