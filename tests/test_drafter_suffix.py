"""The suffix drafter: its automaton counts right, its guesses are weighed right, its memory is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.core.shaping import Shaping
from outrider.drafters import registry
from outrider.drafters.automaton import Automaton
from outrider.drafters.base import DrafterError, Request
from outrider.drafters.costs import Costs
from rigs import accepted, engine


def suffix(**options: Any) -> Any:
    return engine(drafter="suffix", drafter_options={"row_cost": 0.02, **options})._drafter("suffix")


def request(tokens: Sequence[int], id: int = 0, prompt: int = 1, budget: int = 64) -> Request:
    return Request(id, Shaping(SamplingParams(), 0, list(tokens), prompt), budget)


@pytest.mark.parametrize("letters", [2, 5])
def test_the_automaton_knows_every_end_and_what_followed(letters: int) -> None:
    """Longest repeated end, its occurrences and its continuations are those that a search of the text finds."""
    text = np.random.default_rng(letters).integers(0, letters, 60).tolist()
    automaton = Automaton()
    for end, token in enumerate(text, start=1):
        automaton.add(token)
        known = text[:end]

        def places(length: int, known: list[int] = known) -> list[int]:
            return [e for e in range(length, len(known)) if known[e - length : e] == known[len(known) - length :]]

        longest = max((n for n in range(1, end) if places(n)), default=0)
        state = automaton.link[automaton.last]
        assert automaton.length[state] == longest
        if longest:
            after = Counter(known[e] for e in places(longest))
            assert {t: automaton.count[s] for t, s in automaton.next[state].items()} == after


def test_a_foreign_text_is_followed_through_the_automaton() -> None:
    """The longest end of another text that occurs in this one, token by token, while this one grows."""
    rng = np.random.default_rng(1)
    text, other = rng.integers(0, 3, 80).tolist(), rng.integers(0, 3, 60).tolist()
    automaton, state, matched = Automaton(), 0, 0
    for token in text[:20]:
        automaton.add(token)
    for end, token in enumerate(other, start=1):
        automaton.add(text[19 + end])
        state, matched = automaton.follow(state, matched, token)
        known = text[: 20 + end]
        # what was added since may have made the last match longer: the cursor then stands behind a shorter one
        assert matched <= end
        assert any(known[e - matched : e] == other[end - matched : end] for e in range(matched, len(known) + 1))
    assert matched > 0


def test_a_longer_match_earns_a_longer_draft() -> None:
    """One token that stood before gives a guess or two, a long passage gives many; nothing gives nothing."""
    passage = list(range(10, 40))
    sizes = []
    for overlap in (0, 1, 3, 12):
        (tree,) = suffix().propose([request([*passage, 70, 71, *passage[:overlap]])])
        sizes.append(tree.guesses)
        follows = [*passage[overlap:], 70, 71, *passage]
        assert list(tree.tokens[1:]) == follows[: tree.guesses]
    assert sizes[0] == 0 < sizes[1] < sizes[2] < sizes[3]


def test_what_followed_more_often_comes_first() -> None:
    """Continuations share a tree by frequency, and the rarer one is a sibling."""
    (tree,) = suffix().propose([request([5, 6, 7, 0, 5, 6, 7, 1, 5, 6, 8, 2, 5, 6])])
    children = [tree.tokens[n] for n in tree.children()[0]]
    assert children[:2] == [7, 8]


def test_guesses_dearer_than_they_are_worth_are_left_out() -> None:
    """The price of a row decides: free rows are filled, dear rows wait for near certainty."""
    text = [*range(10, 30), *range(10, 14)]
    sizes = [suffix(row_cost=cost).propose([request(text)])[0].guesses for cost in (0.0, 0.1, 0.5, 2.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[3]) == (24, 0)
    assert 0 < sizes[2] < sizes[1]


def test_a_text_that_never_follows_its_past_loses_trust() -> None:
    """Pairs of tokens that stood before, each followed by another token than then: fewer guesses every time."""
    drafter = suffix(row_cost=0.05)
    asked = request(range(100, 200))
    tokens: Any = asked.shaping.tokens
    sizes = []
    for place in range(100, 196, 8):
        tokens += [place, place + 1]
        (tree,) = drafter.propose([asked])
        sizes.append(tree.guesses)
        tokens.append(300 + place)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_other_requests_of_a_batch_make_rows_dearer() -> None:
    """Eight texts share the cheap rows: each gets fewer guesses than it would alone."""
    drafter = engine(drafter="suffix")._drafter("suffix")
    text = [*range(10, 30), *range(10, 13)]
    (alone,) = drafter.propose([request(text, id=9)])
    together = drafter.propose([request(text, id=i) for i in range(8)])
    assert sum(tree.guesses for tree in together) < 8 * alone.guesses


def test_the_memory_helps_the_next_request_and_forgets_the_oldest() -> None:
    """An answer is guessed for the next one who gets it; a full memory drops the older half, within its bound."""
    answers = [list(range(start, start + 40)) for start in range(100, 4100, 100)]
    for megabytes, kept in ((0.0, 0), (0.1, 1), (4.0, 2)):
        drafter = suffix(memory_mb=megabytes)
        for id, answer in enumerate(answers):
            drafter.propose([request([1, 2, *answer], id=id, prompt=2)])
            drafter.forget(id)
        guessed = [
            drafter.propose([request([7, *answers[place][:6]], id=500 + place)])[0].guesses > 0 for place in (0, -1)
        ]
        assert guessed == [kept == 2, kept > 0]
        assert drafter.memory().get("memory", 0) <= megabytes * 1e6


def test_the_memory_learns_outputs_only() -> None:
    """What a caller asked is nobody else's guess."""
    drafter = suffix(memory_mb=1)
    drafter.propose([request(range(10, 40), prompt=30)])
    drafter.forget(0)
    assert drafter.propose([request([7, *range(10, 16)], id=1)])[0].guesses == 0


