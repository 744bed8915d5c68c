"""An EAGLE head on the native core: its own packed layers, vocabulary and cache, and the target's embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider import _native
from outrider.core.cache import Pages
from outrider.core.tree import Tree
from outrider.models.heads import Eagle, EagleConfig
from outrider.models.load import ModelFiles
from outrider.models.rotary import inverse_frequencies
from outrider.runtime.growth import Plan, Sprout
from outrider.runtime.native import NativeRunner, given, grow
from outrider.runtime.packed import packed_bytes, pick_format

__all__ = ["NativeEagle", "forecast"]


class NativeEagle:
    """A `Grower`. Row r of a text stands for its token r + 1 and the target's states at r (see reference_eagle.py).

    `dtype` is fp32, bf16, int8, int4 or auto, which is what the file holds; the target's head, where EAGLE-1 uses it,
    is shared. Threads and the cache's format are those of the target.
    """

    def __init__(self, head: Eagle, files: ModelFiles, target: NativeRunner, dtype: str) -> None:
        config, decoder = head.config, head.config.decoder
        frequencies, factor = inverse_frequencies(decoder)
        self.pages = Pages(target.pages.count, target.pages.page_size, self, ahead=1)
        self._decoder = _native.Decoder(
            shape=asdict(decoder) | {"outputs": config.draft_vocabulary},
            fusion=_fusion(config),
            tensors=given({**head.tensors, "embed": files.tensors["embed"]}),
            formats={name: format for name, (format, *_) in _products(head, dtype).items()},
            frequencies=frequencies,
            rope_factor=factor,
            kv_dtype=target.kv_dtype,
            page_count=self.pages.count,
            page_size=self.pages.page_size,
            threads=target.threads,
            tokens=head.tokens,
            head=target.decoder if config.version == 1 else None,
        )

    def grow(self, batch: Sequence[Sprout], plan: Plan) -> list[Tree]:
        """See `Grower.grow`. One call into C++, levels and all."""
        return grow(self._decoder, batch, plan)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy cache rows, one after the other (`core.cache.Storage`)."""
        self._decoder.move(source, target)

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose. The cache's are address space: the system gives them as they are written."""
        return self._decoder.memory()


def _products(head: Eagle, dtype: str) -> dict[str, tuple[str, tuple[str, ...], int, int]]:
    """Each product: format, kinds of its parts in the file, rows, columns."""
    parts: dict[str, tuple[str, ...]] = {"fc": ("fc",)}
    if head.config.version == 3:
        parts["head"] = ("head",)
    for layer in (f"layers.{i}." for i in range(head.config.decoder.layers)):
        for name, stacked in (("qkv", "q k v"), ("o", "o"), ("gate_up", "gate up"), ("down", "down")):
            parts[layer + name] = tuple(layer + part for part in stacked.split())
    found = {}
    for name, stack in parts.items():
        tensors = [head.tensors[part] for part in stack]
        kinds = tuple(tensor.kind for tensor in tensors)
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        found[name] = (pick_format(dtype, kinds), kinds, rows, columns)
    return found


def forecast(head: Eagle, target: NativeRunner, dtype: str) -> dict[str, int]:
    """What `NativeEagle.memory` will say after a long prompt, from shapes alone."""
    decoder = head.config.decoder
    slots = target.pages.count * target.pages.page_size
    return {
        "weights": sum(
            packed_bytes(format, kinds, rows, columns, paired=name.endswith("gate_up"))
            for name, (format, kinds, rows, columns) in _products(head, dtype).items()
        ),
        "cache": _native.cache_bytes(target.kv_dtype, decoder.layers, decoder.kv_heads, decoder.head_dim, slots),
        "workspace": _native.workspace_bytes(
            asdict(decoder) | {"outputs": head.config.draft_vocabulary}, _fusion(head.config), target.threads
        ),
    }


def _fusion(config: EagleConfig) -> dict[str, Any]:
    return {
        "version": config.version,
        "states": len(config.wants) * config.decoder.hidden,
        "norm_before_residual": config.norm_before_residual,
    }
