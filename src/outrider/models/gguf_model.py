"""A decoder from a GGUF file: its configuration, and its tensors under their canonical names."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models import rope_scaling
from outrider.models.config import DecoderConfig
from outrider.models.errors import ModelError
from outrider.models.gguf_file import GgufFile
from outrider.models.layout import check_config, check_tensors, shapes
from outrider.models.tensor import Tensor

__all__ = ["ARCHITECTURES", "read_config", "read_tensors"]

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")

# Keys of an architecture that change its arithmetic in ways that are not built, with the value that changes nothing.
FOREIGN: Final = {
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 0,
    "residual_scale": 0,
    "embedding_scale": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
}

TOP: Final = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
LAYER: Final = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}
DIVISORS: Final = "rope_freqs.weight"


def read_config(file: GgufFile) -> DecoderConfig:
    """The configuration, without the tokens that begin and end a text.

    A sliding window shorter than the context limits `context` to the window: within it both attend alike.
    """
    metadata, where = file.metadata, str(file.path)
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{where} has the architecture {architecture!r}, which is not supported "
            f"(these are: {', '.join(ARCHITECTURES)})"
        )
    for name, plain in FOREIGN.items():
        value = metadata.number(f"{architecture}.{name}", plain)
        if value != plain:
            raise ModelError(f"{where}: {architecture}.{name} is {value}, which is not supported")
    embed = file.entries.get(TOP["embed"])
    if embed is None or len(embed.dims) != 2:
        raise ModelError(f"{where}: tensor {TOP['embed']} is missing, or no matrix")
    hidden = metadata.integer(f"{architecture}.embedding_length")
    heads = metadata.integer(f"{architecture}.attention.head_count")
    context = metadata.integer(f"{architecture}.context_length")
    if heads < 1:
        raise ModelError(f"{where}: {architecture}.attention.head_count is {heads}")
    head_dim = metadata.integer(f"{architecture}.attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.integer(f"{architecture}.{name}", head_dim)) != head_dim:
            raise ModelError(f"{where}: {architecture}.{name} is {value} where heads have {head_dim}: not supported")
    window = metadata.integer(f"{architecture}.attention.sliding_window", 0)
    config = DecoderConfig(
        architecture=architecture,
        vocabulary=embed.dims[1],
        hidden=hidden,
        layers=metadata.integer(f"{architecture}.block_count"),
        heads=heads,
        kv_heads=metadata.integer(f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=metadata.integer(f"{architecture}.feed_forward_length"),
        context=min(context, window) if window else context,
        norm_eps=metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.number(f"{architecture}.rope.freq_base", 10000.0),
        rope_scaling=rope_scaling.from_gguf(metadata, architecture, context),
        tied_embeddings=TOP["head"] not in file.entries,
        qkv_bias="blk.0.attn_q.bias" in file.entries,
        qk_norm="blk.0.attn_q_norm.weight" in file.entries,
    )
    check_config(config, where)
    if DIVISORS not in file.entries:
        return config
    if config.rope_scaling is not None:
        raise ModelError(f"{where}: {DIVISORS} beside {architecture}.rope.scaling is not supported")
    divisors = file.tensors([DIVISORS])[DIVISORS].float32()
    return replace(config, rope_scaling=rope_scaling.from_divisors(divisors, config.rope_theta, config.head_dim, where))


def read_tensors(file: GgufFile, config: DecoderConfig) -> dict[str, Tensor]:
    """All tensors by canonical name, Q and K rows in Hugging Face's order. Refuses missing and unknown ones by name."""
    where = str(file.path)
    names = {name: _file_name(name) for name in shapes(config)}
    for theirs in names.values():
        if theirs not in file.entries:
            raise ModelError(f"{where}: tensor {theirs} is missing")
    if unknown := sorted(file.entries.keys() - set(names.values()) - {DIVISORS}):
        raise ModelError(f"{where}: tensor {unknown[0]} has no place in a {config.architecture} decoder")
    stored = file.tensors(names.values())
    tensors = {name: stored[theirs] for name, theirs in names.items()}
    check_tensors(config, tensors, where)
    if config.architecture == "llama":
        orders = {"q": config.heads, "k": config.kv_heads}
        for name, tensor in tensors.items():
            if heads := orders.get(name.rpartition(".")[2].removesuffix("_bias")):
                tensors[name] = replace(tensor, order=halves(heads, config.head_dim))
    return tensors


def halves(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Where Hugging Face's row lies in a llama GGUF. [heads * head_dim]

    GGUF interleaves the two halves that rotate together: its row (h, j, s) is row (h, s, j) of Hugging Face,
    with h the head, j in [0, head_dim / 2) the frequency and s the half.
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1)


def _file_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{LAYER[part]}"
