"""Rotary position embeddings: the frequencies of a model, computed once, in float64, for every runner.

Su et al. 2021 (RoFormer, section 3.2.2) for the plain kind; `linear` is Chen et al. 2023 (Position Interpolation,
section 3.2); `llama3` is what Meta published with Llama 3.1; `yarn` is Peng et al. 2023 (section 3.2 and 3.3).

Letters: d head size, P positions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.models.config import DecoderConfig, RopeScaling

__all__ = ["inverse_frequencies", "rotary_table"]

Floats = NDArray[np.float64]


def inverse_frequencies(config: DecoderConfig) -> tuple[Floats, float]:
    """Radians per position of each rotated pair [d / 2], and the factor on its cosine and sine.

    Pair i rotates elements i and i + d / 2 of a head. The factor is 1 for all kinds but `yarn`.
    Raises ValueError for a kind that is not known.
    """
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, scaling, config), _yarn_attention(scaling)
    raise ValueError(f"RoPE scaling of kind {scaling.kind!r}; known are linear, llama3 and yarn")


def rotary_table(config: DecoderConfig, positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines of positions [0, P), the attention factor multiplied in. [P, d / 2] each"""
    frequencies, factor = inverse_frequencies(config)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    return np.cos(angles) * factor, np.sin(angles) * factor


def _llama3(plain: Floats, scaling: RopeScaling) -> Floats:
    """Long waves are stretched, short ones kept, those between blended by how often they turn in the old context."""
    turns = scaling.original_context * plain / (2 * math.pi)
    keep = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: Floats, scaling: RopeScaling, config: DecoderConfig) -> Floats:
    """The same idea with a ramp over the pair's index instead of its turns ("NTK by parts")."""

    def index(turns: float) -> float:  # of the pair that turns so often in the old context
        wave = scaling.original_context / (turns * 2 * math.pi)
        return config.head_dim * math.log(wave) / (2 * math.log(config.rope_theta))

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), config.head_dim - 1)
    span = high - low if high != low else 0.001  # equal bounds are a step, not a division by zero
    stretch = np.clip((np.arange(len(plain)) - low) / span, 0, 1)
    return stretch * plain / scaling.factor + (1 - stretch) * plain


def _yarn_attention(scaling: RopeScaling) -> float:
    """Peng et al. 2023, section 3.3: the temperature of the scaled attention, put on the cosines and sines."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
