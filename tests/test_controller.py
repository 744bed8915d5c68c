"""The controller: drafts are cut to what pays, drafters that lose are sent to rest, and no text shows it."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from outrider import Engine, SamplingParams
from outrider.core.tree import Tree
from outrider.drafters.costs import Costs
from outrider.engine.controller import Controller, Drafted
from rigs import draft_files, files, loaded, mix, prompts, rejected, said


def chain(*reaches: float) -> Tree:
    return Tree.chain(1, [2] * len(reaches), chances=reaches)


def rate(reaches: list[float], controller: Controller) -> float:
    """Expected tokens per cost of a chain."""
    overhead = 0.01 if reaches else 0.0
    return (1 + sum(reaches)) / (controller.costs.cost(1 + len(reaches)) + overhead)


@pytest.mark.parametrize(
    "chances", [[0.9] * 12, [0.01] * 8, [0.02, 0.99, 0.99, 0.99], [0.5, 0.1, 0.9], [0.04] * 3, [1.0] * 20, [0.0] * 3]
)
def test_the_chosen_length_of_a_chain_has_the_best_rate(chances: list[float]) -> None:
    """Of all lengths, none gives more expected tokens per cost."""
    controller, reaches = Controller(Costs(), live=False), np.cumprod(chances).tolist()
    rates = [rate(reaches[:length], controller) for length in range(len(reaches) + 1)]
    (tree,) = controller.choose([chain(*reaches)], ["x"], 1)
    assert tree is not None
    assert rates[tree.guesses] == pytest.approx(max(rates))


def test_a_chosen_part_of_trees_has_the_best_rate() -> None:
    """Two small trees in one step: no other choice of whole paths, tried one by one, gives more per cost."""
    controller = Controller(Costs(), live=False)
    first = Tree((1, 2, 3, 4), (-1, 0, 0, 1), chances=(1.0, 0.6, 0.05, 0.5))
    second = Tree((1, 2, 3), (-1, 0, 1), chances=(1.0, 0.04, 0.001))
    chosen = controller.choose([first, second], ["x", "y"], 2)

    def value(picked: list[float]) -> float:
        overhead = 0.01 if picked else 0.0
        return (2 + sum(picked)) / (controller.costs.cost(2 + len(picked)) + overhead)

    def subsets(tree: Tree) -> list[list[int]]:
        kept = [[n + 1 for n, take in enumerate(bits) if take] for bits in product((0, 1), repeat=tree.guesses)]
        return [k for k in kept if all(tree.parents[n] in (0, *k) for n in k)]

    best = max(
        value([first.chances[n] for n in a] + [second.chances[n] for n in b])  # type: ignore[index]
        for a in subsets(first)
        for b in subsets(second)
    )
    got = [c for tree in chosen if tree is not None and tree.chances is not None for c in tree.chances[1:]]
    assert value(got) == pytest.approx(best)
    assert chosen[1] is not None
    assert chosen[1].guesses == 0


def play(controller: Controller, steps: int, right: int, cost_of_draft: float, tree: Tree) -> list[bool]:
    """Whether the drafter was asked, step by step, with forwards of 1 ms whatever the rows."""
    asked = []
    for _ in range(steps):
        if controller.rests("x"):
            asked.append(False)
            controller.record(1, False, 1e-3, [])
            continue
        (chosen,) = controller.choose([tree], ["x"], 1)
        assert chosen is not None
        accepted = min(right, chosen.guesses)
        controller.record(1 + chosen.guesses, False, 1e-3, [Drafted("x", cost_of_draft, [chosen], [accepted])])
        asked.append(True)
    return asked


def test_a_drafter_that_loses_rests_and_one_that_gains_does_not() -> None:
    """A draft that is never right and costs 40 % of a step is asked in 3 % of the steps; it returns when right."""
    controller = Controller(Costs())
    asked = play(controller, 4000, 0, 0.4e-3, Tree.chain(1, [2, 2, 2]))
    assert sum(asked) < 0.03 * len(asked)
    assert any(asked[200:])  # it is tried again
    asked = play(controller, 4000, 3, 0.4e-3, Tree.chain(1, [2, 2, 2]))
    assert all(asked[-1000:])
    assert all(play(Controller(Costs()), 500, 2, 0.4e-3, Tree.chain(1, [2, 2, 2])))


def test_a_free_drafter_that_is_never_right_costs_little() -> None:
    """Guesses without chances are judged by what came of them: where rows cost, hardly one is spent on them."""
    controller, tree = Controller(Costs()), Tree.chain(1, [2] * 8)
    seconds = []
    for _ in range(1000):
        drafts, guesses = [], 0
        if not controller.rests("x"):
            (chosen,) = controller.choose([tree], ["x"], 1)
            assert chosen is not None
            guesses, drafts = chosen.guesses, [Drafted("x", 0, [chosen], [0])]
        seconds.append(1 + 0.3 * guesses)
        controller.record(1 + guesses, False, 1e-3 * seconds[-1], drafts)
    assert sum(seconds[100:]) < 1.05 * 900


def test_boastful_chances_are_taken_down() -> None:
    """A drafter that claims 0.9 for guesses that come true one time in ten ends with fewer rows than an honest one."""
    boastful, honest = Controller(Costs()), Controller(Costs())
    for step in range(300):
        for controller, right in ((boastful, step % 10 == 0), (honest, True)):
            (tree,) = controller.choose([chain(0.9, 0.81, 0.73)], ["x"], 1)
            assert tree is not None
            accepted = tree.guesses if right else 0
            controller.record(
                1 + tree.guesses, False, 1e-3 * (1 + 0.3 * tree.guesses), [Drafted("x", 0, [tree], [accepted])]
            )
    sizes = [c.choose([chain(0.9, 0.81, 0.73)], ["x"], 1)[0] for c in (boastful, honest)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert sizes[0].guesses < sizes[1].guesses == 3


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "draft_model", "junk", "lookahead"])
def test_adapting_shows_in_no_text(drafter: str) -> None:
    """Whatever the controller decides from the clock, tokens and log-probabilities are those of plain decoding."""
    params = mix("T 0.7", 8, max_tokens=60)
    plain = Engine.from_loaded(loaded(files())).generate(prompts(4), params)
    engine = Engine.from_loaded(loaded(files()), drafter=drafter, draft=loaded(draft_files()), batch_size=3, adapt=True)
    refused = 0
    for _ in range(3):
        got = engine.generate(prompts(4), params)
        assert [said(r) for r in got] == [said(r) for r in plain]
        refused += rejected(got)
    assert refused > 0


def test_without_adapt_the_clock_decides_nothing() -> None:
    """Forwards that seem to dawdle, or to be free, change no step; with `adapt` they do."""
    steps: dict[tuple[bool, float], list[Any]] = {}
    for adapt, seconds in ((False, 1.0), (False, 1e-9), (True, 1.0)):
        engine = Engine.from_loaded(loaded(files()), drafter="ngram", adapt=adapt)
        for _ in range(400):
            engine._controller.costs.measured(1, 1e-6)
            engine._controller.costs.measured(12, seconds)
        (result,) = engine.generate([[5, 6, 7] * 9], SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={5: 90}))
        steps[adapt, seconds] = [step.drafted for step in result.steps]
    assert steps[False, 1.0] == steps[False, 1e-9]
    assert max(steps[False, 1.0]) > 8
    assert sum(steps[True, 1.0]) < sum(steps[False, 1.0])
