"""The arithmetic of one row, in plain numpy: slow, obvious, and what every other kernel is tested against.

Every function works on the data of a single row, in the type that it is given (float32 or float64), so its result
cannot depend on who else is in the batch. Two things remain that could make equal rows differ, and both are avoided:

- A matrix product through BLAS may split or peel its sums by thread count and by where the arrays lie. Sums of
  products are therefore taken by `numpy.einsum` (unoptimised, the default: one thread, one order of operations,
  given by shapes alone).
- Keys that lie elsewhere in memory. `attention` takes them gathered in the order of position.

Letters: D hidden size, H query heads, G key/value heads, d head size, n keys that a row sees (itself included).
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["attention", "linear", "rms_norm", "rotate", "swiglu"]

Real = TypeVar("Real", np.float32, np.float64)


def _products(subscripts: str, a: NDArray[Real], b: NDArray[Real]) -> NDArray[Real]:
    """Sums of products in one order, given by the shapes alone."""
    out: NDArray[Real] = np.einsum(subscripts, a, b)
    return out


def linear(weight: NDArray[Real], x: NDArray[Real], bias: NDArray[Real] | None = None) -> NDArray[Real]:
    """weight @ x + bias. [M, K], [K], [M] -> [M]"""
    y = _products("mk,k->m", weight, x)
    return y if bias is None else y + bias


def rms_norm(x: NDArray[Real], weight: NDArray[Real], eps: float) -> NDArray[Real]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. [..., D], [D] -> [..., D]  (Zhang and Sennrich 2019)"""
    mean = _products("...d,...d->...", x, x) / x.dtype.type(x.shape[-1])
    y: NDArray[Real] = x / np.sqrt(mean + x.dtype.type(eps))[..., None] * weight
    return y


def rotate(heads: NDArray[Real], cosines: NDArray[Real], sines: NDArray[Real]) -> NDArray[Real]:
    """RoPE: turns the pair of elements i and i + d / 2 of each head. [heads, d], [d / 2], [d / 2] -> [heads, d]"""
    half = heads.shape[-1] // 2
    a, b = heads[:, :half], heads[:, half:]
    return np.concatenate((a * cosines - b * sines, b * cosines + a * sines), axis=1)


def attention(queries: NDArray[Real], keys: NDArray[Real], values: NDArray[Real]) -> NDArray[Real]:
    """softmax(q k / sqrt(d)) v. [H, d], [n, G, d], [n, G, d] -> [H * d]

    Each run of H / G query heads reads one key head (grouped-query attention, Ainslie et al. 2023). The n keys come
    in the order of position, and only those that the row may see: nothing is masked here.
    """
    groups, d = keys.shape[1:]
    grouped = queries.reshape(groups, -1, d) * queries.dtype.type(1 / math.sqrt(d))
    scores = _products("gqd,ngd->gqn", grouped, keys)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return _products("gqn,ngd->gqd", weights, values).ravel()


def swiglu(gate: NDArray[Real], up: NDArray[Real]) -> NDArray[Real]:
    """silu(gate) * up. [I], [I] -> [I]  (Shazeer 2020)"""
    with np.errstate(over="ignore"):  # exp(-gate) may become infinite: the quotient is then the right zero
        y: NDArray[Real] = gate / (1 + np.exp(-gate)) * up
    return y
