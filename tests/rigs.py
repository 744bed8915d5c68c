"""Engines over tiny models, and what two results must have in common. For the tests of the promise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from outrider import Engine, Result, SamplingParams
from outrider.models.load import ModelFiles
from outrider.models.tensor import Tensor
from outrider.runtime.load import Loaded, load
from tiny import tensor, tiny_model


@dataclass(frozen=True)
class Rig:
    """How a tiny model is run: everything that must not be seen in the text."""

    runner: str = "reference"
    dtype: str = "fp32"
    kv_dtype: str | None = None
    threads: int = 1
    page_size: int = 16
    cache_tokens: int = 2048


@lru_cache(maxsize=8)
def files(family: str = "llama", seed: int = 0) -> ModelFiles:
    return tiny_model(family=family, seed=seed)


@lru_cache(maxsize=8)
def draft_files(family: str = "llama", seed: int = 0, spread: float = 0.25) -> ModelFiles:
    """The target with noise on its weights: a draft that is right now and then."""
    target = files(family, seed)
    rng = np.random.default_rng(seed + 1)

    def shake(part: Tensor) -> Tensor:
        values = part.float32()
        if values.ndim == 1:
            return part
        noisy = values + spread * values.std() * rng.standard_normal(values.shape, np.float32)
        return tensor(part.name, noisy.astype(np.float32))

    return replace(target, tensors={name: shake(part) for name, part in target.tensors.items()})


def loaded(model: ModelFiles, rig: Rig = Rig()) -> Loaded:
    settings: dict[str, Any] = {"kv_dtype": rig.kv_dtype, "threads": rig.threads} if rig.runner == "native" else {}
    return load(
        model, runner=rig.runner, dtype=rig.dtype, cache_tokens=rig.cache_tokens, page_size=rig.page_size, **settings
    )


def engine(rig: Rig = Rig(), *, family: str = "llama", drafter: str = "none", **settings: Any) -> Engine:
    """An engine over the tiny target; `draft_model` gets the shaken copy as its draft."""
    draft = loaded(draft_files(family), rig) if drafter == "draft_model" else None
    return Engine.from_loaded(loaded(files(family), rig), drafter=drafter, draft=draft, **settings)


def prompts(count: int, vocabulary: int = 97) -> list[list[int]]:
    """Prompts of differing lengths that repeat themselves, so that every drafter has something to say."""
    rng = np.random.default_rng(count)
    out = []
    for i in range(count):
        phrase = rng.integers(3, vocabulary, 5 + i).tolist()
        out.append((phrase * 9)[: 11 + 7 * i])
    return out


def said(result: Result) -> tuple[Any, ...]:
    """All that a caller sees of a text, and that no speculation may change."""
    return (
        result.prompt_tokens,
        result.tokens,
        result.text,
        result.finish_reason,
        result.stop_reason,
        result.logprobs,
        result.prompt_logprobs,
        result.usage.prompt_tokens,
        result.usage.completion_tokens,
        result.seed,
    )


def rejected(results: Iterable[Result]) -> int:
    return sum(result.usage.rejected_prediction_tokens for result in results)


def accepted(results: Iterable[Result]) -> int:
    return sum(result.usage.accepted_prediction_tokens for result in results)


# Every kind of shaping, at the three temperatures of the promise. Seeds are set by the tests.
MIXES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalised": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias={5: 2.0, 9: -4.0},
    ),
    "T 0.7": SamplingParams(temperature=0.7),
    "T 0.7, top-p, penalties": SamplingParams(temperature=0.7, top_p=0.8, frequency_penalty=0.5, presence_penalty=0.1),
    "T 0.7, top-k, bias": SamplingParams(temperature=0.7, top_k=12, logit_bias={7: 3.0, 11: -100}),
    "T 1.3, min-p": SamplingParams(temperature=1.3, min_p=0.05),
    "T 1.3, all of them": SamplingParams(
        temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.4, min_tokens=6
    ),
}


def mix(name: str, seed: int, **changes: Any) -> SamplingParams:
    return replace(MIXES[name], seed=seed, logprobs=2, **{"max_tokens": 24, **changes})
