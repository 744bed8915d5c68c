"""The texts of a training: which answers are learnt from, which are held out, and a batch of them as tensors.

    text:    prompt p_0 ... p_{m-1} | answer a_0 ... a_{k-1}        tokens x_0 ... x_{n-1}
    roots:   positions t = m-1 ... n-2 whose next token x_{t+1} is the target's own

At a root t the drafter knows the states up to t and the token x_{t+1}, and guesses x_{t+2}, x_{t+3} ...

Letters: B texts, S padded positions, A padded roots, W layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.train.errors import TrainError
from outrider.train.features import FeatureStore
from outrider.train.shards import Answer

__all__ = ["Batch", "collate", "split"]


@dataclass(slots=True)
class Batch:
    """Texts of like length, padded on the right."""

    tokens: Tensor  # [B, S] int64
    states: Tensor  # [B, S, W, D] bfloat16
    roots: Tensor  # [B, A] positions t; padding repeats the first root
    left: Tensor  # [B, A] how many tokens come after position t; 0 for padding

    def next_token(self, ahead: int) -> Tensor:
        """x_{t + ahead} at every root; beyond the end, the last token of the row. [B, A]"""
        return torch.gather(self.tokens, 1, (self.roots + ahead).clamp(max=self.tokens.shape[1] - 1))

    def at_roots(self, values: Tensor, ahead: int = 0) -> Tensor:
        """Rows of [B, S, D] at t + ahead. [B, A, D]"""
        index = (self.roots + ahead).clamp(max=values.shape[1] - 1)
        return torch.gather(values, 1, index[..., None].expand(-1, -1, values.shape[2]))

    def some_roots(self, first: int, stride: int) -> Batch:
        """The same texts with every `stride`-th root alone, from the one at `first`."""
        return replace(self, roots=self.roots[:, first::stride], left=self.left[:, first::stride])

    def flat_roots(self) -> Tensor:
        """The number of each root among all of the batch, padding left out. [B, A]"""
        real = self.left > 0
        return (real.flatten().cumsum(0) - 1).view(real.shape)

    @property
    def answer_tokens(self) -> int:
        return int((self.left > 0).sum())


def split(answers: Sequence[Answer], share: float, most: int = 96) -> tuple[list[int], list[int]]:
    """Indexes of the answers to learn from, and of those held out for validation.

    All answers to one prompt fall on one side, by a hash of the prompt. Held-out ones count at temperature 0 only:
    there the text is what the target says and not what it drew. `most` of them are taken, from all over the list.
    Raises TrainError if either side is empty.
    """
    import zlib

    learn: list[int] = []
    held: list[int] = []
    for index, answer in enumerate(answers):
        if len(answer.answer) < 2:
            continue
        if zlib.crc32(answer.prompt.tobytes()) / 2**32 >= share:
            learn.append(index)
        elif answer.temperature == 0:
            held.append(index)
    if not learn or not held:
        raise TrainError(
            f"{len(answers)} answers give {len(learn)} to learn from and {len(held)} to validate with: write more"
        )
    return learn, held[:: -(-len(held) // most)]


def collate(store: FeatureStore, indexes: Sequence[int], device: str = "cpu") -> Batch:
    """The batch of these answers."""
    states = store.get(indexes)
    answers = [store.answers[i] for i in indexes]
    texts = [answer.tokens for answer in answers]
    width = max(len(text) for text in texts)
    most = max(len(answer.answer) for answer in answers)
    tokens = np.zeros((len(texts), width), np.int64)
    padded = np.zeros((len(texts), width, *store.shape), np.uint16)
    roots = np.zeros((len(texts), most), np.int64)
    left = np.zeros((len(texts), most), np.int64)
    for row, (text, answer, state) in enumerate(zip(texts, answers, states, strict=True)):
        tokens[row, : len(text)] = text
        padded[row, : len(text)] = state
        first, count = len(answer.prompt) - 1, len(answer.answer)
        roots[row] = first
        roots[row, :count] = np.arange(first, first + count)
        left[row, :count] = len(text) - 1 - roots[row, :count]
    return Batch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(padded).view(torch.bfloat16).to(device),
        torch.from_numpy(roots).to(device),
        torch.from_numpy(left).to(device),
    )
