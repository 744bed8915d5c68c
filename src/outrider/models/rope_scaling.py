"""Reads how rotary frequencies are stretched, from Hugging Face's config and from GGUF's metadata.

Sources: Llama 3.1's frequency bands (transformers' `llama3`), YaRN (Peng et al. 2023, section 3), and GGUF's
`rope.scaling.*` keys and `rope_freqs.weight` tensor, whose values divide the plain frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.config import RopeScaling
from outrider.models.errors import ModelError
from outrider.models.gguf_file import Metadata

__all__ = ["from_divisors", "from_gguf", "from_hf", "llama3_divisors", "to_hf"]

# The bands of every Llama 3.1, 3.2 and 3.3; only the factor differs between them.
LLAMA3_CONTEXT: Final = 8192
LLAMA3_LOW: Final = 1.0
LLAMA3_HIGH: Final = 4.0

# GGUF's further settings of YaRN, with the value that changes nothing.
YARN_PLAIN: Final = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}


def from_hf(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling from a config.json: `rope_theta` with `rope_scaling`, or transformers 5's `rope_parameters`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{where}: rope_parameters is not an object")
    theta = _number(parameters, "rope_theta", config.get("rope_theta", 10000.0), where)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{where}: partial_rotary_factor is {partial}: only whole heads can be rotated")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, checked(RopeScaling("linear", _number(parameters, "factor", None, where)), where)
    original = parameters.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if not isinstance(original, int):
        raise ModelError(f"{where}: original_max_position_embeddings is not a whole number")
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            _number(parameters, "factor", None, where),
            original,
            low_freq_factor=_number(parameters, "low_freq_factor", LLAMA3_LOW, where),
            high_freq_factor=_number(parameters, "high_freq_factor", LLAMA3_HIGH, where),
        )
        return theta, checked(scaling, where)
    if kind == "yarn":
        return theta, checked(_yarn(parameters, original, where), where)
    raise ModelError(f"{where}: RoPE scaling {kind!r} is not supported (these are: linear, llama3, yarn)")


def to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` of a config.json that `from_hf` reads."""
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            found["attention_factor"] = scaling.attention_factor
    return found


def _yarn(parameters: Mapping[str, Any], original: int, where: str) -> RopeScaling:
    for name, plain in (("mscale", 0), ("mscale_all_dim", 0), ("truncate", True)):
        if parameters.get(name) not in (None, plain):
            raise ModelError(f"{where}: YaRN with {name} = {parameters[name]} is not supported")
    attention = parameters.get("attention_factor")
    return RopeScaling(
        "yarn",
        _number(parameters, "factor", None, where),
        original,
        beta_fast=_number(parameters, "beta_fast", 32.0, where),
        beta_slow=_number(parameters, "beta_slow", 1.0, where),
        attention_factor=None if attention is None else _number(parameters, "attention_factor", None, where),
    )


def from_gguf(metadata: Metadata, architecture: str, context: int) -> RopeScaling | None:
    """Scaling from the `rope.scaling.*` keys. A factor without a type means linear, as in llama.cpp."""
    prefix, where = f"{architecture}.rope.scaling.", str(metadata.path)
    factor = metadata.number(prefix + "factor", metadata.number(f"{architecture}.rope.scale_linear", 0.0))
    kind = metadata.text(prefix + "type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return checked(RopeScaling("linear", factor), where)
    if kind != "yarn":
        raise ModelError(f"{where}: RoPE scaling {kind!r} is not supported (these are: linear, yarn)")
    for name, plain in YARN_PLAIN.items():
        if (value := metadata.number(prefix + name, plain)) != plain:
            raise ModelError(f"{where}: {prefix}{name} is {value}: only {plain:g} is supported")
    scaling = RopeScaling(
        "yarn",
        factor,
        metadata.integer(prefix + "original_context_length", context),
        beta_fast=metadata.number(prefix + "yarn_beta_fast", 32.0),
        beta_slow=metadata.number(prefix + "yarn_beta_slow", 1.0),
    )
    return checked(scaling, where)


def llama3_divisors(factor: float, theta: float, head_dim: int) -> NDArray[np.float64]:
    """What Llama 3's bands divide each plain frequency by. [head_dim / 2]

    1 for wavelengths under original / high, `factor` above original / low, and between them 1 / (linear mix of both).
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (LLAMA3_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = smooth.clip(0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def from_divisors(divisors: NDArray[np.float32], theta: float, head_dim: int, where: str) -> RopeScaling | None:
    """The scaling that a `rope_freqs.weight` tensor stands for. [head_dim / 2] -> None, or Llama 3's bands.

    Raises ModelError if the values are not those of Llama 3.1, 3.2 or 3.3.
    """
    if (divisors == 1.0).all():
        return None
    factor = float(divisors.max())
    if math.isfinite(factor) and factor > 1.0:
        expected = llama3_divisors(factor, theta, head_dim)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
            return RopeScaling(
                "llama3", factor, LLAMA3_CONTEXT, low_freq_factor=LLAMA3_LOW, high_freq_factor=LLAMA3_HIGH
            )
    raise ModelError(f"{where}: rope_freqs.weight is not the frequency scaling of Llama 3, and no other is supported")


def checked(scaling: RopeScaling, where: str) -> RopeScaling:
    """Refuses factors out of range."""
    if not (math.isfinite(scaling.factor) and scaling.factor >= 1.0):
        raise ModelError(f"{where}: RoPE scaling factor is {scaling.factor}: 1 or more is needed")
    if scaling.kind != "linear" and not 1 <= scaling.original_context <= 1 << 31:
        raise ModelError(f"{where}: the original context of RoPE scaling is {scaling.original_context}")
    if scaling.kind == "llama3" and not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor < math.inf:
        raise ModelError(
            f"{where}: RoPE scaling needs 0 < low_freq_factor < high_freq_factor, "
            f"not {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        )
    if scaling.kind == "yarn":
        attention = 1.0 if scaling.attention_factor is None else scaling.attention_factor
        if not (0.0 < scaling.beta_slow < scaling.beta_fast < math.inf and 0.0 < attention < math.inf):
            raise ModelError(f"{where}: YaRN needs 0 < beta_slow < beta_fast and a positive attention_factor")
    return scaling


def _number(values: Mapping[str, Any], name: str, default: Any, where: str) -> float:
    value = values.get(name, default)
    if value is None:
        raise ModelError(f"{where}: RoPE scaling has no {name}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{where}: RoPE scaling {name} is {value!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ModelError(f"{where}: RoPE scaling {name} is too large a number") from None
