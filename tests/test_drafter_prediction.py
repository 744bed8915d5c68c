"""The prediction drafter: long drafts where it is right, next to none where it is wrong, and quick ways back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.core.shaping import Shaping
from outrider.drafters.base import DrafterError, Observation, Request
from rigs import engine

TEXT = np.random.default_rng(0).integers(3, 97, 120).tolist()


def steps(truth: Sequence[int], expected: Sequence[int], **options: Any) -> list[tuple[int, int]]:
    """Guesses and accepted guesses of each step that writes `truth`."""
    settings = {"row_cost": 0.03, **options}
    drafter: Any = engine(drafter="prediction", drafter_options=settings)._drafter("prediction")
    tokens = [1, 2, truth[0]]
    request = Request(0, Shaping(SamplingParams(), 0, tokens, 2), 64, prediction=tuple(expected))
    scores: Any = None
    out = []
    while len(tokens) - 2 < len(truth):
        (tree,) = drafter.propose([request])
        rest, path, node = truth[len(tokens) - 2 :], [], 0
        children = tree.check(97).children()
        while len(path) < len(rest) - 1:
            right = [c for c in children[node] if tree.tokens[c] == rest[len(path)]]
            if not right:
                break
            node = right[0]
            path.append(node)
        tokens += rest[: len(path) + 1]
        out.append((tree.guesses, len(path)))
        seen = Observation(
            request=request, scores=scores, feed=0, start=0, pending=1, tree=tree, path=tuple(path), token=tokens[-1]
        )
        drafter.observe([seen])
    return out


def test_a_right_prediction_takes_few_steps() -> None:
    """120 tokens in at most nine forwards, their drafts longer each time; every guess is right."""
    taken = steps(TEXT, TEXT)
    assert len(taken) <= 9
    drafted = [guesses for guesses, _ in taken[:-1]]
    assert drafted == sorted(drafted)
    assert drafted[-1] > 16


def test_a_prediction_that_is_wrong_everywhere_costs_next_to_nothing() -> None:
    """Guesses in a few of 120 steps, then it knows better."""
    wrong = [(token + 47) % 94 + 3 for token in TEXT]
    taken = steps(TEXT, wrong, row_cost=0.1)
    assert sum(guesses > 0 for guesses, _ in taken) < 12
    assert not any(guesses for guesses, _ in taken[len(taken) // 2 :])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: [*t[:60], 99 - t[60], *t[61:]],
        lambda t: [*t[:60], 4, *t[60:]],
        lambda t: [*t[:60], 3, 4, 5, *t[60:]],
        lambda t: [*t[:60], *t[63:]],
    ],
    ids=["replaced", "put in", "three put in", "left out"],
)
def test_after_a_difference_the_draft_finds_the_way_back(change: Any) -> None:
    """A token replaced, put in or left out costs a refused guess or a few, not a step per token of an anchor."""
    taken = steps(change(TEXT), TEXT)
    assert len(taken) <= 11
    refused = next(i for i, (guesses, accepted) in enumerate(taken) if accepted < guesses)
    assert max(accepted for _, accepted in taken[refused + 1 : refused + 4]) > 5


def test_ways_back_that_never_hold_are_no_longer_guessed() -> None:
    """A prediction with the right beginnings of sentences only: what its tails cost is learnt."""
    mixed = [token if i % 6 < 3 else (token + 31) % 94 + 3 for i, token in enumerate(TEXT * 4)]
    taken = steps(TEXT * 4, mixed, row_cost=0.1)
    half = len(taken) // 2
    wasted = [guesses - accepted for guesses, accepted in taken]
    assert sum(wasted[half:]) < sum(wasted[:half])


def test_rows_that_cost_more_shorten_the_draft() -> None:
    """The longest draft is set by what a row costs, not by a number."""
    longest = [max(g for g, _ in steps(TEXT, TEXT, row_cost=cost)) for cost in (0.0, 0.05, 0.3)]
    assert longest[0] > longest[1] > longest[2] > 0


def test_an_anchor_of_nothing_is_refused() -> None:
    """By name."""
    with pytest.raises(DrafterError, match="prediction: anchor 0 is below 1"):
        engine(drafter="prediction", drafter_options={"anchor": 0})
