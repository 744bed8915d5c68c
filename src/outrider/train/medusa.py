"""Trains Medusa-1 heads (Cai et al. 2024): residual blocks on the frozen target's final state, one projection for all.

At root t, with x the text, head k reads the final state at t and guesses x_{t + 1 + k}: the target itself has drawn
x_{t + 1} from that state.

Letters: B texts, A roots, D hidden size, V tokens of the draft vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.heads import MedusaConfig
from outrider.train.chains import ChainCount
from outrider.train.features import FeatureStore
from outrider.train.loop import Acceptance, Report
from outrider.train.losses import distance, parse_mix
from outrider.train.settings import MedusaSettings
from outrider.train.target import Target
from outrider.train.texts import collate
from outrider.train.validation import score

__all__ = ["MedusaModule", "MedusaPupil"]


class MedusaModule(nn.Module):
    """The heads' weights. Each head has blocks of its own: a list made by repetition would share one."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden, config.draft_vocabulary
        count = config.heads * config.blocks
        self.blocks = nn.ParameterList(nn.Parameter(torch.zeros(hidden, hidden)) for _ in range(count))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(hidden)) for _ in range(count))
        heads = 1 if config.shared_head else config.heads
        self.heads = nn.ParameterList(nn.Parameter(torch.empty(size, hidden)) for _ in range(heads))

    def start(self, target: Target) -> None:
        """First weights: blocks that change nothing, and the target's own head, as the paper has it."""
        with torch.no_grad():
            for head in self.heads:
                head.copy_(target.head)

    def forward(self, state: Tensor, k: int, columns: Tensor | None = None) -> Tensor:
        """Logits of head k, from 0, for all draft tokens or some. [..., D] -> [..., V]"""
        x = state.float()
        for j in range(self.config.blocks):
            number = k * self.config.blocks + j
            x = x + functional.silu(functional.linear(x, self.blocks[number], self.biases[number]))
        head: Tensor = self.heads[0 if self.config.shared_head else k]
        return functional.linear(x, head if columns is None else head[columns])

    def values(self) -> dict[str, NDArray[np.float32]]:
        """The weights under the canonical names of `models.heads`."""
        found: dict[str, Tensor] = {}
        for k in range(self.config.heads):
            for j in range(self.config.blocks):
                number = k * self.config.blocks + j
                found[f"heads.{k}.blocks.{j}"] = self.blocks[number]
                found[f"heads.{k}.blocks.{j}_bias"] = self.biases[number]
            if not self.config.shared_head:
                found[f"heads.{k}.head"] = self.heads[k]
        if self.config.shared_head:
            found["head"] = self.heads[0]
        return {name: p.detach().float().cpu().numpy() for name, p in found.items()}


class MedusaPupil:
    """Medusa heads that learn from a feature store whose last wanted layer is -1."""

    def __init__(
        self,
        module: MedusaModule,
        target: Target,
        store: FeatureStore,
        learn: Sequence[int],
        held: Sequence[int],
        settings: MedusaSettings,
        export: Callable[[Path, Report], None],
        device: str = "cpu",
    ) -> None:
        self.module, self._target, self._store = module, target, store
        self._learn, self._held, self._settings, self._device = list(learn), list(held), settings, device
        self._mix = parse_mix(settings.loss)
        self._export = export

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16, enabled=self._settings.autocast)

    def loss(self, batch: Sequence[int]) -> tuple[Tensor, int]:
        """Mean over the roots of each head, heads weighted by `step_decay`."""
        made = collate(self._store, [self._learn[i] for i in batch], self._device)
        finals = made.states[:, :, -1]
        choice = self._target.narrow(made.tokens, self._settings.others, sum(batch))
        total = torch.zeros((), device=self._device)
        with self._autocast():
            states = made.at_roots(finals)
            laws = self._target.law(states[made.left > 0], choice.columns)
            place = made.flat_roots()
            for k in range(self.module.config.heads):
                token = choice.index[made.next_token(k + 2)]
                rows = (made.left > k + 1) & (token >= 0)
                if not bool(rows.any()):
                    continue
                p = laws[place[rows] + k + 1]
                value = distance(self._mix, self.module(states[rows], k, choice.columns), p, token[rows]).mean()
                total = total + self._settings.step_decay**k * value
        return total, made.answer_tokens

    @torch.no_grad()
    def validate(self) -> Acceptance:
        """Chains of one guess per head from every root of the held-out texts."""
        count = ChainCount(self.module.config.heads)
        for start in range(0, len(self._held), 16):
            made = collate(self._store, self._held[start : start + 16], self._device)
            with self._autocast():
                states = made.at_roots(made.states[:, :, -1])
                logits = [self.module(states, k) for k in range(self.module.config.heads)]
            score(count, made, logits, self._target.index)
        return count.acceptance()

    def export(self, folder: Path, report: Report) -> None:
        self._export(folder, report)