def test_with_a_memory_a_second_run_takes_fewer_steps() -> None:
    """The same request again: its own earlier answer is the draft, and the text is the same."""
    e = engine(drafter="suffix", drafter_options={"memory_mb": 1, "row_cost": 0.02})
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    first, second = (e.generate([[3, 9, 4]], params)[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert len(second.steps) < len(first.steps) / 2
    assert accepted([second]) > accepted([first])


@pytest.mark.parametrize("options", [{"min_match": 0}, {"min_probability": 0.0}, {"memory_mb": -1}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(DrafterError, match=r"suffix: min_match is at least 1"):
        suffix(**options)


def test_costs_follow_the_clock() -> None:
    """Measured times replace the assumed ones, whatever the speed of the machine."""
    for plain in (0.004, 0.4):
        costs = Costs()
        for _ in range(300):
            costs.measured(1, plain)
            costs.measured(8, 2 * plain)
        assert costs.unit == pytest.approx(plain, rel=0.1)
        assert costs.cost(1) == 1.0
        assert costs.cost(8) == pytest.approx(2.0, rel=0.1)
        assert all(a < b for a, b in zip(costs.curve[1:], costs.curve[2:], strict=False))
        assert costs.cost(400) > costs.cost(128)


def test_a_slow_step_does_not_shake_the_costs() -> None:
    """Forwards that were held up for a second count little; fixed prices count nothing at all."""
    costs, fixed = Costs(), Costs(row=0.1)
    for step in range(80):
        for one in (costs, fixed):
            one.measured(1, 0.004)
            one.measured(4, 1.0 if step % 20 == 0 else 0.004 * costs.assumed[4])
    assert costs.cost(4) == pytest.approx(costs.assumed[4], rel=0.15)
    assert fixed.cost(4) == pytest.approx(1.3)
    assert fixed.unit is None


def test_the_drafter_is_listed_with_its_options() -> None:
    """Files that serve drafters are no methods."""
    assert {"automaton", "costs"}.isdisjoint(registry.names())
