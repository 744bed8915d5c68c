"""How far a guess is from the target's law.

Letters: n rows, V tokens of the draft vocabulary. `p` is the target's law on that vocabulary, `q` the draft's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from outrider.train.errors import TrainError

__all__ = ["LOSSES", "distance", "parse_mix"]

LOSSES = ("kl", "tv", "ce")


def parse_mix(text: str) -> dict[str, float]:
    """`kl`, or a mix such as `0.5*kl+0.5*tv`: kl(p || q), tv = 1/2 sum |p - q| (the rejection rate), ce on the text."""
    mix: dict[str, float] = {}
    for part in text.replace(" ", "").split("+"):
        weight, star, name = part.rpartition("*")
        try:
            value = float(weight) if star else 1.0
        except ValueError:
            value = -1.0
        if name not in LOSSES or value <= 0 or name in mix:
            raise TrainError(f"loss {text!r}: give kl, tv, ce or a sum of them with weights, as in 0.5*kl+0.5*tv")
        mix[name] = value
    return mix


def distance(mix: Mapping[str, float], logits: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """The mixed loss of each row; kl without p's own entropy, which no guess can change. [n, V], [n, V], [n] -> [n]"""
    return cast(Tensor, _Distance.apply(logits, p, token, dict(mix)))  # type: ignore[no-untyped-call]


class _Distance(torch.autograd.Function):
    """Loss and gradient in one go: over a large vocabulary, each pass through memory that is saved shows.

    With q = softmax(z):  d kl / dz = q - p,  d ce / dz = q - [token],  d tv / dz = q (s - s.q), s = sign(q - p) / 2
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, token: Tensor, mix: dict[str, float]) -> Tensor:
        log_q = torch.log_softmax(logits.detach().float(), -1)
        q = log_q.exp()
        total = torch.zeros(len(logits), device=logits.device)
        gradient = torch.zeros((), device=logits.device)
        if "kl" in mix:
            total = total - mix["kl"] * torch.linalg.vecdot(log_q, p.float())
            gradient = gradient + mix["kl"] * (q - p)
        if "tv" in mix:
            apart = q - p
            total = total + 0.5 * mix["tv"] * torch.linalg.vector_norm(apart, 1, -1)
            sign = apart.sign_().mul_(0.5 * mix["tv"])
            gradient = gradient + q * (sign - torch.linalg.vecdot(sign, q)[:, None])
        if "ce" in mix:
            total = total - mix["ce"] * log_q.gather(-1, token[:, None])[:, 0]
            apart = q.clone()
            apart[torch.arange(len(token), device=token.device), token] -= 1.0
            gradient = gradient + mix["ce"] * apart
        ctx.save_for_backward(gradient.to(logits.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None].to(gradient.dtype), None, None, None
