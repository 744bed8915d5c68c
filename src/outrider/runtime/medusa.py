"""Medusa heads ready to run: natively over packed weights, or row by row in numpy.

Letters: S rows, D hidden size, K heads, V tokens of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core import sampling
from outrider.core.shaping import Shaping
from outrider.models.heads import Medusa
from outrider.runtime import native_sampling
from outrider.runtime.native import NativeRunner
from outrider.runtime.packed import PackedLinear, packed_bytes, pick_format
from outrider.runtime.runner import Runner

__all__ = ["MedusaHeads", "forecast"]

Array = NDArray[np.float32]


class MedusaHeads:
    """x + silu(W x + b) for each block of each head, then its projection (Cai et al. 2024, section 2.1.1).

    A projection that all heads share is one product over the rows of all heads: its weights are read once.
    """

    def __init__(self, heads: Medusa, target: Runner, dtype: str = "auto") -> None:
        self._config = config = heads.config
        self._vocabulary = target.config.vocabulary
        self._known = None if heads.tokens is None else heads.tokens.astype(np.int32)
        self._threads = target.threads if isinstance(target, NativeRunner) else 0
        tensors = heads.tensors
        self._blocks = [
            [
                self._linear(tensors[f"heads.{k}.blocks.{j}"], dtype, tensors[f"heads.{k}.blocks.{j}_bias"].float32())
                for j in range(config.blocks)
            ]
            for k in range(config.heads)
        ]
        names = ["head"] if config.shared_head else [f"heads.{k}.head" for k in range(config.heads)]
        self._projections = [self._linear(tensors[name], dtype, None) for name in names]

    def _linear(self, tensor: Any, dtype: str, bias: Array | None) -> _Linear:
        if self._threads:
            return PackedLinear([tensor], dtype=dtype, bias=bias, threads=self._threads)
        return _PlainLinear(tensor.float32(), bias)

    def logits(self, states: Array) -> Array:
        """What each head makes of the target's final states. [S, D] -> [K, S, V]"""
        config, rows = self._config, len(states)
        inner = np.empty((config.heads, rows, config.hidden), np.float32)
        for k, blocks in enumerate(self._blocks):
            x = states
            for block in blocks:
                y = block(x)
                with np.errstate(over="ignore"):  # exp(-y) may become infinite: the quotient is then the right zero
                    x = x + y / (1 + np.exp(-y))
            inner[k] = x
        if config.shared_head:
            return self._projections[0](inner.reshape(-1, config.hidden)).reshape(config.heads, rows, -1)
        return np.stack([project(inner[k]) for k, project in enumerate(self._projections)])

    def ranked(self, logits: Array, k: int, shaping: Shaping, path: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """The best tokens of a head, and how sure it is of each: `core.sampling.ranked`. [V]"""
        best = native_sampling.ranked if self._threads else sampling.ranked
        row = logits if self._known is not None else logits[: self._vocabulary]  # its head may be padded
        return best(row, k, shaping, path, self._known, self._vocabulary)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(linear.nbytes for linear in (*self._projections, *(b for blocks in self._blocks for b in blocks)))


class _PlainLinear:
    """y = x W^T + b in numpy, each row by itself."""

    def __init__(self, weight: Array, bias: Array | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Array) -> Array:
        y = np.stack([np.einsum("nk,k->n", self._weight, row) for row in x])
        return y if self._bias is None else y + self._bias

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes


_Linear = PackedLinear | _PlainLinear


def forecast(heads: Medusa, target: Runner, dtype: str = "auto") -> int:
    """What `MedusaHeads.nbytes` will say, from shapes alone."""
    matrices = [tensor for tensor in heads.tensors.values() if len(tensor.shape) == 2]
    if not isinstance(target, NativeRunner):
        return sum(4 * tensor.shape[0] * tensor.shape[1] for tensor in matrices)
    return sum(packed_bytes(pick_format(dtype, [t.kind]), [t.kind], *t.shape) for t in matrices)
