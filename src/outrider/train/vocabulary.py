"""A reduced output vocabulary: the tokens that the target really writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.train.errors import TrainError
from outrider.train.shards import Answer

PROMPT_WEIGHT: Final = 0.1

__all__ = ["choose_tokens", "coverage", "draft_index"]


def choose_tokens(
    answers: Iterable[Answer], vocabulary: int, size: int, always: Sequence[int] = ()
) -> NDArray[np.int64]:
    """The `size` tokens that are most frequent in the answers, ascending; `always` are among them. [size]

    A token of a prompt counts a tenth: answers take up names and words of what they are asked about. Where there are
    fewer kinds, the lowest ids fill up. `size` 0 means the whole vocabulary.
    """
    if size in (0, vocabulary):
        return np.arange(vocabulary)
    if not len(always) <= size < vocabulary:
        raise TrainError(
            f"a draft vocabulary of {size:,} tokens: {max(1, len(always)):,} to {vocabulary:,} are possible"
        )
    counts = np.zeros(vocabulary)
    for answer in answers:
        np.add.at(counts, answer.answer, 1.0)
        np.add.at(counts, answer.prompt, PROMPT_WEIGHT)
    counts[list(always)] = np.inf
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size])


def draft_index(tokens: NDArray[np.int64], vocabulary: int) -> NDArray[np.int64]:
    """Where each target token lies in the draft vocabulary; -1 where it does not. [V]"""
    index = np.full(vocabulary, -1, np.int64)
    index[tokens] = np.arange(len(tokens))
    return index


def coverage(answers: Iterable[Answer], index: NDArray[np.int64]) -> float:
    """Share of the answers' tokens that the draft vocabulary has."""
    inside = total = 0
    for answer in answers:
        inside += int((index[answer.answer] >= 0).sum())
        total += len(answer.answer)
    return inside / max(1, total)
