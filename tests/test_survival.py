"""How far a match carries, and the drafter that guesses by it."""

from __future__ import annotations

from outrider import Engine, SamplingParams
from outrider.core.shaping import Shaping
from outrider.drafters import registry
from outrider.drafters.base import Observation, Request
from outrider.drafters.costs import Costs
from outrider.drafters.ngram import DRAFTER as NGRAM
from outrider.drafters.survival import Survival
from outrider.engine.controller import Controller
from rigs import files, loaded


def test_what_a_text_shows_outweighs_what_is_usual() -> None:
    """Whatever the match: where the text always went on otherwise the chance goes to nothing, and back."""
    for match in (1, 3, 8, 24, 100):
        survival = Survival()
        for _ in range(400):
            survival.saw(match, 1, 0)
        assert survival.chance(match) < 0.01
        for _ in range(400):
            survival.saw(match, 1, 1)
        assert survival.chance(match) > 0.9


def test_what_was_not_guessed_is_learnt_from() -> None:
    """A text that wanders for long and then repeats itself: drafts stop, and come back."""
    drafter, controller = NGRAM(registry.options("ngram", {}), None), Controller(Costs(), live=False)
    text = [token for follower in [*range(10, 400), *([7, 8, 9] * 40)] for token in (3, follower)]
    tokens = [3]
    request = Request(0, Shaping(SamplingParams(), 0, tokens, 1), 15)
    lengths = []
    for place, token in enumerate(text):
        (tree,) = controller.choose(drafter.propose([request]), ["ngram"], 1)
        assert tree is not None
        lengths.append(tree.guesses)
        pairs = zip(tree.tokens[1:], text[place:], strict=False)
        right = next((n for n, (guess, said) in enumerate(pairs) if guess != said), tree.guesses)
        tokens.append(token)
        drafter.observe([Observation(request, None, 0, 0, 1, tree, tuple(range(1, right + 1)))])
    assert not any(lengths[600:780])
    assert min(lengths[-60:-15]) > 7


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
