"""Predicted outputs: the caller knows most of the text beforehand (an edited file, a filled form) and says so.

The draft follows the expected text, the further the longer both have agreed. Where the output leaves it, the next guess
is a tree of the ways back: a token was replaced, put in or left out. If none of them holds, the draft waits until the
last tokens stand in the expected text again (OpenAI's predicted outputs; Yang et al. 2023, LLMA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, PricedOptions, Request

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions(PricedOptions):
    max_draft_tokens: int = field(default=64, metadata={"help": "guesses per step at most; fewer where it pays"})
    anchor: int = field(
        default=3, metadata={"help": "tokens that must agree before the draft goes on after a difference"}
    )


@dataclass(slots=True)
class _Place:
    """How far one output has followed its prediction."""

    anchors: dict[tuple[int, ...], list[int]]  # run of tokens -> where it ends
    seen: int = 0  # output tokens looked at
    at: int = 0  # index of the next expected token; -1 = the output has left the prediction
    run: int = 0  # tokens that agreed since then
    left: int = 0  # index of the token that did not come
    away: int = 0  # tokens since then
    ways: list[int] = field(default_factory=list)  # while away: where the prediction may go on
    tried: float = 2.0  # times that the ways back were guessed, and how often one of them held
    held: float = 1.0
    guessed: bool = False  # in this step


class Prediction:
    name = "prediction"
    summary = "the output that the caller expects, re-aligned after each difference"
    needs = "the expected text (--prediction FILE, or `prediction` in a request)"
    helps = "edits of a known text: code, documents, forms"
    Options = PredictionOptions
    wants: tuple[int, ...] = ()

    _WINDOW = 64  # how far ahead the output's own next token is looked for, if tokens were left out
    _PUT_IN = 6  # tokens put in, after which only an anchor leads back
    _NEXT = 0.85  # chance that a way back that held for one token holds for another
    _ENTRY_BYTES = 200  # an anchor: a tuple, a list and their places in the dictionary

    def __init__(self, options: PredictionOptions, context: Context) -> None:
        if options.anchor < 1:
            raise DrafterError(f"prediction: anchor {options.anchor} is below 1")
        self.options = options
        self.costs = options.costs(context)
        self._places: dict[int, _Place] = {}

    @classmethod
    def forecast(cls, options: PredictionOptions, context: Context) -> dict[str, int]:
        return {"anchors": 0}  # they grow with the predictions

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        trees: list[Tree] = []
        rows = len(batch)
        for request in batch:
            trees.append(self._guess(request, rows))
            rows += trees[-1].guesses
        return trees

    def observe(self, step: Sequence[Observation]) -> None:
        for seen in step:
            place = self._places.get(seen.request.id)
            if place is not None and place.guessed:
                place.tried += 1
                place.held += bool(seen.path)
                place.guessed = False

    def forget(self, sequence: int) -> None:
        self._places.pop(sequence, None)

    def memory(self) -> dict[str, int]:
        return {"anchors": sum(len(place.anchors) for place in self._places.values()) * self._ENTRY_BYTES}

    def _guess(self, request: Request, rows: int) -> Tree:
        """Beside `rows` rows that the forward has anyway."""
        tokens, expected = request.shaping.tokens, request.prediction
        if not expected:
            return Tree.root(tokens[-1])
        place = self._places.get(request.id)
        if place is None:
            place = self._places[request.id] = _Place(self._index(expected))
        self._follow(place, tokens[request.shaping.prompt_length + place.seen :], expected)
        if place.at < 0:
            self._find(place, tokens)
        most = min(request.budget, self.options.max_draft_tokens)
        # under rejection the text depends on the guesses: only what is the same in every run may choose them
        curve = self.costs.assumed if request.rejection else self.costs.curve
        most = min(most, len(curve) - 1 - rows)
        if place.at >= 0:
            chance = (place.run + 2) / (place.run + 3)
            count = _paying(chance, 1.0, 1, curve, rows, min(most, len(expected) - place.at))
            guesses = expected[place.at : place.at + count]
            return Tree.chain(tokens[-1], guesses, chances=[chance**n for n in range(1, count + 1)])
        if place.ways:
            branches = len(place.ways)
            count = _paying(self._NEXT, place.held / place.tried, branches, curve, rows, most // branches)
            place.guessed = count > 0
            return Tree.merge(tokens[-1], [expected[way : way + count] for way in place.ways], most)
        return Tree.root(tokens[-1])

    def _index(self, expected: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
        n, out = self.options.anchor, dict[tuple[int, ...], list[int]]()
        for end in range(n, len(expected) + 1):
            out.setdefault(tuple(expected[end - n : end]), []).append(end)
        return out

    def _follow(self, place: _Place, news: Sequence[int], expected: Sequence[int]) -> None:
        place.seen += len(news)
        for token in news:
            if place.at >= 0:
                if place.at < len(expected) and expected[place.at] == token:
                    place.at += 1
                    place.run += 1
                else:
                    # a prediction that has hardly agreed is left alone until an anchor is found
                    place.ways = self._ways(place.at, token, expected) if place.run > 1 else []
                    place.left, place.at, place.run, place.away = place.at, -1, 0, 0
            else:
                held = [way for way in place.ways if expected[way] == token]
                if held:
                    place.at, place.run = held[0] + 1, 1
                elif place.ways:  # more may have been put in before the text goes on where it left
                    place.away += 1
                    near = place.away < self._PUT_IN and place.left < len(expected)
                    place.ways = [place.left] if near else []

    def _ways(self, at: int, token: int, expected: Sequence[int]) -> list[int]:
        """Where the prediction may go on after `token` came in place of the expected one: the likeliest first."""
        ahead = [i for i in range(at, min(at + self._WINDOW, len(expected))) if expected[i] == token]
        ways = dict.fromkeys([*(i + 1 for i in ahead[:1]), at + 1, at])  # left out, replaced, put in
        return [way for way in ways if way < len(expected)]

    def _find(self, place: _Place, tokens: Sequence[int]) -> None:
        """Go on behind the last tokens' place in the prediction, the nearest one to where the output left it."""
        ends = place.anchors.get(tuple(tokens[-self.options.anchor :]))
        if ends and place.seen >= self.options.anchor:
            place.at = ends[0] if len(ends) == 1 else min(ends, key=lambda end: abs(end - place.seen))


def _paying(chance: float, first: float, branches: int, curve: Sequence[float], rows: int, most: int) -> int:
    """The length of each of some chains that pays most, if one of them holds with `first` and goes on with `chance`."""
    best, rate = 0, rows / curve[rows]
    gain, reached = float(rows), first
    for length in range(1, most + 1):
        reached *= chance
        gain += reached
        now = gain / curve[min(rows + length * branches, len(curve) - 1)]
        if now > rate:
            best, rate = length, now
    return best


DRAFTER = Prediction
