"""What claims are worth is learned from what came true, wherever on the scale they stand."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.tree import Tree
from outrider.drafters.calibration import Agreement, Calibration, share


def test_it_begins_by_believing() -> None:
    """But nothing is certain."""
    belief = Calibration()
    assert [belief.chance(claim) for claim in (0.0, 0.04, 0.35, 0.9)] == pytest.approx([0.0, 0.04, 0.35, 0.9])
    assert 0.99 < belief.chance(1.0) < 1


def test_modest_and_boastful_claims_are_told_apart() -> None:
    """Claims of 0.45 come true in 70 % of cases and claims of 0.05 in 1 %: one curve learns both."""
    belief, rng = Calibration(), np.random.default_rng(0)
    for _ in range(3000):
        belief.saw(0.45, rng.random() < 0.7)
        belief.saw(0.05, rng.random() < 0.01)
    assert belief.chance(0.45) == pytest.approx(0.7, abs=0.06)
    assert belief.chance(0.05) < 0.03
    assert belief.chance(0.0) == 0.0


def test_a_ruined_head_is_found_out_and_a_repaired_one_too() -> None:
    """Surely wrong twenty times: hardly believed. Right a hundred times: believed again."""
    belief = Calibration()
    for _ in range(20):
        belief.saw(0.9, right=False)
    assert belief.chance(0.9) < 0.25
    for _ in range(100):
        belief.saw(0.9, right=True)
    assert belief.chance(0.9) > 0.8


def test_only_guesses_whose_parent_was_right_are_judged() -> None:
    """Of a tree with two children and two grandchildren, the target said the second child, and then something else."""
    tree = Tree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2), chances=(1.0, 0.55, 0.35, 0.5, 0.3))
    belief, seen = Calibration(), Calibration()
    belief.saw_tree(tree, [3, 9])
    seen.saw(0.55, right=False)
    seen.saw(0.35, right=True)
    seen.saw(share(tree.chances or (), 4, 2), right=False)
    claims = [step / 20 for step in range(21)]
    assert [belief.chance(c) for c in claims] == [seen.chance(c) for c in claims]
    assert belief.chances(tree)[4] == belief.chances(tree)[2] * belief.chance(0.3 / 0.35)


def test_a_tree_without_claims_says_nothing() -> None:
    belief = Calibration()
    belief.saw_tree(Tree.chain(1, [2, 3]), [2, 3, 4])
    assert belief.chance(0.35) == pytest.approx(0.35)


def test_two_witnesses_who_agree_are_believed_more() -> None:
    """At first by rule, and then by what came of it: here the first witness knows nothing, and the other is right."""
    belief = Agreement()
    assert belief.chance(0.6, 0.6) > 0.6 > belief.chance(0.6, 0.0)
    rng = np.random.default_rng(1)
    for _ in range(4000):
        right = bool(rng.random() < 0.6)
        belief.saw(0.5, 0.6 if right else 0.0, right)
        belief.saw(0.5, 0.0, right=False)
        belief.saw(0.0, 0.6, right=bool(rng.random() < 0.6))
    assert belief.chance(0.5, 0.0) < 0.05
    assert belief.chance(0.5, 0.6) > 0.9
    assert belief.chance(0.0, 0.6) == pytest.approx(0.6, abs=0.12)
