"""core/sampling.py on the native core: the same functions, tokens and log-probabilities, fast enough for every node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider import _native
from outrider.core import noise
from outrider.core.shaping import Draw, Shaping

__all__ = ["describe", "draw", "draw_children", "gumbel", "law", "log_softmax", "prepared", "ranked", "top"]

Logits = NDArray[np.float32]  # [V], contiguous


def prepared(shaping: Shaping) -> _native.NativeShaping:
    """The native form of a sequence's parameters. Made at its first draw; `mask` and `tokens` are read at each."""
    prepared: _native.NativeShaping | None = shaping.prepared
    if prepared is None:
        params = shaping.params
        prepared = shaping.prepared = _native.NativeShaping(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            bias=list(params.logit_bias.items()),
            min_tokens=params.min_tokens,
            ends=list(shaping.ends),
            seed=shaping.seed,
            prompt_length=shaping.prompt_length,
            logprobs=-1 if params.logprobs is None else params.logprobs,
        )
    return prepared


def draw(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> Draw:
    """The target's own token after this row, at position len(shaping.tokens) + len(path). Raises DrawError."""
    tokens = shaping.tokens
    return Draw(*prepared(shaping).draw(logits, len(tokens) + len(path), path, tokens, shaping.mask_after(path)))


def law(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> NDArray[np.float64]:
    """The distribution of `draw` over seeds; a point mass at T = 0. [V]"""
    tokens, mask = shaping.tokens, shaping.mask_after(path)
    p: NDArray[np.float64] = prepared(shaping).law(logits, len(tokens) + len(path), path, tokens, mask)
    return p


def top(
    logits: Logits, k: int, shaping: Shaping | None = None, path: Sequence[int] = ()
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k tokens that `draw` would give first, second ..., with log-probabilities; see core.sampling.top. [k], [k]"""
    best: tuple[NDArray[np.int32], NDArray[np.float32]]
    if shaping is None:
        best = _native.top(logits, k)
    else:
        tokens = shaping.tokens
        best = prepared(shaping).top(logits, k, len(tokens) + len(path), path, tokens, shaping.mask_after(path))
    return best


def ranked(
    logits: Logits,
    k: int,
    shaping: Shaping,
    path: Sequence[int] = (),
    known: NDArray[np.int32] | None = None,
    vocabulary: int | None = None,
) -> tuple[tuple[int, float], ...]:
    """What `draw` would give first, second ... if it saw a draft's row, and how sure it is: core.sampling.ranked."""
    tokens, size = shaping.tokens, len(logits) if vocabulary is None else vocabulary
    place = len(tokens) + len(path)
    return prepared(shaping).ranked(logits, known, size, k, place, path, tokens, shaping.mask_after(path))


def log_softmax(logits: Logits, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Natural-log probabilities of `tokens` under the plain logits. [len(tokens)]"""
    out: NDArray[np.float64] = _native.log_softmax(logits, tokens)
    return out


def describe(logits: Logits, token: int, k: int) -> Draw:
    """`token` with its log-probability and the k likeliest, as `draw` gives them. Raises DrawError."""
    best = top(logits, max(k, 1))[0][:k].tolist()  # it also checks the logits
    values = log_softmax(logits, [token, *best]).tolist()
    return Draw(token, values[0], tuple(zip(best, values[1:], strict=True)))


def draw_children(q: NDArray[np.float64], count: int, seed: int, position: int) -> tuple[int, ...]:
    """core.verify.draw_children with the noise of a position's DRAFT stream: siblings for rejection sampling. [V]"""
    tokens: tuple[int, ...] = _native.draw_children(q, count, seed & 0xFFFFFFFFFFFFFFFF, position, noise.DRAFT)
    return tokens


def gumbel(seed: int, position: int, count: int, stream: int) -> NDArray[np.float64]:
    """core.noise.gumbel of tokens 0 ... count - 1, for drafters that draw siblings from a law. [count]"""
    out: NDArray[np.float64] = _native.gumbel(seed & 0xFFFFFFFFFFFFFFFF, position, count, stream)
    return out
