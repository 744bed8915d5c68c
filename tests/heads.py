"""Random EAGLE heads over tiny targets, in the layouts in which heads are published."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from outrider.models.heads import (
    Eagle,
    EagleConfig,
    Medusa,
    MedusaConfig,
    eagle_shapes,
    medusa_shapes,
    read_head,
    write_eagle,
    write_medusa,
)
from outrider.models.load import ModelFiles
from outrider.models.ngrams import write_ngrams
from rigs import files


@lru_cache(maxsize=1)
def head_folder() -> Path:
    """A random EAGLE-3 head for the tiny target of the rigs, on disk until the process ends."""
    return kept(eagle3)


def kept(make: Callable[[Path, ModelFiles], object]) -> Path:
    """The folder that `make` fills for the tiny target."""
    folder = TemporaryDirectory(prefix="outrider-head-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "head"
    make(path, files())
    return path


def eagle3(
    folder: Path, target: ModelFiles, *, size: int = 60, kind: str = "F32", seed: int = 0, **changes: object
) -> Eagle:
    """A random EAGLE-3 head that guesses `size` tokens, written and read."""
    decoder = replace(target.config, layers=1, tied_embeddings=False, qkv_bias=False, qk_norm=False)
    last = target.config.layers - 1
    config = EagleConfig(3, decoder, size, (0, last // 2, last), **changes)  # type: ignore[arg-type]
    tokens = np.sort(np.random.default_rng(seed).choice(target.config.vocabulary, size, replace=False))
    write_eagle(folder, config, values(eagle_shapes(config), seed), tokens, target="tiny", kind=kind)
    head = read_head(folder, target.config)
    assert isinstance(head, Eagle)
    return head


@lru_cache(maxsize=1)
def medusa_folder() -> Path:
    """Random Medusa heads for the tiny target of the rigs, on disk until the process ends."""
    return kept(medusa)


def medusa(
    folder: Path, target: ModelFiles, *, size: int = 60, kind: str = "F32", seed: int = 0, **changes: object
) -> Medusa:
    """Random Medusa heads that guess `size` tokens, written and read."""
    settings: dict[str, object] = {"heads": 3, "blocks": 1, "shared_head": True, **changes}
    config = MedusaConfig(
        hidden=target.config.hidden,
        vocabulary=target.config.vocabulary,
        draft_vocabulary=size,
        **settings,  # type: ignore[arg-type]
    )
    tokens = np.sort(np.random.default_rng(seed).choice(target.config.vocabulary, size, replace=False))
    write_medusa(folder, config, values(medusa_shapes(config), seed), tokens, target="tiny", kind=kind)
    heads = read_head(folder, target.config)
    assert isinstance(heads, Medusa)
    return heads


@lru_cache(maxsize=1)
def ngrams_folder() -> Path:
    """Random rows for each token of the tiny target, and for some pairs, on disk until the process ends."""
    return kept(ngrams)


def ngrams(folder: Path, target: ModelFiles, *, seed: int = 0) -> None:
    rng, vocabulary = np.random.default_rng(seed), target.config.vocabulary

    def row() -> list[tuple[int, float]]:
        return [(int(token), 0.3 / (rank + 1)) for rank, token in enumerate(rng.choice(vocabulary, 6, replace=False))]

    single = {(token,): row() for token in range(vocabulary)}
    pairs = {(int(a), int(b)): row() for a, b in rng.integers(vocabulary, size=(200, 2))}
    write_ngrams(folder, [single, pairs], {"target_sha256": target.sha256()})


def values(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (
            1 + 0.1 * rng.standard_normal(shape)
            if len(shape) == 1
            else rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
