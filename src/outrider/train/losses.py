"""How far a guess is from the target's law.

Letters: n rows, V tokens of the draft vocabulary. `p` is the target's law on that vocabulary, `q` the draft's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """The mixed loss of each row. [n, V], [n, V], [n] -> [n]"""
    log_q = F.log_softmax(logits.float(), -1)
    total = torch.zeros(len(p), device=p.device)
    for name, weight in mix.items():
        if name == "kl":
            value = torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)
        elif name == "tv":
            value = 0.5 * (p - log_q.exp()).abs().sum(-1)
        else:
            value = -log_q.gather(-1, token[:, None])[:, 0]
        total = total + weight * value
    return total
