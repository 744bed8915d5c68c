"""Counts what the target writes after one and after two tokens: an n-gram model of its answers.

Probabilities are interpolated with absolute discounting (Ney, Essen and Kneser 1994), the longer context over the
shorter one; a row of two tokens that says nearly what the shorter one says is left out.

    p(t | a b) = max(c(a b t) - d, 0) / c(a b) + d * kinds(a b) / c(a b) * p(t | b)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outrider.models.ngrams import Row
from outrider.train.settings import NgramModelSettings
from outrider.train.shards import Answer

__all__ = ["count", "right"]

Context = tuple[int, ...]
_ORDERS = 2


def count(answers: Iterable[Answer], settings: NgramModelSettings) -> list[dict[Context, Row]]:
    """The rows of each order. Only tokens of answers are counted; the prompt's last ones are contexts."""
    counts: list[defaultdict[Context, Counter[int]]] = [defaultdict(Counter) for _ in range(_ORDERS)]
    for answer in answers:
        tokens = [*answer.prompt[-_ORDERS:].tolist(), *answer.answer.tolist()]
        for order in range(1, _ORDERS + 1):
            for end in range(len(tokens) - len(answer.answer), len(tokens)):
                if end >= order:
                    counts[order - 1][tuple(tokens[end - order : end])][tokens[end]] += 1
    least = (settings.least_single, settings.least_pair)
    rows: list[dict[Context, Row]] = []
    for order, found in enumerate(counts):
        shorter = rows[-1] if rows else {}
        rows.append({})
        for context, after in found.items():
            if after.total() >= least[order]:
                below = shorter.get(context[1:], ())
                row = _row(after, below, settings)
                if row and after.total() * _difference(row, below) >= settings.least_news:
                    rows[-1][context] = row
    return rows


def right(answers: Iterable[Answer], rows: Sequence[Mapping[Context, Row]]) -> tuple[float, float]:
    """At how many of the answers' tokens the likeliest guess is right, and any of the row's."""
    first = some = total = 0
    for answer in answers:
        tokens = [*answer.prompt[-_ORDERS:].tolist(), *answer.answer.tolist()]
        for end in range(len(tokens) - len(answer.answer), len(tokens)):
            found: Row = ()
            for order in range(min(_ORDERS, end), 0, -1):
                found = found or rows[order - 1].get(tuple(tokens[end - order : end]), ())
            guesses = [token for token, _ in found]
            total += 1
            first += guesses[:1] == [tokens[end]]
            some += tokens[end] in guesses
    return first / max(1, total), some / max(1, total)


def _row(after: Counter[int], below: Row, settings: NgramModelSettings) -> Row:
    total, discount = after.total(), settings.discount
    left = discount * len(after) / total
    chances = {token: max(times - discount, 0.0) / total for token, times in after.items()}
    for token, chance in below:
        chances[token] = chances.get(token, 0.0) + left * chance
    best = sorted(chances.items(), key=lambda guess: (-guess[1], guess[0]))[: settings.guesses]
    return [(token, chance) for token, chance in best if chance >= settings.least_chance]


def _difference(row: Row, below: Row) -> float:
    """Probability that the two share out differently."""
    known = dict(below)
    return sum(abs(chance - known.get(token, 0.0)) for token, chance in row)
