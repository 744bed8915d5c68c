"""Tiny targets and their answers, for the tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outrider.models.load import ModelFiles
from outrider.runtime.reference import ReferenceRunner
from outrider.train.features import FeatureStore, runner_reader
from outrider.train.shards import Answer
from tiny import tiny_model

WANTS = (0, 1, 2)


def target(layers: int = 4, **overrides: object) -> ModelFiles:
    return tiny_model(
        layers=layers, vocabulary=97, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, **overrides
    )


def answers(count: int = 24, seed: int = 0, vocabulary: int = 97) -> list[Answer]:
    """Texts with a pattern that can be learnt: each token follows from the two before it, mostly."""
    rng = np.random.default_rng(seed)
    found = []
    for job in range(count):
        tokens = rng.integers(3, vocabulary, 3).tolist()
        for _ in range(int(rng.integers(16, 30))):
            step = (2 * tokens[-1] + tokens[-2]) % (vocabulary - 3) + 3
            tokens.append(step if rng.random() < 0.9 else int(rng.integers(3, vocabulary)))
        prompt = int(rng.integers(3, 6))
        text = np.array(tokens, np.int32)
        found.append(Answer(job, 0.0 if job % 3 else 0.7, text[:prompt], text[prompt:], False))
    return found


def store(
    files: ModelFiles, texts: list[Answer], folder: Path | None = None, wants: tuple[int, ...] = (*WANTS, -1)
) -> FeatureStore:
    runner = ReferenceRunner(files, cache_tokens=128, page_size=16)
    return FeatureStore(folder, texts, wants, files.config.hidden, runner_reader(runner, wants, chunk=7))
