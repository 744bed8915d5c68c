"""The reference runner: one row after the other through all layers, in numpy, in float32 or float64.

It is the oracle of the other runners. A row is a pure function of its token, its position and the keys and values
of the rows it sees, so the promise of `runtime/runner.py` holds without further argument; the rest is bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core import sampling
from outrider.core.cache import Pages
from outrider.core.shaping import Draw, Shaping
from outrider.core.tree import Tree
from outrider.kernels.reference import attention, linear, rms_norm, rotate, swiglu
from outrider.models.config import DecoderConfig
from outrider.models.rotary import rotary_table
from outrider.runtime.growth import Grower, Plan, Sprout, grow
from outrider.runtime.runner import Feed

if TYPE_CHECKING:
    from outrider.models.heads import Eagle
    from outrider.models.load import ModelFiles

__all__ = ["ReferenceRunner", "ReferenceScores", "forecast", "widen"]

Array = NDArray[Any]  # float32 or float64, as the runner was made
Slots = NDArray[np.intp]


class Weights(Protocol):
    """What the runner reads of a model: `models.load.ModelFiles`, or anything with the same fields."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def tensors(self) -> Mapping[str, Any]: ...  # canonical name -> models.tensor.Tensor

    @property
    def tokens(self) -> NDArray[np.int64] | None: ...  # by row of a draft's head that knows some tokens only


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer, dequantised. None where the model has none."""

    attn_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    q_bias: Array | None
    k_bias: Array | None
    v_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None


class ReferenceRunner:
    """A `Runner` over the dequantised weights of `files`.

    Weights are dequantised at the first forward. The cache holds `cache_tokens` rows, rounded up to whole pages.
    Raises ValueError for an unknown `dtype`.
    """

    def __init__(
        self,
        files: Weights,
        dtype: Literal["fp32", "fp64"] = "fp32",
        cache_tokens: int = 4096,
        page_size: int = 64,
    ) -> None:
        if dtype not in ("fp32", "fp64"):
            raise ValueError(f"dtype {dtype!r}: the reference runner computes in fp32 or fp64")
        self.config = files.config
        self._tensors, self._tokens = files.tensors, files.tokens
        self._dtype = np.dtype(np.float32 if dtype == "fp32" else np.float64)
        self.pages = Pages(-(-cache_tokens // page_size), page_size, self)
        rows = self.pages.count * page_size
        shape = (self.config.layers, rows, self.config.kv_heads, self.config.head_dim)
        # NaN, so that a row that was never written shows in every logit
        self._keys = np.full(shape, np.nan, self._dtype)
        self._values = np.full(shape, np.nan, self._dtype)
        cosines, sines = rotary_table(self.config, rows)
        self._cosines, self._sines = cosines.astype(self._dtype), sines.astype(self._dtype)

    # rows: [0, length) committed | pending, the last one is the tree's root | nodes 1 ... of the tree
    def forward(self, batch: Sequence[Feed], wants: Sequence[int] = (), through: Sequence[int] = ()) -> ReferenceScores:
        """See `Runner.forward`. `through` are the layers that are run, all of them if none is given."""
        for layer in wants:
            if not -1 <= layer < self.config.layers:
                raise ValueError(f"hidden states of layer {layer}: the model has layers 0 to {self.config.layers - 1}")
        logits: list[list[Array]] = []
        hidden: list[Array] = []
        for feed in batch:
            scored, states = self._feed(feed, wants, through or range(self.config.layers))
            logits.append([widen(row, self._tokens, self.config.vocabulary) for row in scored])
            hidden.append(states)
        return ReferenceScores(logits, hidden, [feed.judged for feed in batch])

    def grow(self, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
        """See `Grower.grow`."""
        return grow(lambda feeds, _: self.forward(feeds, (), plan.layers), batch, plan)

    def eagle(self, head: Eagle, files: ModelFiles, dtype: str = "auto") -> Grower:
        """See `Runner.eagle`. In float32, whatever `dtype` says."""
        from outrider.runtime.reference_eagle import ReferenceEagle

        return ReferenceEagle(head, files, self.pages)

    def eagle_bytes(self, head: Eagle, dtype: str = "auto") -> dict[str, int]:
        from outrider.runtime.reference_eagle import forecast

        return forecast(head, self.pages)

    def _feed(self, feed: Feed, wants: Sequence[int], through: Sequence[int]) -> tuple[list[Array], Array]:
        """Logits of the judged tokens and the tree's nodes, each [V], and wanted states [n, W, D]."""
        start, pending, tree = feed.rows.length, feed.pending, feed.tree
        guesses = tree.guesses if tree else 0
        root = start + len(pending) - 1
        slots = self._slots(feed, root + 1 + guesses)
        states = np.empty((len(pending) + guesses, len(wants), self.config.hidden), np.float32)
        logits: list[Array] = []

        for i, token in enumerate(pending):
            position = start + i
            final = self._row(token, position, slots[: position + 1], wants, states[i], through)
            if tree is not None and i >= len(pending) - 1 - feed.judged:
                logits.append(linear(self._head, final))
        if tree is None:
            return logits, states
        for node in range(1, len(tree)):
            path = tree.path(node)
            seen = np.concatenate((slots[: root + 1], slots[[root + ancestor for ancestor in path]]))
            state = states[len(pending) - 1 + node]
            final = self._row(tree.tokens[node], root + len(path), seen, wants, state, through)
            logits.append(linear(self._head, final))
        return logits, states

    def _slots(self, feed: Feed, rows: int) -> Slots:
        """Where the logical rows 0, 1 ... of a sequence lie. [rows]"""
        size = self.pages.page_size
        if rows > len(feed.rows.pages) * size:
            raise ValueError(f"a feed of {rows} rows into {len(feed.rows.pages)} pages of {size}: reserve them before")
        row = np.arange(rows)
        return np.asarray(feed.rows.pages, np.intp)[row // size] * size + row % size

    def _row(
        self, token: int, position: int, slots: Slots, wants: Sequence[int], states: Array, through: Sequence[int]
    ) -> Array:
        """The final normed state of one row, which sees the cache rows at `slots`, the last of them its own. [D]

        Writes its keys and values there, and the wanted hidden states into `states` [W, D].
        """
        c = self.config
        if not 0 <= token < c.vocabulary:
            raise ValueError(f"token {token} is outside the vocabulary of {c.vocabulary:,}")
        cosines, sines = self._cosines[position], self._sines[position]
        x = self._embed[token]
        for index in through:
            layer = self._layers[index]
            h = rms_norm(x, layer.attn_norm, c.norm_eps)
            q = linear(layer.q, h, layer.q_bias).reshape(c.heads, c.head_dim)
            k = linear(layer.k, h, layer.k_bias).reshape(c.kv_heads, c.head_dim)
            v = linear(layer.v, h, layer.v_bias).reshape(c.kv_heads, c.head_dim)
            if layer.q_norm is not None:
                q = rms_norm(q, layer.q_norm, c.norm_eps)
            if layer.k_norm is not None:
                k = rms_norm(k, layer.k_norm, c.norm_eps)
            keys, values = self._keys[index], self._values[index]
            keys[slots[-1]] = rotate(k, cosines, sines)
            values[slots[-1]] = v
            attended = attention(rotate(q, cosines, sines), keys[slots], values[slots])
            x = x + linear(layer.o, attended)
            h = rms_norm(x, layer.mlp_norm, c.norm_eps)
            x = x + linear(layer.down, swiglu(linear(layer.gate, h), linear(layer.up, h)))
            for w, want in enumerate(wants):
                if want == index:
                    states[w] = x
        final = rms_norm(x, self._norm, c.norm_eps)
        for w, want in enumerate(wants):
            if want == -1:
                states[w] = final
        return final

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy cache rows in every layer, one after the other (`core.cache.Storage`)."""
        for cache in (self._keys, self._values):
            for s, t in zip(source, target, strict=True):
                cache[:, t] = cache[:, s]

    def memory(self) -> dict[str, int]:
        """Bytes held once the weights are dequantised; there is no workspace to speak of."""
        numbers = sum(int(np.prod(tensor.shape)) for tensor in self._tensors.values())
        return {
            "weights": numbers * self._dtype.itemsize,
            "cache": self._keys.nbytes + self._values.nbytes,
            "workspace": self._cosines.nbytes + self._sines.nbytes,
        }

    def _weight(self, name: str) -> Array:
        return np.require(self._tensors[name].float32(), self._dtype, ["C", "A"])

    def _optional(self, name: str) -> Array | None:
        return self._weight(name) if name in self._tensors else None

    @cached_property
    def _embed(self) -> Array:
        return self._weight("embed")

    @cached_property
    def _head(self) -> Array:
        return self._embed if self.config.tied_embeddings else self._weight("head")

    @cached_property
    def _norm(self) -> Array:
        return self._weight("norm")

    @cached_property
    def _layers(self) -> list[_Layer]:
        plain = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
        maybe = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
        return [
            _Layer(
                *(self._weight(f"layers.{i}.{name}") for name in plain),
                *(self._optional(f"layers.{i}.{name}") for name in maybe),
            )
            for i in range(self.config.layers)
        ]


def widen(row: Array, tokens: NDArray[np.int64] | None, vocabulary: int) -> Array:
    """Logits of some tokens as logits of all. [len(tokens)] -> [V]"""
    if tokens is None:
        return row
    out = np.full(vocabulary, -np.inf, row.dtype)
    out[tokens] = row
    return out


def forecast(files: Weights, dtype: str, cache_tokens: int, page_size: int = 64) -> dict[str, int]:
    """Bytes that a `ReferenceRunner` will hold in weights and cache, from shapes alone."""
    config, item = files.config, 8 if dtype == "fp64" else 4
    rows = -(-cache_tokens // page_size) * page_size
    return {
        "weights": item * sum(int(np.prod(tensor.shape)) for tensor in files.tensors.values()),
        "cache": 2 * item * config.layers * rows * config.kv_heads * config.head_dim,
    }


class ReferenceScores:
    """See `runtime.runner.Scores`. Float64 logits and states are rounded to float32 once, here."""

    def __init__(self, logits: list[list[Array]], hidden: list[Array], judged: Sequence[int]) -> None:
        self._judged = judged
        self._logits = [[row.astype(np.float32, copy=False) for row in rows] for rows in logits]
        self._hidden = hidden

    def logits(self, feed: int, node: int) -> NDArray[np.float32]:
        """[V]"""
        row = self._judged[feed] + node
        if row < 0:
            raise IndexError(f"node {node} of feed {feed} was not scored")
        return self._logits[feed][row]

    def draw(self, feed: int, node: int, shaping: Shaping, path: Sequence[int] = ()) -> Draw:
        return sampling.draw(self.logits(feed, node), shaping, path)

    def law(self, feed: int, node: int, shaping: Shaping, path: Sequence[int] = ()) -> NDArray[np.float64]:
        """[V]"""
        return sampling.law(self.logits(feed, node), shaping, path)

    def top(
        self, feed: int, node: int, k: int, shaping: Shaping | None = None, path: Sequence[int] = ()
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """[k], [k]"""
        return sampling.top(self.logits(feed, node), k, shaping, path)

    def describe(self, feed: int, node: int, token: int, k: int) -> Draw:
        logits = self.logits(feed, node)
        sampling.check_logits(logits)
        return sampling.describe(logits, token, k)

    def hidden(self, feed: int) -> NDArray[np.float32]:
        """[n, W, D]"""
        return self._hidden[feed]
