"""The native runner: all layers of a forward in one call into C++, over packed weights and a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider import _native
from outrider.core.cache import Pages
from outrider.core.params import ParameterError
from outrider.core.shaping import Draw, Shaping
from outrider.core.tree import Tree
from outrider.models.load import ModelFiles
from outrider.models.rotary import inverse_frequencies
from outrider.models.tensor import Tensor
from outrider.runtime import native_sampling as sampling
from outrider.runtime.cores import physical_cores
from outrider.runtime.growth import Grower, Plan, Sprout
from outrider.runtime.packed import WEIGHT_KINDS, packed_bytes, pick_format
from outrider.runtime.runner import Feed

if TYPE_CHECKING:
    from outrider.models.heads import Eagle

__all__ = ["DTYPES", "KV_DTYPES", "NativeRunner", "NativeScores", "forecast", "given", "grow", "one_of"]

KV_DTYPES = ("fp32", "bf16", "int8")
DTYPES = ("auto", *WEIGHT_KINDS)


class NativeRunner:
    """A `Runner` on the CPU. Weights are packed at once; `files` may be dropped afterwards.

    `dtype` is the format of the layers' weights, `head_dtype` that of the head (default: `dtype`, but `auto` under
    int4: a head in 4 bits that the file holds in more costs most of the accuracy). `auto` is what the file holds: F32
    as fp32; F16 and BF16 as bf16; Q8_0, Q6_K and Q5 kinds as int8; Q4 kinds as int4; matrices that are multiplied
    together in the most exact format among them. `kv_dtype` is the cache's (default: fp32 if `dtype` is fp32, else
    bf16). `threads` are the physical cores that the process may use, unless given. The cache holds `cache_tokens` rows,
    rounded up to whole pages. Raises ParameterError that names the parameter.
    """

    def __init__(
        self,
        files: ModelFiles,
        dtype: str = "auto",
        head_dtype: str | None = None,
        kv_dtype: str | None = None,
        threads: int | None = None,
        cache_tokens: int = 4096,
        page_size: int = 64,
    ) -> None:
        self.config = config = files.config
        self._tokens = files.tokens
        self.formats, self.kv_dtype = _choose(files, dtype, head_dtype, kv_dtype)
        self.threads = threads or physical_cores()
        frequencies, factor = inverse_frequencies(config)
        self.pages = Pages(-(-cache_tokens // page_size), page_size, self)
        self.decoder = _native.Decoder(
            shape=_shape(files),
            fusion={},
            tensors=given(files.tensors),
            formats=self.formats,
            frequencies=frequencies,
            rope_factor=factor,
            kv_dtype=self.kv_dtype,
            page_count=self.pages.count,
            page_size=page_size,
            threads=self.threads,
            tokens=self._tokens,
            head=None,
        )

    def forward(self, batch: Sequence[Feed], wants: Sequence[int] = ()) -> NativeScores:
        """See `Runner.forward`. Raises ValueError for rows that were not reserved and tokens outside the vocabulary."""
        feeds = [(feed.rows.length, feed.rows.pages, *_nodes(feed)) for feed in batch]
        return NativeScores(batch, *self.decoder.forward(feeds, wants, ()), self._wide)

    def _wide(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """A row of a head that knows some tokens only, over all of them. [outputs] -> [V]"""
        if self._tokens is None:
            return row
        out = np.full(self.config.vocabulary, -np.inf, np.float32)
        out[self._tokens] = row
        return out

    def grow(self, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
        """See `Grower.grow`. One call into C++, levels and all."""
        return grow(self.decoder, batch, plan)

    def eagle(self, head: Eagle, files: ModelFiles, dtype: str = "auto") -> Grower:
        """See `Runner.eagle`. `dtype` is fp32, bf16, int8, int4, or auto, which is what the head's file holds."""
        from outrider.runtime.native_eagle import NativeEagle

        return NativeEagle(head, files, self, dtype)

    def eagle_bytes(self, head: Eagle, dtype: str = "auto") -> dict[str, int]:
        from outrider.runtime.native_eagle import forecast

        return forecast(head, self, dtype)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy cache rows in every layer, one after the other (`core.cache.Storage`)."""
        self.decoder.move(source, target)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in the cache, all layers together."""
        return self.decoder.row_bytes

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose. The cache's are address space: the system gives them as they are written."""
        return self.decoder.memory()


class NativeScores:
    """See `runtime.runner.Scores`. Logits and states are views of buffers that the next forward writes again."""

    __slots__ = ("_batch", "_firsts", "_hidden", "_logits", "_spans", "_wide")

    def __init__(
        self,
        batch: Sequence[Feed],
        logits: NDArray[np.float32],
        hidden: NDArray[np.float32] | None,
        wide: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    ) -> None:
        self._batch, self._logits, self._hidden, self._wide = tuple(batch), logits, hidden, wide
        self._firsts = [0]  # row of each feed's root in `logits`
        self._spans: list[int] = []  # row of each feed's first state in `hidden`, once somebody asks
        for feed in batch:
            self._firsts.append(self._firsts[-1] + (0 if feed.tree is None else feed.judged + len(feed.tree)))

    def logits(self, feed: int, node: int) -> NDArray[np.float32]:
        """[V]"""
        row = self._firsts[feed] + self._batch[feed].judged + node
        if not self._firsts[feed] <= row < self._firsts[feed + 1]:
            raise IndexError(f"node {node} of feed {feed} was not scored")
        return self._wide(self._logits[row])

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
        return sampling.describe(self.logits(feed, node), token, k)

    def hidden(self, feed: int) -> NDArray[np.float32]:
        """[n, W, D]"""
        if not self._spans:
            sizes = (len(f.pending) + (f.tree.guesses if f.tree else 0) for f in self._batch)
            self._spans = list(accumulate(sizes, initial=0))
        first, end = self._spans[feed], self._spans[feed + 1]
        return np.empty((end - first, 0, 0), np.float32) if self._hidden is None else self._hidden[first:end]


