"""Verification walks: what is accepted, what closes, what is asked of the arguments and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core import noise, sampling, verify
from outrider.core.params import SamplingParams
from outrider.core.shaping import Draw, Shaping
from outrider.core.tree import Tree
from outrider.core.verify import LawError, Verdict
from outrider.runtime import native_sampling

#       0
#      / \
#     1   2      tokens 5, 6
#    / \   \
#   3   4   5    tokens 7, 8, 9
TREE = Tree((1, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 1, 2))


def law(size: int, **mass: float) -> np.ndarray:
    p = np.zeros(size)
    for token, value in mass.items():
        p[int(token[1:])] = value
    return p


@pytest.mark.parametrize(
    ("draws", "path"),
    [
        ({0: 4}, ()),  # no guess was right
        ({0: 5, 1: 8, 4: 3}, (1, 4)),  # to a leaf and a bonus after it
        ({0: 6, 2: 1}, (2,)),
        ({0: 6, 2: 9, 5: 9}, (2, 5)),
    ],
)
def test_match_follows_the_targets_own_draws(draws, path):
    """Each visited node is drawn once, in order, and no other node is looked at."""
    asked = []

    def draw(node: int) -> Draw:
        asked.append(node)
        return Draw(draws[node], -float(node))

    verdict = verify.match(TREE, draw)
    assert asked == list(draws)
    assert verdict == Verdict(path, list(draws.values())[-1], tuple(Draw(t, -float(n)) for n, t in draws.items()))


def test_match_of_the_root_alone_is_plain_decoding():
    assert verify.match(Tree.root(3), lambda node: Draw(9)) == Verdict((), 9, (Draw(9),))


def rejection(tree: Tree, laws: dict[int, np.ndarray], uniforms: dict[tuple[int, int], float]):
    """Runs `reject`; returns the verdict, the tests made, and the law that the closing token was drawn from."""
    tests, seen = [], []

    def uniform(depth: int, sibling: int) -> float:
        tests.append((depth, sibling))
        return uniforms[depth, sibling]

    def residual(depth: int, p: np.ndarray) -> int:
        seen.append((depth, p))
        return int(p.argmax())

    verdict = verify.reject(tree, laws.__getitem__, uniform, residual)
    assert len(seen) == 1
    return verdict, tests, seen[0]


def test_rejection_accepts_below_the_ratio_and_not_at_it():
    """u * q < p, strictly: at u = p / q the token is refused, and u = 0 does not accept what p forbids."""
    q, p = law(4, t1=0.5, t2=0.5), law(4, t1=0.25, t3=0.75)
    tree = Tree((0, 1), (-1, 0), {0: q})
    bonus = law(4, t2=1.0)
    assert rejection(tree, {0: p, 1: bonus}, {(0, 0): 0.49})[0].path == (1,)
    verdict, _, (depth, rest) = rejection(tree, {0: p}, {(0, 0): 0.5})
    assert verdict == Verdict((), 3, (Draw(3),))
    assert (depth, rest.tolist()) == (0, [0, 0, 0, 1])
    forbidden = Tree((0, 2), (-1, 0), {0: q})
    assert rejection(forbidden, {0: p}, {(0, 0): 0.0})[0].path == ()


def test_each_refused_sibling_leaves_both_laws():
    """By hand: p loses q and is renormalised, q loses the token and is renormalised, and the next sibling is tested."""
    p, q = law(4, t0=0.4, t1=0.3, t2=0.2, t3=0.1), law(4, t1=0.5, t2=0.3, t3=0.2)
    tree = Tree((0, 1, 2), (-1, 0, 0), {0: q})
    verdict, tests, (_, rest) = rejection(tree, {0: p}, {(0, 0): 0.99, (0, 1): 0.0})
    assert tests == [(0, 0), (0, 1)]
    # after the first: p - q = (0.4, -0.2, -0.1, -0.1), all of p is on token 0, so token 2 cannot pass even with u = 0
    assert verdict.path == ()
    assert rest == pytest.approx([1, 0, 0, 0])
    wide = law(4, t0=0.1, t1=0.6, t2=0.1, t3=0.2)
    tree = Tree((0, 1, 0), (-1, 0, 0), {0: wide})
    # first: p - q = (0.3, -0.3, 0.1, -0.1) -> (0.75, 0, 0.25, 0); q -> (0.25, 0, 0.25, 0.5): token 0 passes at once
    assert rejection(tree, {0: p, 2: p}, {(0, 0): 0.6, (0, 1): 0.999})[0].path == (2,)


def test_guesses_without_a_law_are_point_masses():
    """Accepted with the probability that p gives them, one after the other."""
    p = law(4, t0=0.5, t1=0.3, t2=0.2)
    tree = Tree((9, 1, 2), (-1, 0, 0))
    leaf = law(4, t3=1.0)
    assert rejection(tree, {0: p, 1: leaf}, {(0, 0): 0.29})[0].path == (1,)
    # after token 1 was refused, token 2 has 0.2 / 0.7
    assert rejection(tree, {0: p, 2: leaf}, {(0, 0): 0.3, (0, 1): 0.285})[0].path == (2,)
    verdict, _, (_, rest) = rejection(tree, {0: p}, {(0, 0): 0.3, (0, 1): 0.286})
    assert verdict.path == ()
    assert rest.tolist() == [1, 0, 0, 0]


def test_a_residual_that_rounding_emptied_accepts_the_token():
    """p = q but for the last bit, and u just below 1: nowhere does p exceed q, so there is nothing else to draw."""
    q = np.array([0.1, 0.2, 0.7])
    p = q * (1 - 2**-53)
    p[0] = np.nextafter(q[0], 0)
    tree = Tree((0, 0), (-1, 0), {0: q})
    assert rejection(tree, {0: p, 1: q}, {(0, 0): 1 - 2**-54})[0].path == (1,)
    certain = np.array([1 - 2**-53, 0.0, 0.0])
    assert rejection(Tree((0, 0), (-1, 0)), {0: certain, 1: q}, {(0, 0): 1 - 2**-54})[0].path == (1,)


def test_a_guess_that_its_law_cannot_draw_is_refused_by_name():
    q, p = law(4, t1=1.0), law(4, t1=0.0, t2=1.0)
    with pytest.raises(LawError, match="node 1 guesses token 2"):
        rejection(Tree((0, 2), (-1, 0), {0: q}), {0: p}, {(0, 0): 0.5})
    with pytest.raises(LawError, match="node 2 guesses token 2"):  # q has nothing left after token 1
        rejection(Tree((0, 1, 2), (-1, 0, 0), {0: q}), {0: p}, {(0, 0): 0.5, (0, 1): 0.5})
    with pytest.raises(LawError, match=r"3 tokens.*4"):
        rejection(Tree((0, 1), (-1, 0), {0: q[:3]}), {0: p}, {(0, 0): 0.5})


def test_rejection_reports_each_emitted_token_at_its_node():
    """Log-probabilities are asked for at the node that each token was emitted after."""
    sure = {node: law(10, t1=1.0) for node in range(6)}
    sure[0], sure[1] = law(10, t5=1.0), law(10, t8=1.0)
    verdict = verify.reject(
        TREE, sure.__getitem__, lambda d, s: 0.5, lambda d, p: int(p.argmax()), lambda n, t: Draw(t, -n)
    )
    assert verdict == Verdict((1, 4), 1, (Draw(5, 0), Draw(8, -1), Draw(1, -4)))


def test_children_are_the_best_of_log_q_and_noise_in_order():
    q, gumbel = law(5, t0=0.1, t2=0.6, t4=0.3), np.array([3.0, 99.0, 0.0, 99.0, 0.5])
    scores = {t: np.log(q[t]) + gumbel[t] for t in (0, 2, 4)}
    assert verify.draw_children(q, 2, gumbel) == tuple(sorted(scores, key=scores.get, reverse=True)[:2])
    assert len(verify.draw_children(q, 9, gumbel)) == 3, "never a token without mass"
    assert verify.draw_children(q, 0, gumbel) == ()


@pytest.mark.parametrize("size", [3, 50, 1003])
def test_native_children_are_the_same(size):
    """Over random laws, some with impossible and hardly possible tokens."""
    rng = np.random.default_rng(size)
    for seed in range(200):
        q = rng.dirichlet(np.full(size, rng.choice([0.05, 1.0])))
        q[rng.random(size) < 0.2] = rng.choice([0.0, 1e-320, 1e-300])
        count = int(rng.integers(0, size + 2))
        gumbel = noise.gumbel(seed, 9, np.arange(size), noise.DRAFT)
        assert native_sampling.draw_children(q, count, seed, 9) == verify.draw_children(q, count, gumbel)


class Rows:
    """Scores over given logits, for one feed."""

    def __init__(self, logits: np.ndarray) -> None:
        self.rows = logits

    def logits(self, feed: int, node: int) -> np.ndarray:
        return self.rows[node]

    def law(self, feed: int, node: int, shaping: Shaping, path=()) -> np.ndarray:
        return sampling.law(self.rows[node], shaping, path)


def test_rejection_with_noise_is_rejection_with_the_seeds_streams():
    """ACCEPT decides each test, RESIDUAL closes, each at the position in question; log-probabilities are raw."""
    rng = np.random.default_rng(0)
    refused = accepted = 0
    for seed in range(200):
        rows = rng.normal(size=(4, 12)).astype(np.float32)
        shaping = Shaping(SamplingParams(temperature=0.9, top_k=8, logprobs=0), seed, [3, 1, 4, 1], 2)
        q = sampling.law(rows[0] + rng.normal(size=12).astype(np.float32), shaping)
        first, second = verify.draw_children(q, 2, noise.gumbel(seed, 4, np.arange(12), noise.DRAFT))
        tree = Tree((1, first, second, 7), (-1, 0, 0, 1), {0: q})
        verdict = verify.reject_with_noise(tree, Rows(rows), 0, shaping)

        def uniform(depth: int, sibling: int, seed: int = seed) -> float:
            return float(noise.uniforms(seed, 4 + depth, 2, noise.ACCEPT)[sibling])

        def residual(depth: int, p: np.ndarray, seed: int = seed) -> int:
            return sampling.pick(p, float(noise.uniforms(seed, 4 + depth, 1, noise.RESIDUAL)[0]))

        def p_of(node: int, rows: np.ndarray = rows, shaping: Shaping = shaping, tree: Tree = tree) -> np.ndarray:
            return sampling.law(rows[node], shaping, tuple(tree.tokens[n] for n in tree.path(node)))

        expected = verify.reject(tree, p_of, uniform, residual)
        assert (verdict.path, verdict.token) == (expected.path, expected.token)
        nodes = (0, *verdict.path)
        for node, draw in zip(nodes, verdict.draws, strict=True):
            assert draw.logprob == sampling.log_softmax(rows[node], [draw.token])[0]
        accepted += len(verdict.path)
        refused += not verdict.path
    assert accepted > 20
    assert refused > 20
