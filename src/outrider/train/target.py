"""The frozen parts of a target that its drafters are built on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.models.load import ModelFiles
from outrider.train.vocabulary import draft_index

__all__ = ["Choice", "Target"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Some tokens of the draft vocabulary."""

    columns: Tensor | None  # their draft tokens; None is all
    index: Tensor  # target token -> its column, -1 where it has none [vocabulary]


@dataclass(slots=True)
class Target:
    """Embedding, head and final norm, and the draft vocabulary. D hidden size, V tokens of the draft vocabulary."""

    embed: Tensor  # [vocabulary, D]
    head: Tensor  # [V, D], the rows of the draft vocabulary
    norm: Tensor  # [D]
    tokens: NDArray[np.int64]  # draft token -> target token [V]
    index: Tensor  # target token -> draft token, -1 outside [vocabulary]

    @classmethod
    def of(
        cls, files: ModelFiles, tokens: NDArray[np.int64], dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> Target:
        """The parts of a model, dequantised."""
        config, tensors = files.config, files.tensors
        embed = torch.from_numpy(tensors["embed"].float32())
        head = embed if config.tied_embeddings else torch.from_numpy(tensors["head"].float32())
        return cls(
            embed.to(device, dtype),
            head[torch.from_numpy(tokens)].to(device, dtype),
            torch.from_numpy(tensors["norm"].float32()).to(device),
            tokens,
            torch.from_numpy(draft_index(tokens, config.vocabulary)).to(device),
        )

    def narrow(self, tokens: Tensor, others: int, seed: int) -> Choice:
        """A part of the draft vocabulary to tell guesses apart in: that of a batch's `tokens`, and `others` besides.

        Half of the others have the lowest ids, which are the most frequent tokens of a byte-pair vocabulary, the other
        half is drawn by `seed`. No others at all means the whole draft vocabulary.
        """
        size = len(self.tokens)
        if not 0 < others < size:
            return Choice(None, self.index)
        taken = torch.zeros(size, dtype=torch.bool)
        inside = self.index[tokens.flatten()].cpu()
        taken[inside[inside >= 0]] = True
        taken[: others // 2] = True
        taken[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: others - others // 2]] = True
        columns = taken.nonzero()[:, 0].to(self.index.device)
        place = torch.full((size + 1,), -1, dtype=torch.long, device=columns.device)  # the last stands for no token
        place[columns] = torch.arange(len(columns), device=columns.device)
        return Choice(columns, place[self.index])

    def law(self, final: Tensor, columns: Tensor | None = None) -> Tensor:
        """The target's law on the draft vocabulary, or on some `columns` of it. [n, D] -> [n, V]"""
        with torch.no_grad():
            head = self.head if columns is None else self.head[columns]
            logits = torch.nn.functional.linear(final.to(head.dtype), head)
            return torch.softmax(logits.float(), -1).to(logits.dtype)
