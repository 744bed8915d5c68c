"""The controller: drafts are cut to what pays, drafters that lose are sent to rest, and no text shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

from outrider import Engine, SamplingParams
from outrider.core.params import ParameterError
from outrider.core.tree import Tree
from outrider.drafters.costs import Costs
from outrider.engine.controller import Controller, Drafted
from outrider.engine.transitions import Transitions
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


@dataclass
class Play:
    """One text and one drafter, "x", by a clock of its own: forwards take 1 ms, and `row` more for each row more.

    `draft` and `row` are in plain steps. Keeps the time that all took, in plain steps, and the tokens.
    """

    controller: Controller
    draft: float = 0.0
    row: float = 0.0
    text: int = 0
    texts: int = 1  # that run beside it, plainly, itself counted
    seconds: float = 0.0
    tokens: int = 0
    asked: list[bool] = field(default_factory=list)

    def step(self, tree: Tree, right: int) -> None:
        """A step in which the first `right` guesses of a chain come true, if there are any."""
        c, rows = self.controller, self.texts
        c.begin(["x"], self.texts)
        drafts, accepted = [], 0
        wanted = c.wants("x", self.text)
        self.asked.append(wanted)
        if wanted:
            (chosen,) = c.choose([tree], ["x"], rows)
            assert chosen is not None
            accepted = min(right, chosen.guesses)
            rows += chosen.guesses
            said = [*tree.tokens[1 : 1 + min(right, tree.guesses)], 5]
            drafts = [Drafted("x", self.draft * 1e-3, [self.text], [chosen], [accepted], [tree], [said])]
        forward = 1 + self.row * (rows - self.texts)
        c.record(rows, False, 1e-3 * forward, drafts)
        c.settle([("x", [self.text])])
        self.seconds += forward + self.draft * wanted
        self.tokens += 1 + accepted

    def run(self, steps: int, tree: Tree, right: int) -> list[bool]:
        """Whether the drafter was asked, step by step."""
        for _ in range(steps):
            self.step(tree, right)
        return self.asked[-steps:]


THREE = Tree.chain(1, [2, 2, 2])


def test_a_drafter_that_loses_rests_and_one_that_gains_does_not() -> None:
    """A draft that is never right and costs 40 % of a step is asked in 5 % of the steps; it returns when right."""
    play = Play(Controller(Costs()), draft=0.4)
    asked = play.run(4000, THREE, 0)
    assert sum(asked) < 0.05 * len(asked)
    assert any(asked[200:])  # it is tried again
    assert all(play.run(4000, THREE, 3)[-3900:])
    assert all(Play(Controller(Costs()), draft=0.4).run(500, THREE, 2))


def test_a_ruined_draft_costs_little_after_the_first_hundred_tokens() -> None:
    """Wrong each time and surely so, whatever it costs: at most 3 % of plain decoding from then on."""
    for draft in (0.05, 0.3, 0.6, 1.5):
        play = Play(Controller(Costs()), draft=draft, row=0.03)
        play.run(100, chain(0.9, 0.8, 0.7), 0)
        before = play.seconds
        play.run(1000, chain(0.9, 0.8, 0.7), 0)
        assert play.seconds - before < 1.03 * 1000


def test_the_mode_follows_the_traffic_within_50_steps() -> None:
    """Copying and random text by turns: two changes of mode a round, each soon after the turn, with their figures."""
    for draft in (0.01, 0.2, 0.5):
        transitions = Transitions(clock=lambda: 0.0)
        play = Play(Controller(Costs(), transitions), draft=draft, row=0.03)
        play.run(200, THREE, 3)
        assert not transitions.recent
        turns = []
        for turn in range(6):
            turns.append(len(play.asked))
            play.run(300, THREE, 3 * (turn % 2))
        changes = transitions.recent
        assert [t.after for t in changes] == ["plain", "speculative"] * 3
        assert [t.reason for t in changes] == ["does not pay", "pays again"] * 3
        assert all(0 < t.step - turn <= 50 for t, turn in zip(changes, turns, strict=True))
        for change in changes:
            assert change.speedup is not None
            assert change.acceptance is not None
            assert change.plain_tokens_per_second == pytest.approx(1000, rel=0.1)
            assert change.requests == 1


def test_a_change_of_load_is_named_as_the_reason() -> None:
    """What pays for one text does not beside fifteen others: there a draft takes many times a text's share."""
    transitions = Transitions(clock=lambda: 0.0)
    play = Play(Controller(Costs(), transitions), draft=0.3)
    play.run(200, THREE, 1)
    play.texts = 16
    play.run(100, THREE, 1)
    play.texts = 1
    play.run(40, THREE, 1)
    assert [(t.after, t.reason) for t in transitions.recent] == [("plain", "load"), ("speculative", "load")]


