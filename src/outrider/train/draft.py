"""Distils a small draft model: some layers of the target with its embedding, and a head over fewer tokens.

The draft reads the text alone, as any draft model does; at position t it guesses x_{t + 1}, and is taught the target's
law there.

Letters: B texts, S positions, A roots, D hidden size, V tokens of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.models.config import DecoderConfig
from outrider.train.chains import ChainCount
from outrider.train.decoder import Decoder, causal, rms_norm, rotary
from outrider.train.errors import TrainError
from outrider.train.features import FeatureStore
from outrider.train.loop import Acceptance, Report
from outrider.train.losses import distance, parse_mix
from outrider.train.settings import DraftSettings
from outrider.train.target import Target
from outrider.train.texts import collate
from outrider.train.validation import score

__all__ = ["DraftPupil", "cut_layers", "make_draft"]


def cut_layers(layers: int, settings: DraftSettings) -> tuple[int, ...]:
    """The target layers that the draft begins with, ascending: the first, the last, and some between."""
    chosen = settings.layers or tuple(sorted({round(i) for i in np.linspace(0, layers - 1, settings.count)}))
    if not chosen or min(chosen) < 0 or max(chosen) >= layers or list(chosen) != sorted(set(chosen)):
        raise TrainError(
            f"draft.layers {list(chosen)}: the target has layers 0 to {layers - 1}, each once and in order"
        )
    return chosen


def make_draft(config: DecoderConfig, tensors: Mapping[str, Any], layers: Sequence[int], target: Target) -> Decoder:
    """A decoder of the target's own layers. Its embedding is the target's, and frozen."""
    whole = len(target.tokens) == config.vocabulary and config.tied_embeddings
    made = Decoder(replace(config, layers=len(layers)), None if whole else len(target.tokens))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name == "head":
                parameter.copy_(target.head)
                continue
            source = name
            if name.startswith("layers."):
                _, number, part = name.split(".")
                source = f"layers.{layers[int(number)]}.{part}"
            parameter.copy_(torch.from_numpy(tensors[source].float32()))
    made.embed.requires_grad_(False)
    return made


class DraftPupil:
    """A draft model that learns from a feature store whose last wanted layer is -1."""

    def __init__(
        self,
        module: Decoder,
        target: Target,
        store: FeatureStore,
        learn: Sequence[int],
        held: Sequence[int],
        settings: DraftSettings,
        export: Callable[[Path, Report], None],
        device: str = "cpu",
    ) -> None:
        self.module, self._target, self._store = module, target, store
        self._learn, self._held, self._settings, self._device = list(learn), list(held), settings, device
        self._mix = parse_mix(settings.loss)
        self._export = export

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16, enabled=self._settings.autocast)

    def _finals(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, D]"""
        cosines, sines = rotary(self.module.config, tokens.shape[1], tokens.device)
        x = torch.nn.functional.embedding(tokens, self.module.embed).float()
        for layer in self.module.layers:
            x = layer(x, cosines, sines, causal)
        return rms_norm(x, self.module.norm, self.module.config.norm_eps)

    def loss(self, batch: Sequence[int]) -> tuple[Tensor, int]:
        """Mean over the positions from which the target wrote."""
        made = collate(self._store, [self._learn[i] for i in batch], self._device)
        choice = self._target.narrow(made.tokens, self._settings.others, sum(batch))
        with self._autocast():
            finals = made.at_roots(self._finals(made.tokens))
            token = choice.index[made.next_token(1)]
            rows = (made.left > 0) & (token >= 0)
            p = self._target.law(made.at_roots(made.states[:, :, -1])[rows], choice.columns)
            value = distance(self._mix, self.module.logits(finals[rows], choice.columns), p, token[rows]).mean()
        return value, made.answer_tokens

    @torch.no_grad()
    def validate(self) -> Acceptance:
        """Chains of `depth` guesses from every root of the held-out texts."""
        count = ChainCount(self._settings.depth)
        for start in range(0, len(self._held), 16):
            made = collate(self._store, self._held[start : start + 16], self._device)
            with self._autocast():
                finals = self._finals(made.tokens)
                logits = [self.module.logits(made.at_roots(finals, d)) for d in range(1, self._settings.depth + 1)]
            score(count, made, logits, self._target.index)
        return count.acceptance()

    def values(self) -> dict[str, NDArray[np.float32]]:
        """The weights under canonical names, without the target's embedding."""
        named = self.module.named_parameters()
        return {name: p.detach().float().cpu().numpy() for name, p in named if name != "embed"}

    def export(self, folder: Path, report: Report) -> None:
        self._export(folder, report)
