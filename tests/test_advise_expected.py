"""Expected tokens and what pays for them: against simulation, brute force and arithmetic by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.advise.expected import best_length, break_even, chain_tokens, equivalent, tokens, tree_tokens


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1.0])
def test_the_formula_is_what_chains_bring(a: float, k: int) -> None:
    """40,000 simulated chains: 4 standard errors are below 0.06 tokens."""
    rng = random.Random(1)
    brought = [1 + next((n for n in range(k) if rng.random() >= a), k) for _ in range(40_000)]
    assert sum(brought) / len(brought) == pytest.approx(tokens(a, k), abs=0.06)
    assert chain_tokens([a] * k) == pytest.approx(tokens(a, k))


def test_chains_whose_chances_differ() -> None:
    assert chain_tokens([0.5, 0.4]) == pytest.approx(1 + 0.5 + 0.2)
    assert chain_tokens([]) == 1


def test_the_best_tree_is_found() -> None:
    """Of all trees with four nodes over two ranks, none brings more than the one that is taken."""
    ranks, nodes, depth = (0.6, 0.3), 4, 3
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(2), repeat=length)]
    best = 0.0
    for chosen in itertools.combinations(paths, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            total = 0.0
            for path in chosen:
                chance = 1.0
                for rank in path:
                    chance *= ranks[rank]
                total += chance
            best = max(best, total)
    assert tree_tokens(ranks, nodes, depth) == pytest.approx(1 + best)


def test_a_tree_of_one_rank_is_a_chain() -> None:
    assert tree_tokens((0.7,), 5, 5) == pytest.approx(tokens(0.7, 5))
    assert tree_tokens((0.7,), 5, 2) == pytest.approx(tokens(0.7, 2))
    assert tree_tokens((0.7,), 0, 5) == 1


def test_break_even_is_where_tokens_equal_the_price() -> None:
    price = {1: 1.2, 4: 2.0, 8: 3.5}
    for k, cost in price.items():
        a = break_even(k, price.__getitem__)
        assert a is not None
        assert tokens(a, k) == pytest.approx(cost, rel=1e-6)
    assert break_even(1, lambda k: 2.5) is None  # two tokens cannot be worth two and a half steps
    assert break_even(3, lambda k: 0.9) == pytest.approx(0, abs=1e-9)


def test_equivalent_inverts_the_formula() -> None:
    for a, k in ((0.2, 3), (0.75, 5), (0.95, 8)):
        assert equivalent(tokens(a, k), k) == pytest.approx(a, abs=1e-6)


def test_the_best_length_grows_with_acceptance_and_is_nothing_where_nothing_pays() -> None:
    lengths = [best_length(a, lambda k: 1 + 0.15 * k, 8)[0] for a in (0.0, 0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] >= 5
