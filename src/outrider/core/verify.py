"""Which guesses stand: the two rules of verification, for any tree.

Letters as in Leviathan et al. 2023: p is the target's law, q the draft's. V vocabulary.

- `match` keeps a guess if it equals the token that the target draws for itself. The text is the target's own.
- `reject` keeps a guess with probability min(1, p / q) and else draws from what p has over q. The text has the target's
  law (Leviathan et al. 2023, Chen et al. 2023; siblings one after the other without replacement, SpecInfer 2023).

Both walk from the root and look only at nodes that they reach. They hold no random numbers: those come in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core import noise, sampling
from outrider.core.shaping import Draw, Shaping
from outrider.core.tree import Law, Tree

__all__ = ["LawError", "Laws", "Verdict", "draw_children", "match", "reject", "reject_with_noise"]


class LawError(ValueError):
    """The law that a drafter gave cannot be the one its guesses were drawn from: names the node."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted nodes from the root's child down, the closing token after them, and what was drawn at each step.

    The emitted tokens are `[d.token for d in draws]`: those of the accepted nodes, then `token`.
    """

    path: tuple[int, ...]
    token: int  # bonus if the path ends in a leaf, else corrected
    draws: tuple[Draw, ...]  # len(path) + 1


def match(tree: Tree, draw: Callable[[int], Draw]) -> Verdict:
    """Follow the target's own draws as far as the tree guessed them. `draw(node)`: the token after the node."""
    guessed = {guess: node for node, guess in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    draws: list[Draw] = []
    node: int | None = 0
    while node is not None:
        own = draw(node)
        draws.append(own)
        node = guessed.get((node, own.token))
        if node is not None:
            path.append(node)
    return Verdict(tuple(path), own.token, tuple(draws))


def reject(
    tree: Tree,
    law: Callable[[int], Law],
    uniform: Callable[[int, int], float],
    residual: Callable[[int, Law], int],
    describe: Callable[[int, int], Draw] = lambda node, token: Draw(token),
) -> Verdict:
    """Test the siblings at each level one after the other; descend to the first that is accepted.

    law(node):               p after the node. [V], sums to one
    uniform(depth, sibling): a number in [0, 1) of its own for each test; depth 0 = the root's children
    residual(depth, p):      a token drawn from p, with noise that no draft and no test has used
    describe(node, token):   the Draw that reports `token`, emitted after the node

    Siblings come in the order in which they were drawn. The test at a node is that of a draft from its law
    `tree.laws[node]`, without replacement: once refused, a sibling is taken out of q and q is renormalised. A node
    without a law proposed its children for certain: each is tested against a point mass.

    Raises LawError if a child has no mass left in the law that it should have been drawn from.
    """
    children = tree.children()
    path: list[int] = []
    draws: list[Draw] = []
    node = 0
    while True:
        p = law(node)
        law_q = tree.laws.get(node)
        _check(node, p, law_q)
        q: _Support | None = None
        for sibling, child in enumerate(children[node]):
            token = tree.tokens[child]
            u = uniform(len(path), sibling)
            if law_q is None:
                if u < p[token]:  # u * q[token] < p[token] with all of q on this token
                    break
                rest = p.copy()
                rest[token] = 0.0
            else:
                chance = float(law_q[token]) if q is None else q.chance(token)
                if not chance > 0.0:
                    raise LawError(f"node {child} guesses token {token}, which the law of node {node} cannot draw")
                if u * chance < p[token]:  # strict: u may be 0, and p[token] too
                    break
                q = q or _Support(law_q)
                rest = q.taken_from(p)
                q.drop(token)
            mass = float(rest.sum())
            if mass <= 0.0:
                # p nowhere exceeds q, and both sum to one: they are the same law but for rounding, and the test would
                # have let every token pass. So does this one, at an error of rounding's size.
                break
            rest /= mass
            p = rest
        else:
            token = residual(len(path), p)
            draws.append(describe(node, token))
            return Verdict(tuple(path), token, tuple(draws))
        draws.append(describe(node, token))
        path.append(child)
        node = child


class Laws(Protocol):
    """What rejection needs of a runner's scores (runtime/runner.py, Scores)."""

    def logits(self, feed: int, node: int) -> NDArray[np.float32]: ...

    def law(self, feed: int, node: int, shaping: Shaping, path: Sequence[int] = ()) -> Law: ...


def reject_with_noise(tree: Tree, scores: Laws, feed: int, shaping: Shaping) -> Verdict:
    """`reject` with the noise of the request's seed: streams ACCEPT and RESIDUAL at each position.

    A position is decided in one step only (the next step starts behind the closing token), so no number is used twice.
    """
    start = len(shaping.tokens)

    def uniform(depth: int, sibling: int) -> float:
        return float(noise.uniforms(shaping.seed, start + depth, sibling + 1, noise.ACCEPT)[sibling])

    def residual(depth: int, p: Law) -> int:
        return sampling.pick(p, float(noise.uniforms(shaping.seed, start + depth, 1, noise.RESIDUAL)[0]))

    return reject(
        tree,
        lambda node: scores.law(feed, node, shaping, tuple(tree.tokens[n] for n in tree.path(node))),
        uniform,
        residual,
        lambda node, token: sampling.describe(scores.logits(feed, node), token, shaping.params.logprobs),
    )


def _check(node: int, p: Law, q: Law | None) -> None:
    if q is not None and q.shape != p.shape:
        raise LawError(f"the law of node {node} is over {len(q):,} tokens, the target's over {len(p):,}")


class _Support:
    """q where it is positive: mostly a few hundred of a large vocabulary. Tokens that were tried are taken out."""

    def __init__(self, q: Law) -> None:
        self._tokens = np.flatnonzero(q)  # ascending
        self._q = q[self._tokens]

    def chance(self, token: int) -> float:
        at = int(np.searchsorted(self._tokens, token))
        return float(self._q[at]) if at < len(self._q) and self._tokens[at] == token else 0.0

    def taken_from(self, p: Law) -> Law:
        """What p has over q, not normalised. [V]"""
        rest = p.copy()
        rest[self._tokens] = np.maximum(p[self._tokens] - self._q, 0.0)
        return rest

    def drop(self, token: int) -> None:
        """q after `token` was drawn from it and put aside; all zero if nothing else is left."""
        self._q[np.searchsorted(self._tokens, token)] = 0.0
        mass = float(self._q.sum())
        if mass > 0.0:
            self._q /= mass


def draw_children(q: Law, count: int, gumbel: NDArray[np.float64]) -> tuple[int, ...]:
    """Siblings for rejection sampling: `count` different tokens drawn from q one after the other. [V], [V]

    The `count` largest of log q + Gumbel noise, largest first, are a draw without replacement in that order (Kool et
    al. 2019, section 3). Fewer come back if q has fewer. The noise must be of the draft's own stream, and the same q
    goes into `Tree.laws`. How many to draw may depend on q, but not on what was drawn: a token that is dropped for
    being unlikely biases the text.
    """
    support = np.flatnonzero(q >= np.finfo(np.float64).tiny)
    scores = noise.log(q[support]) + gumbel[support]
    if 0 < count < len(support):  # no sort of the vocabulary: only what reaches the count-th best
        best = scores >= np.partition(scores, len(scores) - count)[len(scores) - count]
        support, scores = support[best], scores[best]
    return tuple(support[np.argsort(-scores, kind="stable")[: max(count, 0)]].tolist())
