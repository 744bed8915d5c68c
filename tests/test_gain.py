"""What a guess is worth, and the drafter that spends by it."""

from __future__ import annotations

from itertools import product

import pytest

from outrider import Engine, SamplingParams
from outrider.core.shaping import Shaping
from outrider.drafters import registry
from outrider.drafters.base import Observation, Request
from outrider.drafters.gain import Survival, paying_length, step_cost
from outrider.drafters.ngram import DRAFTER as NGRAM
from rigs import files, loaded


def rate(chances: list[float], length: int) -> float:
    """Expected tokens per cost of a chain, by enumeration of what comes true."""
    tokens = 0.0
    for outcome in product((False, True), repeat=length):
        weight = 1.0
        for right, chance in zip(outcome, chances, strict=False):
            weight *= chance if right else 1 - chance
        carried = next((i for i, right in enumerate(outcome) if not right), length)
        tokens += weight * (1 + carried)
    return tokens / step_cost(length + 1)


@pytest.mark.parametrize(
    "chances", [[0.9] * 8, [0.01] * 8, [0.02, 0.99, 0.99, 0.99], [0.5, 0.1, 0.9], [0.04] * 3, [1.0] * 8, [0.0] * 3]
)
def test_the_paying_length_has_the_best_rate(chances: list[float]) -> None:
    """Of all lengths, none gives more expected tokens per cost, and a shorter one gives less."""
    rates = [rate(chances, length) for length in range(len(chances) + 1)]
    assert paying_length(chances) == rates.index(max(rates))


def test_where_nothing_comes_true_nothing_is_guessed() -> None:
    """Whatever the match, a text that always went on otherwise gets no draft, and one that never did a long one."""
    for match in (1, 3, 8, 24, 100):
        survival = Survival()
        for _ in range(400):
            survival.saw(match, 1, 0)
        assert paying_length([survival.chance(match)]) == 0
        for _ in range(400):
            survival.saw(match, 1, 1)
        assert survival.chance(match) > 0.9


def test_what_was_not_guessed_is_learnt_from() -> None:
    """A text that wanders for long and then repeats itself: drafts stop, and come back."""
    drafter = NGRAM(registry.options("ngram", {}), None)
    tokens = [3]
    shaping = Shaping(SamplingParams(), 0, tokens, 1)
    request = Request(0, shaping, 15)
    lengths = []
    for follower in [*range(10, 400), *([7, 8, 9] * 40)]:
        for token in (3, follower):
            (tree,) = drafter.propose([request])
            lengths.append(tree.guesses)
            right = tree.guesses and tree.tokens[1] == token
            tokens.append(token)
            drafter.observe([Observation(request, None, 0, 0, 1, tree, (1,) if right else ())])
    assert not any(lengths[600:780])
    assert min(lengths[-60:]) > 3


def test_a_guess_that_came_true_lengthens_the_match() -> None:
    """Three guesses behind two tokens, two of them right: matches of 2 and 3 held, one of 4 did not, 5 is not known."""
    survival, fresh = Survival(), Survival()
    survival.saw(2, 3, 2)
    assert survival.chance(2) > fresh.chance(2)
    assert survival.chance(3) > fresh.chance(3)
    assert survival.chance(4) < fresh.chance(4)
    assert survival.chance(1) == fresh.chance(1)
    assert survival.chance(9) == fresh.chance(9)


def test_ngram_spends_its_limit_on_a_text_in_circles() -> None:
    """Where every guess comes true the drafts grow to `max_draft_tokens`, and a caller's higher limit is used."""
    for most, settings in ((15, {}), (25, {"max_draft_tokens": 25})):
        engine = Engine.from_loaded(loaded(files()), drafter="ngram", **settings)
        params = SamplingParams(max_tokens=160, ignore_eos=True, logit_bias={5: 90})
        (circle,) = engine.generate([[5, 6, 7, 8] * 30], params)
        assert max(step.drafted for step in circle.steps) == most
