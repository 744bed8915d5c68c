"""What a draw depends on beside the logits: parameters, seed and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.params import SamplingParams

__all__ = ["Draw", "Shaping"]


@dataclass(slots=True)
class Shaping:
    """One per sequence. `tokens` is the sequence's own list and grows with it.

    A draw at a tree node takes `path`, the guessed tokens from the root's child down to that node: its history is
    `tokens + path`, its absolute position `len(tokens) + len(path)`.
    """

    params: SamplingParams
    seed: int  # [0, 2**64)
    tokens: Sequence[int]  # prompt and committed output
    prompt_length: int
    ends: tuple[int, ...] = ()  # tokens that end the text, kept out before `min_tokens`
    mask: NDArray[np.uint32] | None = field(default=None)  # [ceil(V / 32)] allowed tokens, bit t % 32 of word t // 32
    prepared: Any = field(default=None, init=False, repr=False, compare=False)  # a runner's own form, made once


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token, with the log-probabilities that were asked for (natural log, of the unshaped logits)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest first
