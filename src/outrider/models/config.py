"""One Llama-family decoder, described by data."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["DecoderConfig", "RopeScaling"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is `linear`, `llama3` or `yarn`, Hugging Face's `rope_type`."""

    kind: str
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and constants. Q and K rows are in Hugging Face's order (halves rotated), whatever the file had."""

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocabulary: int  # rows of the embedding
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int  # longest sequence, in tokens
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm over each head's q and k before RoPE
    bos: int | None = None
    eos: tuple[int, ...] = field(default=())  # every token that ends a text
