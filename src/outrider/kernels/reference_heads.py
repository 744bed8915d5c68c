"""EAGLE and Medusa heads in plain numpy, row by row: the oracle of their faster versions.

Weights come as arrays under the canonical names of `models.heads`, in float32 or float64. As in `reference.py`, a row's
result depends on that row's own data alone.

Letters: D hidden size, W wanted layers of the target, G key/value heads, d head size, V tokens of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.reference import attention, linear, rms_norm, rotate, swiglu

__all__ = ["EagleForm", "EagleReference", "medusa_logits"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class EagleForm:
    """The numbers that the weights do not tell."""

    version: int  # 1 | 3
    layers: int
    head_dim: int
    norm_eps: float
    norm_before_residual: bool = False
    norm_before_fc: bool = False


class EagleReference:
    """One text's rows through an EAGLE head. The caller keeps the rows that each new one may see.

    A row's cache entry is (keys, values), each [layers, G, d].
    """

    def __init__(self, form: EagleForm, weights: Mapping[str, Array], cosines: Array, sines: Array) -> None:
        """`cosines` and `sines` are those of positions [0, P). [P, d / 2] each"""
        self.form, self._weights, self._cosines, self._sines = form, weights, cosines, sines

    def fuse(self, states: Array) -> Array:
        """What version 3 makes of the target's states. [W, D] -> [D]"""
        flat = states.reshape(-1)
        if self.form.norm_before_fc:
            flat = rms_norm(flat, self._weights["input_norm"], self.form.norm_eps)
        return linear(self._weights["fc"], flat)

    def row(
        self, embedding: Array, x: Array, position: int, before: list[tuple[Array, Array]]
    ) -> tuple[Array, tuple[Array, Array]]:
        """The output state of one row, and its cache entry. [D], [D] -> [D]

        `x` is the fused state of the target (version 3), the target's final state (version 1), or the head's own last
        output. `before` are the entries that the row sees besides its own, by position.
        """
        w, form = self._weights, self.form
        if form.version == 1:
            if "embed_norm" in w:
                embedding = rms_norm(embedding, w["embed_norm"], form.norm_eps)
            x = linear(w["fc"], np.concatenate((embedding, x)), w.get("fc_bias"))
        keys, values = [], []
        for i in range(form.layers):
            if i == 0 and form.version == 3:
                normed = rms_norm(x, w["layers.0.hidden_norm"], form.norm_eps)
                inner = np.concatenate((rms_norm(embedding, w["layers.0.embed_norm"], form.norm_eps), normed))
                x = normed if form.norm_before_residual else x
            else:
                norm = w.get(f"layers.{i}.attn_norm")
                inner = x if norm is None else rms_norm(x, norm, form.norm_eps)
            q, k, v = (
                linear(w[f"layers.{i}.{n}"], inner, w.get(f"layers.{i}.{n}_bias")).reshape(-1, form.head_dim)
                for n in "qkv"
            )
            if f"layers.{i}.q_norm" in w:
                q = rms_norm(q, w[f"layers.{i}.q_norm"], form.norm_eps)
                k = rms_norm(k, w[f"layers.{i}.k_norm"], form.norm_eps)
            turn = self._cosines[position], self._sines[position]
            keys.append(rotate(k, *turn))
            values.append(v)
            seen = np.stack([entry[0][i] for entry in before] + [keys[-1]])
            read = np.stack([entry[1][i] for entry in before] + [v])
            x = x + linear(w[f"layers.{i}.o"], attention(rotate(q, *turn), seen, read))
            h = rms_norm(x, w[f"layers.{i}.mlp_norm"], form.norm_eps)
            x = x + linear(
                w[f"layers.{i}.down"], swiglu(linear(w[f"layers.{i}.gate"], h), linear(w[f"layers.{i}.up"], h))
            )
        return x, (np.stack(keys), np.stack(values))

    def logits(self, x: Array, target_head: Array | None = None) -> Array:
        """Over the draft vocabulary; version 1 reads them with the target's head. [D] -> [V]"""
        if "norm" in self._weights:
            x = rms_norm(x, self._weights["norm"], self.form.norm_eps)
        head = self._weights["head"] if target_head is None else target_head
        return linear(head, x)


def medusa_logits(weights: Mapping[str, Array], heads: int, blocks: int, state: Array) -> Array:
    """What each head makes of the target's final state. [D] -> [heads, V]  (Cai et al. 2024, section 2.1.1)"""
    rows = []
    for k in range(heads):
        x = state
        for j in range(blocks):
            inner = linear(weights[f"heads.{k}.blocks.{j}"], x, weights[f"heads.{k}.blocks.{j}_bias"])
            x = x + swiglu(inner, np.ones_like(inner))
        rows.append(linear(weights["head"] if "head" in weights else weights[f"heads.{k}.head"], x))
    return np.stack(rows)
