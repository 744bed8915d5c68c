"""Which tensors a decoder has, under which names and in which shapes, and which numbers make sense together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from outrider.models.config import DecoderConfig
from outrider.models.errors import ModelError
from outrider.models.tensor import Tensor

__all__ = ["check_config", "check_tensors", "shapes"]

# Far above any model there is, and low enough that a list of names stays small.
LIMITS: Final = {
    "vocabulary": 1 << 24,
    "hidden": 1 << 20,
    "layers": 1 << 10,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate": 1 << 22,
    "context": 1 << 31,
}


def check_config(config: DecoderConfig, where: str) -> None:
    """Refuses numbers that no decoder of this family can have. `where` names the file in the message."""
    for name, limit in LIMITS.items():
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ModelError(f"{where}: {name} is {value}: 1 to {limit} is possible")
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} heads cannot share {config.kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim is {config.head_dim}: rotary embeddings need an even one")
    if not (math.isfinite(config.norm_eps) and 0 < config.norm_eps < 1):
        raise ModelError(f"{where}: norm_eps is {config.norm_eps}: a number between 0 and 1 is needed")
    if not (math.isfinite(config.rope_theta) and config.rope_theta > 1):
        raise ModelError(f"{where}: rope_theta is {config.rope_theta}: a number above 1 is needed")
    tokens = {"bos": () if config.bos is None else (config.bos,), "eos": config.eos}
    for name, ids in tokens.items():
        for token in ids:
            if not 0 <= token < config.vocabulary:
                raise ModelError(f"{where}: {name} token {token} is outside the vocabulary of {config.vocabulary}")


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder by its canonical name, with its shape: (rows, columns) or (n,)."""
    hidden, dim = config.hidden, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    found: dict[str, tuple[int, ...]] = {"embed": (config.vocabulary, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        found["head"] = (config.vocabulary, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate": (config.intermediate, hidden),
        "up": (config.intermediate, hidden),
        "down": (hidden, config.intermediate),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.qk_norm:
        layer |= {"q_norm": (dim,), "k_norm": (dim,)}
    for i in range(config.layers):
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def check_tensors(config: DecoderConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuses a missing tensor, a wrong shape, or a vector in a block format. Messages use the file's own names."""
    for name, shape in shapes(config).items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelError(f"{where}: tensor {name} is missing")
        if tensor.shape != shape:
            raise ModelError(f"{where}: tensor {tensor.name} has shape {list(tensor.shape)}, not {list(shape)}")
        if len(shape) == 1 and tensor.kind not in ("F32", "F16", "BF16"):
            raise ModelError(f"{where}: tensor {tensor.name} is a vector in {tensor.kind}: F32, F16 or BF16 is needed")
