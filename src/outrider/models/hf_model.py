"""A decoder from a Hugging Face folder: its configuration, and its tensors under their canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.models import rope_scaling
from outrider.models.config import DecoderConfig
from outrider.models.errors import ModelError
from outrider.models.layout import check_config, check_tensors, shapes
from outrider.models.tensor import Tensor

__all__ = ["FAMILIES", "file_name", "read_config", "rename"]

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
MISTRAL_WINDOW: Final = 4096  # what a Mistral config means that does not say

TOP: Final = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER: Final = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def read_config(config: Mapping[str, Any], path: Path) -> DecoderConfig:
    """The configuration from the object of a config.json, without the tokens that begin and end a text.

    A sliding window shorter than the context limits `context` to the window: within it both attend alike.
    """
    where = str(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{where}: model_type {family!r} is not supported (these are: {', '.join(FAMILIES)})")
    _refuse_foreign(config, family, where)
    hidden, heads = _integer(config, "hidden_size", where), _integer(config, "num_attention_heads", where)
    if heads < 1:
        raise ModelError(f"{where}: num_attention_heads is {heads}")
    theta, scaling = rope_scaling.from_hf(config, where)
    found = DecoderConfig(
        architecture=family,
        vocabulary=_integer(config, "vocab_size", where),
        hidden=hidden,
        layers=_integer(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=_integer(config, "num_key_value_heads", where, heads),
        head_dim=_integer(config, "head_dim", where, 128 if family == "qwen3" else hidden // heads),
        intermediate=_integer(config, "intermediate_size", where),
        context=_context(config, family, where),
        norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=config.get("tie_word_embeddings") is True,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    check_config(found, where)
    return found


def rename(stored: Mapping[str, Tensor], config: DecoderConfig, path: Path) -> dict[str, Tensor]:
    """The tensors by canonical name. Refuses missing and unknown ones by name."""
    where = str(path)
    names = {name: file_name(name) for name in shapes(config)}
    for theirs in names.values():
        if theirs not in stored:
            raise ModelError(f"{where}: tensor {theirs} is missing")
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}  # old checkpoints keep a constant there
    if config.tied_embeddings:
        ignored.add(TOP["head"])
    if unknown := sorted(stored.keys() - set(names.values()) - ignored):
        raise ModelError(f"{where}: tensor {unknown[0]} has no place in a {config.architecture} decoder")
    tensors = {name: stored[theirs] for name, theirs in names.items()}
    check_tensors(config, tensors, where)
    return tensors


def _refuse_foreign(config: Mapping[str, Any], family: str, where: str) -> None:
    plain: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    }
    if family == "qwen2":
        del plain["attention_bias"]  # it has its biases whatever the config says
    plain |= {"quantization_config": (None,), "pretraining_tp": (1, None), "num_experts": (None, 0)}
    for name, accepted in plain.items():
        if (value := config.get(name, accepted[0])) not in accepted:
            shown = value.get("quant_method") if isinstance(value, dict) else value
            raise ModelError(f"{where}: {name} {shown!r} is not supported")


def _context(config: Mapping[str, Any], family: str, where: str) -> int:
    context = _integer(config, "max_position_embeddings", where)
    window = config.get("sliding_window", MISTRAL_WINDOW if family == "mistral" else None)
    kinds = config.get("layer_types")
    if family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        window = None
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        window = None
    if window is None:
        return context
    if type(window) is not int or window < 1:
        raise ModelError(f"{where}: sliding_window is {window!r}")
    return min(context, window)


def _integer(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int:
        raise ModelError(f"{where}: {name} is {'missing' if value is None else f'{value!r}, not a whole number'}")
    return value


def _number(config: Mapping[str, Any], name: str, where: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{where}: {name} is {value!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ModelError(f"{where}: {name} is too large a number") from None


def file_name(name: str) -> str:
    """Hugging Face's name of a tensor, from its canonical one."""
    if name in TOP:
        return TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}"
