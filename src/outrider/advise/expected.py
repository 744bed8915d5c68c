"""Expected tokens of a step, and what acceptance pays for it.

Source: Leviathan et al. 2023, section 3: with guesses that are right with probability a, each independently of the
others, a chain of k of them brings (1 - a^(k+1)) / (1 - a) tokens per step, the target's own one included
(equation 1); it pays if that is more than the step costs in plain ones (theorem 3.8). For trees: each node is reached
with the product of the chances along its path, so the nodes' products add up (Sequoia, Chen et al. 2024, section 3.1).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

__all__ = ["best_length", "break_even", "chain_tokens", "equivalent", "tokens", "tree_tokens"]

Cost = Callable[[int], float]  # of a step with so many guesses, in plain steps


def tokens(a: float, k: int) -> float:
    """Expected tokens of a step with a chain of k guesses, each right with probability a."""
    return float(k + 1) if a >= 1 else (1 - a ** (k + 1)) / (1 - a)


def chain_tokens(chances: Sequence[float]) -> float:
    """The same with a chance for each depth, given that the guesses before it were right."""
    total = reached = 1.0
    for chance in chances:
        reached *= chance
        total += reached
    return total


def tree_tokens(ranks: Sequence[float], nodes: int, depth: int) -> float:
    """Expected tokens of a step with the best tree of so many nodes, at most `depth` deep.

    `ranks[i]` is the chance that a node's (i+1)-th candidate is the right one, given that the node is.
    """
    total, count = 1.0, 0
    heap = [(-ranks[0], 1, 0, 1.0)] if ranks and depth > 0 else []  # -chance, depth, rank, chance of the parent
    while heap and count < nodes:
        negative, level, rank, parent = heapq.heappop(heap)
        total -= negative
        count += 1
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (-parent * ranks[rank + 1], level, rank + 1, parent))
        if level < depth:
            heapq.heappush(heap, (negative * ranks[0], level + 1, 0, -negative))
    return total


def equivalent(tokens_per_step: float, k: int) -> float:
    """The acceptance rate with which chains of k guesses bring so many tokens per step."""
    return _smallest(lambda a: tokens(a, k) >= tokens_per_step)


def break_even(k: int, cost: Cost) -> float | None:
    """The acceptance rate above which a chain of k guesses pays; None if even k + 1 tokens are not worth the step."""
    price = cost(k)
    return None if price > k + 1 else _smallest(lambda a: tokens(a, k) >= price)


def best_length(a: float, cost: Cost, longest: int) -> tuple[int, float]:
    """The number of guesses, 0 included, that gives the most tokens per plain step, and how many those are."""
    return max(((k, tokens(a, k) / (cost(k) if k else 1.0)) for k in range(longest + 1)), key=lambda pair: pair[1])


def _smallest(holds: Callable[[float], bool]) -> float:
    """The least number in [0, 1] from which on something holds; 1 if it never does."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
