"""Loads a model for running: files, tokenizer and a runner with its cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.params import ParameterError

if TYPE_CHECKING:
    from outrider.models.config import DecoderConfig
    from outrider.models.load import ModelFiles
    from outrider.models.tokenizer import Tokenizer
    from outrider.runtime.runner import Runner

__all__ = ["RUNNERS", "Loaded", "forecast", "load"]

RUNNERS = ("native", "reference")
_REFERENCE_DTYPES = ("auto", "fp32", "fp64")
_REFERENCE_TOKENS = 4096  # whose rows are all written at once
_SEQUENCES = 8  # of full length that fit into a cache of the default size, memory permitting
_SHARE = 4  # a quarter of the machine's memory at most


@dataclass(slots=True)
class Loaded:
    """A model that can be run."""

    runner: Runner
    tokenizer: Tokenizer
    files: ModelFiles


def load(
    model: str | Path | ModelFiles,
    *,
    runner: str = "native",
    dtype: str = "auto",
    head_dtype: str | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
    cache_tokens: int | None = None,
    page_size: int = 64,
) -> Loaded:
    """Opens the model under a name or path, unless it is open already, and packs its weights.

    `dtype`, `head_dtype` and `kv_dtype` are fp32, bf16, int8, int4 (not for the cache) or auto; see
    `runtime.native.NativeRunner`. The reference runner knows fp32 and fp64. `cache_tokens` are the rows of the cache
    (default: eight sequences of the model's context, at most a quarter of the memory).

    Raises ParameterError for a parameter outside its range, ModelError for the model.
    """
    if runner not in RUNNERS:
        raise ParameterError("runner", f"{runner!r} is not one of {', '.join(RUNNERS)}")
    _whole("threads", threads, 1, 1024)
    _whole("cache_tokens", cache_tokens, 1, 2**31 - 1)
    _whole("page_size", page_size, 1, 2**16)
    if runner == "reference":
        _check_reference(dtype, head_dtype=head_dtype, kv_dtype=kv_dtype, threads=threads)
    else:
        _check_native(dtype, head_dtype=head_dtype, kv_dtype=kv_dtype)

    files = _opened(model)
    made: Runner
    if runner == "reference":
        from outrider.runtime.reference import ReferenceRunner

        tokens = cache_tokens or min(files.config.context, _REFERENCE_TOKENS)
        made = ReferenceRunner(files, "fp64" if dtype == "fp64" else "fp32", tokens, page_size)
    else:
        from outrider.runtime.native import NativeRunner

        tokens = cache_tokens or _cache_tokens(files.config)
        made = NativeRunner(files, dtype, head_dtype, kv_dtype, threads, tokens, page_size)
    return Loaded(made, files.tokenizer, files)


def forecast(
    model: str | Path | ModelFiles,
    *,
    runner: str = "native",
    dtype: str = "auto",
    head_dtype: str | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
    cache_tokens: int | None = None,
    page_size: int = 64,
) -> dict[str, int]:
    """Bytes that `load` with the same arguments will hold after a long prompt, by purpose, from shapes alone."""
    files = _opened(model)
    if runner == "reference":
        from outrider.runtime.reference import forecast as reference

        return reference(files, dtype, cache_tokens or min(files.config.context, _REFERENCE_TOKENS), page_size)
    from outrider.runtime.native import forecast as native

    tokens = cache_tokens or _cache_tokens(files.config)
    return native(files, dtype, head_dtype, kv_dtype, threads, cache_tokens=tokens, page_size=page_size)


def _opened(model: str | Path | ModelFiles) -> ModelFiles:
    from outrider.models.load import ModelFiles, open_model
    from outrider.models.registry import resolve

    return model if isinstance(model, ModelFiles) else open_model(resolve(model))


def _check_native(dtype: str, **others: str | None) -> None:
    from outrider.runtime.native import DTYPES, KV_DTYPES

    for name, value in {"dtype": dtype, **others}.items():
        known = KV_DTYPES if name == "kv_dtype" else DTYPES
        if value is not None and value not in known:
            raise ParameterError(name, f"{value!r} is not one of {', '.join(known)}")


def _check_reference(dtype: str, **others: object) -> None:
    if dtype not in _REFERENCE_DTYPES:
        raise ParameterError("dtype", f"{dtype!r}: the reference runner computes in fp32 or fp64")
    for name, value in others.items():
        if value is not None:
            raise ParameterError(name, "the reference runner has no such choice: leave it out, or take runner native")


def _whole(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"{value!r} is not a whole number")
    if not low <= value <= high:
        raise ParameterError(name, f"{value!r} is outside [{low:,}, {high:,}]")


def _cache_tokens(config: DecoderConfig) -> int:
    """Rows of a cache of the default size; counted in fp32, the largest format."""
    row = config.layers * config.kv_heads * config.head_dim * 2 * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(_SEQUENCES * config.context, memory // _SHARE // row))