def _nodes(feed: Feed) -> tuple[Sequence[int], Sequence[int] | None, Sequence[int] | None]:
    """Pending tokens, and tokens and parents of the tree: judged tokens are the chain that leads to its root."""
    tree, judged = feed.tree, feed.judged
    if tree is None:
        return feed.pending, None, None
    if not judged:
        return feed.pending, tree.tokens, tree.parents
    first = len(feed.pending) - judged  # pending tokens up to the one that the native code has for the root
    parents = (*range(-1, judged), *(parent + judged for parent in tree.parents[1:]))
    return feed.pending[:first], (*feed.pending[first - 1 :], *tree.tokens[1:]), parents


def given(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, NDArray[np.uint8], int]]:
    """Tensors as `_native` takes them."""
    return {name: (tensor.kind, tensor.raw, tensor.shape[-1]) for name, tensor in tensors.items()}


def grow(decoder: _native.Decoder, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
    """`Grower.grow` by a native decoder."""
    made = decoder.grow(
        (plan.width, plan.least, plan.reach, plan.layers, plan.vocabulary, plan.gain),
        [
            (
                sprout.rows.length,
                sprout.rows.pages,
                sprout.pending,
                sprout.states,
                sampling.prepared(sprout.shaping),
                len(sprout.shaping.tokens),
                sprout.shaping.tokens,
                sprout.shaping.mask,
                sprout.guesses,
                sprout.depth,
                sprout.rejection,
            )
            for sprout in batch
        ],
    )
    return [
        Tree(tokens, parents, laws, None if sprout.rejection else chances)
        for sprout, (tokens, parents, chances, laws) in zip(batch, made, strict=True)
    ]


def forecast(
    files: ModelFiles,
    dtype: str = "auto",
    head_dtype: str | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
    *,
    cache_tokens: int,
    page_size: int = 64,
) -> dict[str, int]:
    """Bytes that a `NativeRunner` of these arguments will hold after a long prompt; nothing is packed."""
    config = files.config
    formats, kv_dtype = _choose(files, dtype, head_dtype, kv_dtype)
    slots = -(-cache_tokens // page_size) * page_size
    return {
        "weights": sum(_product_bytes(files.tensors, name, format) for name, format in formats.items()),
        "cache": _native.cache_bytes(kv_dtype, config.layers, config.kv_heads, config.head_dim, slots),
        "workspace": _native.workspace_bytes(_shape(files), {}, threads or physical_cores()),
    }


def _shape(files: ModelFiles) -> dict[str, Any]:
    head = files.tensors["head" if "head" in files.tensors else "embed"]
    return asdict(files.config) | {"outputs": head.shape[0]}


_STACKED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def _product_bytes(tensors: Mapping[str, Tensor], name: str, format: str) -> int:
    prefix, _, last = name.rpartition(".")
    if name == "head" and "head" not in tensors:
        last = "embed"
    parts = [tensors[f"{prefix}.{part}" if prefix else part] for part in _STACKED.get(last, (last,))]
    rows = sum(part.shape[0] for part in parts)
    return packed_bytes(format, [p.kind for p in parts], rows, parts[0].shape[1], paired=last == "gate_up")


def _choose(files: ModelFiles, dtype: str, head_dtype: str | None, kv_dtype: str | None) -> tuple[dict[str, str], str]:
    """The format of each product, and of the cache."""
    one_of("dtype", dtype, DTYPES)
    head_dtype = one_of("head_dtype", head_dtype or ("auto" if dtype == "int4" else dtype), DTYPES)
    formats = _formats(files.tensors, files.config.layers, dtype, head_dtype)
    exact = set(formats.values()) == {"fp32"}
    return formats, one_of("kv_dtype", kv_dtype or ("fp32" if exact else "bf16"), KV_DTYPES)


def one_of(parameter: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise ParameterError(parameter, f"{value!r} is not one of {', '.join(known)}")
    return value


def _formats(tensors: Mapping[str, Tensor], layers: int, dtype: str, head_dtype: str) -> dict[str, str]:
    """The format of each product: parts that are stacked are packed alike."""

    def pick(wish: str, *parts: str) -> str:
        return pick_format(wish, [tensors[part].kind for part in parts if part in tensors])

    formats = {"head": pick(head_dtype, "head" if "head" in tensors else "embed")}
    for layer in (f"layers.{i}." for i in range(layers)):
        formats[layer + "qkv"] = pick(dtype, layer + "q", layer + "k", layer + "v")
        formats[layer + "o"] = pick(dtype, layer + "o")
        formats[layer + "gate_up"] = pick(dtype, layer + "gate", layer + "up")
        formats[layer + "down"] = pick(dtype, layer + "down")
    return formats
