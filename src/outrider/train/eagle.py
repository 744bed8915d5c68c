"""Trains an EAGLE-3 head (Li et al. 2025): a fused state of three layers, one decoder layer, a reduced vocabulary.

Training-time test, unrolled over `steps` guesses. At root t, with x the text:

    step 1 reads (embedding of x_{t+1}, fc(states at t))          and guesses x_{t+2}
    step s reads (embedding of x_{t+s}, its own output of step s-1) and guesses x_{t+s+1}

    keys that step s of root t sees:   real-feature keys of positions 0 ... t  |  its own keys of steps 2 ... s

which is what it will see when it drafts a chain of its own guesses after t, if all of them hold.

Letters: B texts, S positions, A roots, D hidden size, d head size, V tokens of the draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.heads import EagleConfig
from outrider.train.chains import ChainCount
from outrider.train.decoder import rms_norm, rotary, rotate
from outrider.train.features import FeatureStore
from outrider.train.loop import Acceptance, Report
from outrider.train.losses import distance, parse_mix
from outrider.train.settings import EagleSettings
from outrider.train.target import Target
from outrider.train.texts import Batch, collate
from outrider.train.validation import score

PASSING = {"fc": 0.3, "o": 0.15, "down": 0.15}  # first weights that let what they are added to pass, by their share

__all__ = ["EagleModule", "EaglePupil"]


class EagleModule(nn.Module):
    """The head's own weights, under their canonical names."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        hidden, dim = decoder.hidden, decoder.head_dim
        queries, keys = decoder.heads * dim, decoder.kv_heads * dim

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns))

        def vector(size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(size))

        self.fc = matrix(hidden, len(config.wants) * hidden)
        self.input_norm = vector(len(config.wants) * hidden) if config.norm_before_fc else None
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = (vector(hidden) for _ in range(4))
        self.q, self.k, self.v = (matrix(rows, 2 * hidden) for rows in (queries, keys, keys))
        self.o = matrix(hidden, queries)
        self.gate, self.up = (matrix(decoder.intermediate, hidden) for _ in range(2))
        self.down = matrix(hidden, decoder.intermediate)
        self.head = matrix(config.draft_vocabulary, hidden)

    def start(self, target: Target, states: Tensor, seed: int) -> None:
        """First weights: what comes out is nearly the latest of the `states`, read by the target's own norm and head.

        Such a head guesses about as the target's layers so far would, and has only to learn what comes next. The other
        weights are small and random. Each number of the states weighs the same at first: a target's late states are
        twenty times as large as its early ones, and a few of their numbers a hundred times as large as the others, so
        that one norm over all of them leaves little of the early ones. [n, W, D]
        """
        generator = torch.Generator().manual_seed(seed)
        hidden = self.config.decoder.hidden
        flat = states.flatten(-2).float()
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    scale = PASSING.get(name, 1.0) / math.sqrt(p.shape[1])
                    p.copy_(torch.randn(p.shape, generator=generator) * scale)
            through = torch.ones(hidden)
            if self.input_norm is not None:
                normed = rms_norm(flat, torch.ones_like(self.input_norm), self.config.decoder.norm_eps)
                size = normed.std(0).clamp(min=1e-3)
                self.input_norm.copy_(1 / size)
                through = size[-hidden:]
            self.fc[:, -hidden:] += torch.diag(through)
            self.head.copy_(target.head)
            self.norm.copy_(target.norm)

    def values(self) -> dict[str, NDArray[np.float32]]:
        """The weights under the canonical names of `models.heads`."""
        top = ("fc", "input_norm", "norm", "head")
        return {
            name if name in top else f"layers.0.{name}": p.detach().float().cpu().numpy()
            for name, p in self.named_parameters()
        }

    def fuse(self, states: Tensor) -> Tensor:
        """[..., W, D] -> [..., D]"""
        flat = states.flatten(-2).float()
        if self.input_norm is not None:
            flat = rms_norm(flat, self.input_norm, self.config.decoder.norm_eps)
        return functional.linear(flat, self.fc)

    def read(self, embedding: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections read, and the residual. [..., D] twice -> [..., 2D], [..., D]"""
        eps = self.config.decoder.norm_eps
        normed = rms_norm(x, self.hidden_norm, eps)
        both = torch.cat((rms_norm(embedding, self.embed_norm, eps), normed), -1)
        return both, (normed if self.config.norm_before_residual else x.float())

    def heads(self, both: Tensor, weight: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[B, T, 2D] -> [B, heads, T, d], rotated where `turn` has cosines and sines"""
        flat = functional.linear(both, weight)
        out = flat.view(*flat.shape[:2], -1, self.config.decoder.head_dim).transpose(1, 2)
        return out if turn is None else rotate(out, *turn)

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """The rest of the layer after attention. [B, heads, T, d], [B, T, D] -> [B, T, D]"""
        x = residual + functional.linear(mixed.transpose(1, 2).flatten(2), self.o)
        normed = rms_norm(x, self.mlp_norm, self.config.decoder.norm_eps)
        return x + functional.linear(
            functional.silu(functional.linear(normed, self.gate)) * functional.linear(normed, self.up), self.down
        )

    def logits(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """Of all draft tokens, or of some. [..., D] -> [..., V]"""
        head = self.head if columns is None else self.head[columns]
        return functional.linear(rms_norm(x, self.norm, self.config.decoder.norm_eps), head)

    def unroll(self, batch: Batch, embed: Tensor, steps: int, first: int = 0, stride: int = 1) -> list[Tensor]:
        """The outputs of each step: of the first one at every root, of the others at every `stride`-th from `first`.

        `steps` times [B, A, D], or [B, A', D]
        """
        config = self.config.decoder
        group = config.heads // config.kv_heads
        width = batch.tokens.shape[1]
        cosines, sines = rotary(config, width + steps, batch.tokens.device)
        states = batch.states[:, :, : len(self.config.wants)]
        # the token after each position; the last position of a text is no root and nobody's key
        after = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), 1)
        x = self.fuse(states)
        both, residual = self.read(functional.embedding(after, embed), x)
        keys = self.heads(both, self.k, (cosines[:width], sines[:width]))
        values = self.heads(both, self.v)
        # queries, MLP and head are only wanted at the roots
        both, residual = batch.at_roots(both), batch.at_roots(residual)
        seen = torch.arange(width, device=keys.device) <= batch.roots[..., None]  # [B, A, S]
        own: list[tuple[Tensor, Tensor]] = []
        found: list[Tensor] = []
        for step in range(1, steps + 1):
            if step == 2:
                batch, seen = batch.some_roots(first, stride), seen[:, first::stride]
            place = batch.roots + step - 1
            turn = (cosines[place][:, None], sines[place][:, None])
            if step > 1:
                before = found[-1][:, first::stride] if step == 2 else found[-1]
                both, residual = self.read(functional.embedding(batch.next_token(step), embed), before)
                own.append((self.heads(both, self.k, turn), self.heads(both, self.v)))
            queries = self.heads(both, self.q, turn)
            queries = queries.reshape(len(queries), config.kv_heads, group, -1, config.head_dim)
            mixed = _attend(queries, keys, values, seen, own)
            found.append(self.finish(mixed, residual))
        return found


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of each root over the keys it sees and then its own ones, one softmax over both.

    [B, kv, g, A, d], [B, kv, S, d] twice, [B, A, S], own [B, kv, A, d] twice each -> [B, kv * g, A, d]
    """
    batch, kv, group, roots, dim = queries.shape
    scale = dim**-0.5
    flat = queries.flatten(2, 3)  # heads that share a key are rows of one block
    scores = torch.matmul(flat, keys.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, kv, group, roots, -1)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    width = scores.shape[-1]
    if own:
        extra = torch.stack([(queries * k[:, :, None]).float().sum(-1) for k, _ in own], -1) * scale
        scores = torch.cat((scores, extra), -1)
    law = torch.softmax(scores, -1).to(values.dtype)
    mixed = torch.matmul(law[..., :width].flatten(2, 3), values).view(batch, kv, group, roots, dim)
    for number, (_, v) in enumerate(own):
        mixed = mixed + law[..., width + number, None] * v[:, :, None]
    return mixed.view(batch, kv * group, roots, dim)


class EaglePupil:
    """An EAGLE-3 head that learns from a feature store. Its last wanted layer is -1, for the target's law."""

    def __init__(
        self,
        module: EagleModule,
        target: Target,
        store: FeatureStore,
        learn: Sequence[int],
        held: Sequence[int],
        settings: EagleSettings,
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
        """Mean over the roots of each step, steps weighted by `step_decay`."""
        made = collate(self._store, [self._learn[i] for i in batch], self._device)
        stride = self._settings.stride
        first = sum(batch) % stride  # each root has its turn, and a resumed run the same ones
        choice = self._target.narrow(made.tokens, self._settings.others, sum(batch))
        total = torch.zeros((), device=self._device)
        with self._autocast():
            outputs = self.module.unroll(made, self._target.embed, self._settings.steps, first, stride)
            laws = self._target.law(made.at_roots(made.states[:, :, -1])[made.left > 0], choice.columns)
            place, some = made.flat_roots(), made
            for step, output in enumerate(outputs, start=1):
                if step == 2:
                    place, some = place[:, first::stride], made.some_roots(first, stride)
                token = choice.index[some.next_token(step + 1)]
                rows = (some.left > step) & (token >= 0)
                if not bool(rows.any()):
                    continue
                # the law at t + step is that of the root `step` places further on
                p = laws[place[rows] + step]
                value = distance(self._mix, self.module.logits(output[rows], choice.columns), p, token[rows]).mean()
                total = total + self._settings.step_decay ** (step - 1) * value
        return total, made.answer_tokens

    @torch.no_grad()
    def validate(self) -> Acceptance:
        """Chains of `depth` guesses from every root of the held-out texts."""
        count = ChainCount(self._settings.depth)
        for start in range(0, len(self._held), 16):
            with self._autocast():
                made = collate(self._store, self._held[start : start + 16], self._device)
                outputs = self.module.unroll(made, self._target.embed, self._settings.depth)
            logits = []
            for output in outputs:
                with self._autocast():
                    logits.append(self.module.logits(output))
            score(count, made, logits, self._target.index)
        return count.acceptance()

    def export(self, folder: Path, report: Report) -> None:
        self._export(folder, report)
