"""An EAGLE head row by row in numpy: the oracle of the native one, and the head of reference runners.

Row r of a text stands for its token r + 1 and the target's states at r, at position r: it guesses token r + 2. So the
root of a draft tree is the row of the last committed token.

Letters: D hidden size, F floats of the target's states at a row (W * D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.cache import Pages
from outrider.core.tree import Tree
from outrider.kernels.reference_heads import EagleForm, EagleReference
from outrider.models.heads import Eagle
from outrider.models.load import ModelFiles
from outrider.models.rotary import rotary_table
from outrider.runtime.growth import Plan, Sprout, grow
from outrider.runtime.reference import ReferenceScores, widen
from outrider.runtime.runner import Feed

__all__ = ["ReferenceEagle", "forecast"]

Array = NDArray[Any]


class ReferenceEagle:
    """A `Grower` over the dequantised weights of a head and of its target, with a cache like `pages`."""

    def __init__(self, head: Eagle, target: ModelFiles, pages: Pages) -> None:
        self._config, self._tokens = head.config, head.tokens
        decoder = head.config.decoder
        self._weights: dict[str, Array] = {name: tensor.float32() for name, tensor in head.tensors.items()}
        self._embed = target.tensors["embed"].float32()
        self._target_head: Array | None = None
        if head.config.version == 1:
            self._target_head = target.tensors["head" if "head" in target.tensors else "embed"].float32()
        self.pages = Pages(pages.count, pages.page_size, self, ahead=1)
        rows = pages.count * pages.page_size
        form = EagleForm(
            head.config.version,
            decoder.layers,
            decoder.head_dim,
            decoder.norm_eps,
            head.config.norm_before_residual,
            head.config.norm_before_fc,
        )
        cosines, sines = (table.astype(np.float32) for table in rotary_table(decoder, rows))
        self._head = EagleReference(form, self._weights, cosines, sines)
        shape = (rows, decoder.layers, decoder.kv_heads, decoder.head_dim)
        self._keys, self._values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)

    def grow(self, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
        """See `Grower.grow`."""
        return grow(self.score, batch, plan)

    def score(self, feeds: Sequence[Feed], sprouts: Sequence[Sprout]) -> ReferenceScores:
        """Logits [V] of each feed's nodes, and the output state of each row as its hidden state."""
        logits, hidden = [], []
        for feed, sprout in zip(feeds, sprouts, strict=True):
            assert sprout.states is not None
            scored, outputs = self._feed(feed, sprout.states)
            logits.append([widen(row, self._tokens, len(self._embed)) for row in scored])
            hidden.append(np.stack(outputs)[:, None])
        return ReferenceScores(logits, hidden, [0] * len(logits))

    def _feed(self, feed: Feed, states: NDArray[np.float32]) -> tuple[list[Array], list[Array]]:
        seen: list[int] = [feed.rows.slot(row) for row in range(feed.rows.length)]
        outputs: list[Array] = []
        for token, state in zip(feed.pending, states, strict=True):
            x = self._head.fuse(state) if self._config.version == 3 else state
            seen.append(feed.rows.slot(len(seen)))
            outputs.append(self._row(token, x, seen))
        if feed.tree is None:
            return [], outputs
        root, first = len(outputs) - 1, len(seen) - 1
        for node in range(1, len(feed.tree)):
            path = feed.tree.path(node)
            slots = seen + [feed.rows.slot(first + ancestor) for ancestor in path]
            outputs.append(self._row(feed.tree.tokens[node], outputs[root + feed.tree.parents[node]], slots))
        return [self._head.logits(x, self._target_head) for x in outputs[root:]], outputs

    def _row(self, token: int, x: Array, slots: Sequence[int]) -> Array:
        """The output of a row that sees the rows at `slots`, the last of them its own. [D]"""
        before = [(self._keys[slot], self._values[slot]) for slot in slots[:-1]]
        output, (keys, values) = self._head.row(self._embed[token], x, len(slots) - 1, before)
        self._keys[slots[-1]], self._values[slots[-1]] = keys, values
        return output

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy cache rows, one after the other (`core.cache.Storage`)."""
        for cache in (self._keys, self._values):
            for s, t in zip(source, target, strict=True):
                cache[t] = cache[s]

    def memory(self) -> dict[str, int]:
        return {
            "weights": sum(weight.nbytes for weight in self._weights.values()),
            "cache": self._keys.nbytes + self._values.nbytes,
        }


def forecast(head: Eagle, pages: Pages) -> dict[str, int]:
    """What `ReferenceEagle.memory` will say, from shapes alone."""
    decoder = head.config.decoder
    rows = pages.count * pages.page_size
    return {
        "weights": 4 * sum(int(np.prod(tensor.shape)) for tensor in head.tensors.values()),
        "cache": 8 * rows * decoder.layers * decoder.kv_heads * decoder.head_dim,
    }
