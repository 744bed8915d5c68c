"""Percentiles of many values, and how far a measured ratio may be off."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Columns", "percentile", "percentiles", "ratio_interval"]

Columns = tuple[Sequence[float], Sequence[float]]  # tokens and seconds by prompt

_PERCENTS = (50, 90, 95, 99)
_RESAMPLES = 2000


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the values lie, linear between neighbours; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, p50, p90, p95 and p99; each None of no values."""
    return {
        "mean": fmean(values) if values else None,
        **{f"p{percent}": percentile(values, percent) for percent in _PERCENTS},
    }


def ratio_interval(over: Sequence[Columns], under: Sequence[Columns]) -> tuple[float, float] | None:
    """The 95 % interval of a ratio of speeds: the product of those in `over` to the product of those in `under`.

    Each speed is given as tokens and seconds of the same n prompts, [n] each. A paired bootstrap: prompts are drawn
    with replacement, each with its times everywhere. It is wide where prompts differ in what they gain, and where times
    scatter. The draws are fixed. None of fewer than three prompts.
    """
    count = len(over[0][0])
    if count < 3:
        return None
    import numpy as np

    rng = np.random.default_rng(0)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)

    def speeds(columns: Columns) -> NDArray[Any]:
        tokens, seconds = (weights @ np.asarray(column, float) for column in columns)
        return np.asarray(tokens / np.maximum(seconds, 1e-12))

    below = np.prod([speeds(columns) for columns in under], axis=0)
    if not below.all():
        return None
    ratios = np.prod([speeds(columns) for columns in over], axis=0) / below
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)
