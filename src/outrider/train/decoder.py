"""The decoder in torch: the target whose text and states are learnt from, and the small draft that learns.

Letters: B sequences, T positions, D hidden size, V vocabulary, W wanted layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.config import DecoderConfig
from outrider.models.rotary import rotary_table

__all__ = ["Attend", "Decoder", "Layer", "causal", "rms_norm", "rotary", "rotate"]

# queries [B, heads, T, d], keys and values [B, kv_heads, T, d] -> [B, heads, T, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich 2019, in float32. [..., D] -> [..., D]"""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotary(config: DecoderConfig, positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [0, P). [P, d / 2] each, float32"""
    cosines, sines = rotary_table(config, positions)
    return (
        torch.from_numpy(cosines).float().to(device),
        torch.from_numpy(sines).float().to(device),
    )


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the halves of each head. x [B, heads, T, d]; cosines and sines broadcast against [B, 1, T, d / 2]."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1).to(x.dtype)


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each position attends to itself and all before it."""
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=queries.shape[1] != keys.shape[1]
    )


class Layer(nn.Module):
    """One decoder layer. Matrices are kept as canonical tensors are: `q` and so on, [rows, columns]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden, config.head_dim
        queries, keys = config.heads * dim, config.kv_heads * dim

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns))

        self.attn_norm = nn.Parameter(torch.ones(hidden))
        self.q, self.k, self.v = matrix(queries, hidden), matrix(keys, hidden), matrix(keys, hidden)
        self.o = matrix(hidden, queries)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate, self.up = matrix(config.intermediate, hidden), matrix(config.intermediate, hidden)
        self.down = matrix(hidden, config.intermediate)

        def maybe(there: bool, value: Tensor) -> nn.Parameter | None:
            return nn.Parameter(value) if there else None

        self.q_bias = maybe(config.qkv_bias, torch.zeros(queries))
        self.k_bias = maybe(config.qkv_bias, torch.zeros(keys))
        self.v_bias = maybe(config.qkv_bias, torch.zeros(keys))
        self.q_norm = maybe(config.qk_norm, torch.ones(dim))
        self.k_norm = maybe(config.qk_norm, torch.ones(dim))

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, attend: Attend = causal) -> Tensor:
        """The residual stream after the layer. [B, T, D] -> [B, T, D], float32"""
        config = self.config
        normed = rms_norm(x, self.attn_norm, config.norm_eps).to(self.q.dtype)

        def heads(weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
            flat = functional.linear(normed, weight, bias)
            out = flat.view(*flat.shape[:2], -1, config.head_dim).transpose(1, 2)
            return out if norm is None else rms_norm(out, norm, config.norm_eps).to(out.dtype)

        q = rotate(heads(self.q, self.q_bias, self.q_norm), cosines, sines)
        k = rotate(heads(self.k, self.k_bias, self.k_norm), cosines, sines)
        mixed = attend(q, k, heads(self.v, self.v_bias, None)).transpose(1, 2).flatten(2)
        x = x + functional.linear(mixed, self.o)
        normed = rms_norm(x, self.mlp_norm, config.norm_eps).to(self.gate.dtype)
        gated = functional.silu(functional.linear(normed, self.gate)) * functional.linear(normed, self.up)
        return x + functional.linear(gated, self.down)


class Decoder(nn.Module):
    """All layers with embedding and head. The residual stream is float32, whatever the weights are."""

    def __init__(self, config: DecoderConfig, head_rows: int | None = None) -> None:
        """`head_rows` is the size of a reduced output vocabulary; None means the whole one."""
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        tied = config.tied_embeddings and head_rows is None
        self.head = None if tied else nn.Parameter(torch.empty(head_rows or config.vocabulary, config.hidden))

    @classmethod
    def of(
        cls, config: DecoderConfig, tensors: Mapping[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Decoder:
        """The decoder with a model's weights, dequantised. `tensors` by canonical name."""
        made = cls(config)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(torch.from_numpy(tensors[name].float32()))
        return made.to(device=device, dtype=dtype).requires_grad_(False)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]"""
        return self.embed if self.head is None else self.head

    def forward(self, tokens: Tensor, wants: Sequence[int] = (-1,)) -> Tensor:
        """States of the wanted layers, as a runner gives them: -1 is the final normed one. [B, T] -> [B, T, W, D]

        Padding on the right changes nothing on its left.
        """
        cosines, sines = rotary(self.config, tokens.shape[1], tokens.device)
        x = functional.embedding(tokens, self.embed).float()
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, cosines, sines)
            if index in wants:
                kept[index] = x
        if -1 in wants:
            kept[-1] = rms_norm(x, self.norm, self.config.norm_eps)
        return torch.stack([kept[layer] for layer in wants], 2)

    def logits(self, final: Tensor, columns: Tensor | None = None) -> Tensor:
        """Of all tokens that it can say, or of some. [..., D] -> [..., V]"""
        head = self.head_weight if columns is None else self.head_weight[columns]
        return functional.linear(final.to(head.dtype), head)
