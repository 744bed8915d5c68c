"""The frozen parts of a target that its drafters are built on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.models.load import ModelFiles
from outrider.train.vocabulary import draft_index

__all__ = ["Target"]


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

    def law(self, final: Tensor) -> Tensor:
        """The target's law on the draft vocabulary, from its final state. [n, D] -> [n, V]"""
        with torch.no_grad():
            logits = torch.nn.functional.linear(final.to(self.head.dtype), self.head)
            return torch.softmax(logits.float(), -1).to(logits.dtype)
