"""What a draw depends on beside the logits: parameters, seed and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.params import SamplingParams

__all__ = ["Draw", "Masks", "Shaping"]


class Masks(Protocol):
    """What form the text must have: `engine.grammar.Grammar`."""

    def mask(self, path: Sequence[int] = ()) -> NDArray[np.uint32] | None:
        """The tokens that may follow the text and `path`; None if all may."""
        ...


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
    grammar: Masks | None = None  # says the mask of each node by itself
    prepared: Any = field(default=None, init=False, repr=False, compare=False)  # a runner's own form, made once

    def mask_after(self, path: Sequence[int]) -> NDArray[np.uint32] | None:
        """The tokens that may come after `path`; None if all may. [ceil(V / 32)]"""
        return self.mask if self.grammar is None else self.grammar.mask(path)


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token, with the log-probabilities that were asked for (natural log, of the unshaped logits)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest first