def test_under_the_floor_it_goes_on_plainly_and_over_it_returns() -> None:
    """A rate of a third against a floor of a half: plain, but for trials; two thirds: back. Time has no say."""
    for live in (True, False):
        transitions = Transitions(clock=lambda: 0.0)
        play = Play(Controller(Costs(), transitions, live=live, least=0.5))
        assert all(play.run(200, THREE, 2))
        below = play.run(600, THREE, 1)
        assert below.index(False) <= 50
        assert sum(below[50:]) < 0.12 * len(below[50:])
        assert all(play.run(200, THREE, 2)[50:])
        changes = transitions.recent
        assert [(t.after, t.reason) for t in changes] == [
            ("plain", "acceptance under the floor"),
            ("speculative", "acceptance over the floor"),
        ]
        assert changes[0].acceptance is not None
        assert changes[0].acceptance < 0.5
        assert (changes[0].speedup is None) != live


def test_a_rate_at_the_floor_does_not_flap() -> None:
    """Now over, now under it by a little: what has fallen back needs clearly more to return."""
    transitions = Transitions(clock=lambda: 0.0)
    play = Play(Controller(Costs(), transitions, live=False, least=0.5))
    rng = np.random.default_rng(0)
    for _ in range(3000):
        play.step(THREE, int(rng.integers(0, 4)))  # half of them on average
    assert len(transitions.recent) <= 20


def test_a_free_drafter_that_is_never_right_costs_little() -> None:
    """Guesses without chances are judged by what came of them: where rows cost, hardly one is spent on them."""
    play = Play(Controller(Costs()), row=0.3)
    tree = Tree.chain(1, [2] * 8)
    play.run(100, tree, 0)
    before = play.seconds
    play.run(900, tree, 0)
    assert play.seconds - before < 1.03 * 900


def test_boastful_chances_are_taken_down() -> None:
    """A drafter that claims 0.9 for guesses that come true one time in ten ends with fewer rows than an honest one."""
    boastful, honest = Controller(Costs()), Controller(Costs())
    for step in range(300):
        for controller, right in ((boastful, step % 10 == 0), (honest, True)):
            drafted = chain(0.9, 0.81, 0.73)
            (tree,) = controller.choose([drafted], ["x"], 1)
            assert tree is not None
            accepted, said = (tree.guesses, [2, 2, 2, 5]) if right else (0, [5])
            done = Drafted("x", 0, [0], [tree], [accepted], [drafted], [said])
            controller.record(1 + tree.guesses, False, 1e-3 * (1 + 0.3 * tree.guesses), [done])
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_acceptance": 0.0}, r"0.0 is not a number in \(0, 1\]"),
        ({"min_acceptance": 1.5}, "1.5 is not a number"),
        ({"min_acceptance": True}, "True is not a number"),
        ({"min_acceptance": 0.5, "verify": "rejection"}, "under rejection the text depends on the guesses"),
    ],
)
def test_a_floor_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"min_acceptance: .*{message}"):
        Engine.from_loaded(loaded(files()), **settings)


def test_a_floor_holds_an_engine_back_and_shows_in_no_text() -> None:
    """Junk under a floor: after its trial a tenth of its guesses, the transition is told, the texts stand."""
    params = mix("greedy", 1, max_tokens=150, ignore_eos=True)
    free, held = (Engine.from_loaded(loaded(files()), drafter="junk", min_acceptance=least) for least in (None, 0.9))
    first, second = free.generate(prompts(2), params), held.generate(prompts(2), params)
    assert [said(r) for r in first] == [said(r) for r in second]
    assert 0 < rejected(second) < rejected(first) / 2
    assert [(t.after, t.reason) for t in held.transitions] == [("plain", "acceptance under the floor")]
    assert not free.transitions
