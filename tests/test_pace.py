"""The rule by which guesses are dropped, tried and taken up again, by counts of steps."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.drafters.pace import Pace, Paces


def steps(pace: Pace, gain: float, cost: float, limit: int = 3000) -> list[bool]:
    """Whether the guesses were made, step by step, each as good as the next."""
    out = []
    for _ in range(limit):
        out.append(pace.wanted())
        if out[-1]:
            pace.saw(gain, cost)
    return out


@pytest.mark.parametrize("cost", [0.1, 0.3, 0.4, 1.0, 3.0])
def test_what_never_comes_true_is_dropped_and_costs_little(cost: float) -> None:
    """Within 40 steps, and at a loss of ten plain steps or one such step; from then on at most 2 % of the time."""
    asked = steps(Pace(), 0.0, cost)
    first = asked.index(False)
    assert first <= 40
    assert first * cost <= max(10, 9 * cost)
    assert sum(asked[first:]) * cost < 0.02 * len(asked[first:])
    assert any(asked[first:])


def test_what_takes_no_time_is_dropped_too_but_looked_at_in_every_other_step() -> None:
    """Looking costs 1 % of a step: it may be done often, and what is found then is taken up within five steps."""
    pace = Pace(gain=5.0)
    asked = steps(pace, 0.0, 0.01, 60)
    assert not pace.on
    assert sum(asked[40:]) >= 10
    back = 0
    while not pace.on:
        if pace.wanted():
            pace.saw(6.0, 0.3)
        back += 1
    assert back <= 5


@pytest.mark.parametrize(("gain", "cost"), [(1.0, 0.3), (0.5, 0.1), (3.0, 1.0), (0.2, 0.01)])
def test_what_pays_is_never_dropped(gain: float, cost: float) -> None:
    assert all(steps(Pace(), gain, cost))


@pytest.mark.parametrize("cost", [0.02, 0.3, 0.5])
def test_what_pays_again_comes_back_within_50_steps(cost: float) -> None:
    """From any place between two trials."""
    for late in range(40):
        pace = Pace()
        steps(pace, 0.0, cost, 100 + late)
        assert not pace.on
        asked = steps(pace, 2.0, cost, 50)
        assert pace.on
        assert all(asked[-5:])


def test_luck_alone_brings_nothing_back() -> None:
    """One token in 20 steps by chance, at a third of a step each: 5,000 steps see it taken up twice at most."""
    rng, pace = np.random.default_rng(1), Pace()
    changes, spent = 0, 0.0
    for _ in range(5000):
        before = pace.on
        if pace.wanted():
            pace.saw(float(rng.random() < 0.05), 0.33)
            spent += 0.33
        changes += before != pace.on
    assert changes <= 5  # the first drop, and two ways there and back
    assert spent < 0.03 * 5000 + 10


def test_a_new_text_begins_with_what_is_usual() -> None:
    """Where guesses do not pay in general, a new text makes none, but for the trials; texts may be short."""
    paces = Paces()
    for step in range(2000):
        paces.step(1)
        text = step // 10  # ten steps long
        if paces.of(text).wanted():
            paces.saw(text, 0.0, 0.3)
    asked = 0
    for step in range(2000, 4000):
        paces.step(1)
        if paces.of(step // 10).wanted():
            paces.saw(step // 10, 0.0, 0.3)
            asked += 1
    assert 20 < asked < 120
    paces.forget(0)


def test_a_text_of_its_own_kind_is_judged_alone() -> None:
    """Two texts run: one gains, one loses. Each is treated as it deserves."""
    paces, asked = Paces(), {0: 0, 1: 0}
    for _ in range(400):
        paces.step(2)
        for text, gain in ((0, 1.5), (1, 0.0)):
            if paces.of(text).wanted():
                asked[text] += 1
                paces.saw(text, gain, 0.3)
    assert asked[0] == 400
    assert asked[1] < 60


def test_what_does_not_pay_in_general_is_not_found_out_by_each_text_anew() -> None:
    """Sixteen texts begin at once: all together lose little more than one of them would alone."""
    paces, asked = Paces(), 0
    for _ in range(60):
        paces.step(16)
        for text in range(16):
            if paces.of(text).wanted():
                asked += 1
                paces.saw(text, 0.0, 0.7)
    assert asked < 16 * 5


def test_one_bad_text_does_not_speak_for_the_next() -> None:
    """It is given up, and the next one begins with guesses all the same; several bad ones in a row do speak."""
    paces = Paces()

    def write(text: int, gain: float, steps: int) -> float:
        asked = 0
        for _ in range(steps):
            paces.step(1)
            if paces.wanted(text):
                asked += 1
                paces.saw(text, gain, 0.3)
        return asked / steps

    for text in range(3):
        assert write(text, 1.0, 60) == 1.0
    assert write(3, 0.1, 80) < 0.75
    assert paces.of(4).on
    for text in range(4, 8):
        write(text, 0.1, 80)
    assert not paces.of(8).on


def test_trials_that_find_nothing_become_few() -> None:
    """At first 1.5 % of the time goes into them, by and by less than half of that, and never nothing."""
    asked = steps(Pace(), 0.0, 0.3, 12000)
    early, late = sum(asked[40:300]) / 260, sum(asked[8000:]) / 4000
    assert 0.8 * 0.015 < 0.3 * early < 0.017
    assert 0.003 < 0.3 * late < 0.0075


def test_what_a_trial_needs_is_gathered_before_it() -> None:
    """Far from it, nothing is."""
    pace = Pace()
    steps(pace, 0.0, 5.0, 20)
    near = []
    while not pace.wanted():
        near.append(pace.near)
    assert not near[0]
    assert near[-8:] == [True] * 8
    assert sum(near) < 10


def test_what_pays_beside_few_texts_may_not_beside_many() -> None:
    """Each class of load has its own verdict, and going back to it needs no new trial."""
    paces = Paces()

    def run(texts: int, cost: float, steps: int) -> float:
        asked = 0
        for _ in range(steps):
            paces.step(texts)
            for text in range(texts):
                if paces.of(text).wanted():
                    asked += 1
                    paces.saw(text, 0.5, cost)
        return asked / steps / texts

    assert run(1, 0.2, 100) == 1.0
    assert run(16, 1.5, 100) < 0.25
    assert run(16, 1.5, 100) < 0.05
    assert run(1, 0.2, 20) == 1.0
    assert run(16, 1.5, 20) < 0.05


def test_a_load_between_two_classes_changes_nothing() -> None:
    """To and fro over the border is no change: only clearly another load is."""
    paces = Paces()
    assert not paces.step(1)
    assert paces.step(4)
    assert not any(paces.step(texts) for texts in (3, 5, 6, 3, 4, 6))
    assert any(paces.step(8) for _ in range(20))
    assert not paces.step(6)


def test_a_text_that_comes_and_goes_is_no_change_of_load() -> None:
    """One text and two by turns, for a step or a few: the class stays; two for good are another."""
    paces = Paces()
    assert not any(paces.step(texts) for _ in range(50) for texts in (1, 2))
    assert not any(paces.step(texts) for _ in range(50) for texts in (1, 1, 1, 2, 2, 2))
    assert [paces.step(2) for _ in range(30)].count(True) == 1
