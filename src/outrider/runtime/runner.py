"""The contract of every runner: one forward over ragged trees, draws where the logits lie.

Letters: S feeds (sequences) of a batch, n rows of a feed, N nodes of its tree, V vocabulary, D hidden size, W wanted
layers.

The promise (docs/losslessness.md) rests on this: each row's logits, hidden states, keys and values depend on the
row's own tokens and positions only - the tokens before it in its sequence and its ancestors in the tree - bit for
bit, whatever else is in the batch, however the tokens before it were chunked, and wherever its keys lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.core.cache import Pages, Rows
from outrider.core.shaping import Draw, Shaping
from outrider.core.tree import Tree
from outrider.models.config import DecoderConfig

if TYPE_CHECKING:
    from outrider.models.heads import Eagle
    from outrider.models.load import ModelFiles
    from outrider.runtime.growth import Grower, Plan, Sprout

__all__ = ["Feed", "Runner", "Scores"]


@dataclass(slots=True)
class Feed:
    """What one sequence gives to a forward: its committed but uncached tokens, then the guesses of its tree.

    With a tree, `pending[-1]` is its root, and every node is scored. Without one (a prefill chunk that does not reach
    the sequence's last token) nothing is scored and only the cache rows are written. With `judged`, the rows of so many
    pending tokens before the root are scored as well, under the nodes -1, -2 ... going back.

    Row i < len(pending) is cache row `rows.length + i`, at the same position; node j >= 1 is cache row
    `rows.length + len(pending) - 1 + j`, at position `rows.length + len(pending) - 1 + depth(j)`. Each row attends to
    all rows before it that are committed or pending, to its ancestors, and to itself, in the order of position.
    The caller has reserved the rows.
    """

    rows: Rows
    pending: Sequence[int]  # at least one
    tree: Tree | None = None
    judged: int = 0  # below len(pending); needs a tree


@runtime_checkable
class Scores(Protocol):
    """What a forward leaves behind, where it was computed. Valid until the runner's next forward.

    `feed` is the index in the batch, `node` the index in that feed's tree, below 0 a pending token before its root.
    """

    def logits(self, feed: int, node: int) -> NDArray[np.float32]:
        """The node's logits on the host. [V]"""
        ...

    def draw(self, feed: int, node: int, shaping: Shaping, path: Sequence[int] = ()) -> Draw:
        """The target's own token after the node: argmax(shaped logits + T * gumbel(seed, position, token)).

        `path` are the tokens of the node and its ancestors below the root: history is `shaping.tokens + path`.
        """
        ...

    def law(self, feed: int, node: int, shaping: Shaping, path: Sequence[int] = ()) -> NDArray[np.float64]:
        """The shaped distribution that `draw` draws from. [V], sums to one; at T = 0 a point mass."""
        ...

    def top(
        self, feed: int, node: int, k: int, shaping: Shaping | None = None, path: Sequence[int] = ()
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k tokens that `draw` would give first, second ..., best first; fewer where filters leave fewer. [k], [k]

        With the log-probability of each under the law, at T = 0 the one of T = 1. Without shaping: by plain logits.
        """
        ...

    def describe(self, feed: int, node: int, token: int, k: int) -> Draw:
        """`token` as the one after the node, with its log-probability and the k likeliest, by plain logits."""
        ...

    def hidden(self, feed: int) -> NDArray[np.float32]:
        """Hidden states of the wanted layers at every row of the feed, pending ones first. [n, W, D]"""
        ...


class Runner(Protocol):
    """A model that can be run: its weights, its cache and the arithmetic."""

    config: DecoderConfig
    pages: Pages

    def forward(self, batch: Sequence[Feed], wants: Sequence[int] = ()) -> Scores:
        """One pass over all rows of all feeds.

        `wants` are layers whose hidden states are kept: l in [0, layers) is the residual stream after layer l,
        -1 the final normed state that the head reads. Commits nothing.
        """
        ...

    def grow(self, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
        """Draft trees for another runner's texts, or from some of its own layers: see `runtime.growth.Grower`."""
        ...

    def eagle(self, head: Eagle, files: ModelFiles, dtype: str = "auto") -> Grower:
        """A head that drafts for this runner's model, made of `files`, with a cache of as many pages, as large."""
        ...

    def eagle_bytes(self, head: Eagle, dtype: str = "auto") -> dict[str, int]:
        """Bytes that `eagle` with these arguments will hold after a long prompt, by purpose, from shapes alone."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose: weights, cache, workspace."""
        ...
