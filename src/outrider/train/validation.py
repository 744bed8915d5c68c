"""What every pupil's guesses are counted by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional

from outrider.train.chains import ChainCount
from outrider.train.texts import Batch

__all__ = ["score"]


def score(count: ChainCount, batch: Batch, logits: Sequence[Tensor], index: Tensor) -> None:
    """Adds a batch to the count. `logits[d - 1]` are those of depth d at every root. [B, A, V] each

    `index` is where target tokens lie in the draft vocabulary. [vocabulary]
    """
    right = []
    for depth, guesses in enumerate(logits, start=1):
        token = index[batch.next_token(depth + 1)]
        right.append((guesses.argmax(-1) == token).cpu().numpy())
        if depth == 1:
            asked = (batch.left > 1) & (token >= 0)
            chosen = guesses[asked].float()
            own = chosen.gather(-1, token[asked][:, None])
            count.add_ranks((chosen > own).sum(-1).tolist())
            count.add_loss(float(functional.cross_entropy(chosen, token[asked], reduction="sum")), int(asked.sum()))
    stacked, left = np.stack(right, -1), batch.left.cpu().numpy()
    for row in range(len(left)):
        roots = left[row] > 0
        count.add(stacked[row][roots], left[row][roots])
