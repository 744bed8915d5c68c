"""Finds layers that the target can draft without: a short greedy search, nothing is learnt.

Each round leaves out one more layer, the one whose absence changes least what the target would say; how much that is
tells the share of positions where both argmaxes agree on held-out texts (Zhang et al. 2024, Draft & Verify; SWIFT,
Xia et al. 2025, searches for the like on the fly). Which round is best depends on what a guess costs.

Letters: B texts, S positions, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.train.chains import ChainCount
from outrider.train.decoder import Decoder, rms_norm, rotary
from outrider.train.settings import LayerSkipSettings
from outrider.train.shards import Answer

__all__ = ["Skip", "search", "write_skip"]


@dataclass(frozen=True, slots=True)
class Skip:
    """A set of layers to leave out and what it is worth."""

    layers: tuple[int, ...]
    agreement: float  # share of positions where the argmax is the target's own
    length: float  # tokens per step of the best chain
    guesses: int  # of that chain
    speedup: float  # length / (1 + guesses * cost of a guess), as if checking were free; below 1 it loses


def search(
    model: Decoder,
    answers: Sequence[Answer],
    settings: LayerSkipSettings,
    progress: Callable[[int, int, str], None] = lambda step, steps, note: None,
) -> list[Skip]:
    """The best set of each size, from one layer on. `model` is the whole target."""
    texts = _pick(answers, settings.tokens)
    config = model.config
    embedding, layer = config.vocabulary * config.hidden, sum(p.numel() for p in model.layers[0].parameters())
    whole = embedding + config.layers * layer
    with torch.inference_mode():
        run = _Runs(model, texts)
        left_out: tuple[int, ...] = ()
        found: list[Skip] = []
        rounds = int(settings.most * config.layers)
        for number in range(rounds):
            agreement, extra = max(run.without_one_more(left_out))
            left_out = (*left_out, extra)
            cost = (whole - len(left_out) * layer) / whole
            found.append(run.worth(tuple(sorted(left_out)), agreement, cost, settings.depth))
            progress(number + 1, rounds, f"without {list(found[-1].layers)}: {agreement:.3f}")
    return found


def write_skip(folder: Path, found: Sequence[Skip], target_sha256: str, notes: Mapping[str, object]) -> None:
    """Writes `layer_skip.json`: the best set, and those of the other sizes."""
    best = max(found, key=lambda skip: skip.speedup)
    content = {"skip": list(best.layers), "target_sha256": target_sha256, "sets": [asdict(s) for s in found], **notes}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "layer_skip.json.part"
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(folder / "layer_skip.json")


def _pick(answers: Sequence[Answer], tokens: int) -> list[Answer]:
    """Answers at temperature 0 from the front, until there are enough tokens."""
    taken: list[Answer] = []
    for answer in answers:
        if answer.temperature == 0 and len(answer.answer) > 1:
            taken.append(answer)
            tokens -= len(answer.answer)
            if tokens <= 0:
                break
    return taken


class _Runs:
    """The texts through the target with layers left out."""

    def __init__(self, model: Decoder, answers: Sequence[Answer]) -> None:
        self._model = model
        device = model.embed.device
        width = max(len(answer.tokens) for answer in answers)
        self._tokens = torch.zeros(len(answers), width, dtype=torch.long, device=device)
        rows = []
        for row, answer in enumerate(answers):
            self._tokens[row, : len(answer.tokens)] = torch.from_numpy(answer.tokens.astype(np.int64))
            first = len(answer.prompt) - 1
            rows += [(row, t) for t in range(first, first + len(answer.answer))]
        self._rows = torch.tensor(rows, device=device).unbind(1)
        self._counts = [len(answer.answer) for answer in answers]
        self._next = self._tokens[self._rows[0], self._rows[1] + 1]
        self._turn = rotary(model.config, width, device)

    def _embedded(self) -> Tensor:
        return torch.nn.functional.embedding(self._tokens, self._model.embed).float()

    def _rest(self, x: Tensor, first: int, skip: Sequence[int]) -> Tensor:
        """The residual stream behind the layers from `first`, those of `skip` left out. [B, S, D] -> [B, S, D]"""
        for index, layer in enumerate(self._model.layers[first:], start=first):
            if index not in skip:
                x = layer(x, *self._turn)
        return x

    def _right(self, x: Tensor) -> Tensor:
        """Whether the argmax is the target's own token, at every position from which it wrote. [B, S, D] -> [n]"""
        model = self._model
        final = rms_norm(x[self._rows[0], self._rows[1]], model.norm, model.config.norm_eps)
        return model.logits(final).argmax(-1) == self._next

    def without_one_more(self, skip: Sequence[int]) -> Iterator[tuple[float, int]]:
        """Each layer that is still there, with the agreement if it were left out too; what lies below is run once."""
        x = self._embedded()
        for extra, layer in enumerate(self._model.layers):
            if extra not in skip:
                yield float(self._right(self._rest(x, extra + 1, skip)).float().mean()), extra
                x = layer(x, *self._turn)

    def worth(self, skip: tuple[int, ...], agreement: float, cost: float, depth: int) -> Skip:
        """The chain length that pays most if a guess costs `cost` of a step."""
        right = self._right(self._rest(self._embedded(), 0, skip)).cpu().numpy()
        found: list[Skip] = []
        for guesses in range(1, depth + 1):
            count = ChainCount(guesses)
            start = 0
            for size in self._counts:
                # guess d of root t is made at position t + d
                part = np.zeros((size, guesses), bool)
                for d in range(1, guesses + 1):
                    part[: size - d, d - 1] = right[start + d : start + size]
                count.add(part, np.arange(size, 0, -1))
                start += size
            length = count.acceptance().length
            found.append(Skip(skip, agreement, length, guesses, length / (1 + guesses * cost)))
        return max(found, key=lambda skip: skip.speedup)
