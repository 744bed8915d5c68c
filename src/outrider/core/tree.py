"""A draft is a flat tree of guesses; plain decoding is the tree of one node.

Letters: N nodes of a tree, V entries of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tree", "TreeError"]

Law = NDArray[np.float64]  # [V], sums to one


class TreeError(ValueError):
    """A drafter proposed something that is no draft tree."""


@dataclass(frozen=True, slots=True)
class Tree:
    """`tokens[0]` is the last committed token; every other node guesses the token after its parent.

    Parents come before children and siblings are distinct, so that at most one child of a node can equal the
    target's draw. The order of siblings is the order in which they were drawn: rejection sampling tries them so.

    `laws[parent]` is the law q [V] from which the children of `parent` were drawn one after the other without
    replacement. A parent without a law proposed its children for certain (each is a point mass). Only rejection
    sampling reads laws; match verification needs none.

    `chances` are the drafter's estimate that a node will be accepted, none above its parent's: they decide how much of
    the tree is worth checking, and nothing else. None where the drafter has no idea.

    `sources` name who guessed each node, where it was another than the drafter whose tree this is; for reports alone.
    """

    tokens: tuple[int, ...]  # [N]
    parents: tuple[int, ...]  # [N], parents[0] == -1
    laws: Mapping[int, Law] = field(default_factory=dict)
    chances: tuple[float, ...] | None = None  # [N], that of the root is 1
    sources: tuple[str, ...] | None = field(default=None, compare=False)  # [N], empty = the tree's own drafter

    @classmethod
    def root(cls, token: int) -> Tree:
        """The tree of plain decoding."""
        return cls((int(token),), (-1,))

    @classmethod
    def chain(
        cls,
        root: int,
        guesses: Iterable[int],
        laws: Mapping[int, Law] | None = None,
        chances: Iterable[float] | None = None,
    ) -> Tree:
        """One guess after the other, as in Leviathan et al. 2023. `chances` are those of the guesses."""
        tokens = (int(root), *map(int, guesses))
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), laws or {}, None if chances is None else (1.0, *chances))

    @classmethod
    def merge(cls, root: int, paths: Iterable[Sequence[int]], budget: int | None = None) -> Tree:
        """The prefix tree of several guessed continuations, earlier paths first, at most `budget` guesses in all."""
        tokens, parents = [int(root)], [-1]
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                key = (node, int(token))
                child = index.get(key)
                if child is None:
                    if budget is not None and len(tokens) > budget:
                        break
                    child = index[key] = len(tokens)
                    tokens.append(int(token))
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> int:
        """Number of guessed tokens: all nodes but the root."""
        return len(self.tokens) - 1

    def children(self) -> list[list[int]]:
        """Children of each node, in the order of their drawing. [N] lists."""
        out: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                out[parent].append(node)
        return out

    def depths(self) -> list[int]:
        """Distance of each node from the root. [N]"""
        out = [0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            out[node] = out[self.parents[node]] + 1
        return out

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`; empty for the root."""
        out: list[int] = []
        while node > 0:
            out.append(node)
            node = self.parents[node]
        return tuple(reversed(out))

    def cut(self, guesses: int) -> Tree:
        """The first `guesses` guesses only. A prefix of a flat tree is a tree: parents come first."""
        if self.guesses <= guesses:
            return self
        n = guesses + 1
        return Tree(
            self.tokens[:n],
            self.parents[:n],
            self.laws,
            self.chances and self.chances[:n],
            self.sources and self.sources[:n],
        )

    def shallow(self, depth: int) -> Tree:
        """Without the nodes deeper than `depth`."""
        if self.guesses <= depth:
            return self
        depths = self.depths()
        if max(depths) <= depth:
            return self
        keep = [node for node, d in enumerate(depths) if d <= depth]
        return self.select(keep)

    def select(self, nodes: Sequence[int]) -> Tree:
        """The tree of these nodes only: ascending, the root first, no node without its parent."""
        place = {node: index for index, node in enumerate(nodes)}
        return Tree(
            tuple(self.tokens[n] for n in nodes),
            (-1, *(place[self.parents[n]] for n in nodes[1:])),
            {place[parent]: law for parent, law in self.laws.items() if parent in place},
            self.chances and tuple(self.chances[n] for n in nodes),
            self.sources and tuple(self.sources[n] for n in nodes),
        )

    def check(self, vocabulary: int) -> Tree:
        """Return self, or raise TreeError that names the first thing wrong with it."""
        if len(self.tokens) != len(self.parents) or not self.tokens:
            raise TreeError(f"a tree of {len(self.tokens)} tokens and {len(self.parents)} parents")
        if self.parents[0] != -1:
            raise TreeError(f"the root's parent is {self.parents[0]}, not -1")
        if self.chances is not None and len(self.chances) != len(self.tokens):
            raise TreeError(f"{len(self.chances)} chances for {len(self.tokens)} nodes")
        if self.sources is not None and len(self.sources) != len(self.tokens):
            raise TreeError(f"{len(self.sources)} sources for {len(self.tokens)} nodes")
        seen: set[tuple[int, int]] = set()
        for node in range(1, len(self.tokens)):
            parent, token = self.parents[node], self.tokens[node]
            if not 0 <= parent < node:
                raise TreeError(f"node {node} has parent {parent}: parents come before children")
            if not 0 <= token < vocabulary:
                raise TreeError(f"node {node} guesses token {token}, outside the vocabulary of {vocabulary:,}")
            if (parent, token) in seen:
                raise TreeError(f"node {node} repeats its sibling's token {token}")
            seen.add((parent, token))
        return self
