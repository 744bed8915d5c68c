"""The benchmark: drafters in turn on the same prompts, equality with plain decoding before speed.

Pure functions around one call, `generate(drafter, prompts) -> results`, so that a test can run them on an engine that
lies.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from outrider.bench.prompts import Prompt
from outrider.engine.results import Result, TokenLogprobs

__all__ = [
    "BASELINE",
    "Difference",
    "Measured",
    "acceptance_by_position",
    "difference",
    "differences",
    "mean_acceptance_length",
    "measure",
    "percentile",
    "summarise",
    "with_baseline",
]

BASELINE = "none"

Generate = Callable[[str, Sequence[Prompt]], list[Result]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt's result under one drafter. `seconds` is its share of the wall time of its batch."""

    prompt: Prompt
    result: Result
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a drafter's result is not plain decoding's. A side that has ended there is None."""

    drafter: str
    prompt: int  # from 0
    line: int  # in the prompt file
    position: int  # index in the output
    what: str  # tokens, logprobs, finish_reason, text
    plain: Any
    drafted: Any

    def __str__(self) -> str:
        return (
            f"{self.drafter}: prompt {self.prompt} (line {self.line}), position {self.position}, {self.what}: "
            f"{self.drafted!r} instead of {self.plain!r}"
        )


def with_baseline(drafters: Iterable[str]) -> list[str]:
    """The drafters without repetition, plain decoding first."""
    return list(dict.fromkeys([BASELINE, *drafters]))


def measure(
    generate: Generate,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 1,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, list[Result]], None] = lambda drafter, results: None,
) -> dict[str, list[Measured]]:
    """Run every drafter on every prompt and return what each wrote, with the median time of `repeat` runs.

    The drafters take turns on each batch, and another one begins each time, so that a machine that slows down or warms
    up favours none. A repeated run that differs from the first one stands in its place, so that `differences` finds it.
    """
    out: dict[str, list[Measured]] = {drafter: [] for drafter in drafters}
    for number, start in enumerate(range(0, len(prompts), batch_size)):
        batch = prompts[start : start + batch_size]
        turn = number % len(drafters)
        for drafter in [*drafters[turn:], *drafters[:turn]]:
            walls: list[float] = []
            kept: list[Result] = []
            for _ in range(repeat):
                began = clock()
                results = generate(drafter, batch)
                walls.append(clock() - began)
                progress(drafter, results)
                if not kept or any(difference(a, b) for a, b in zip(kept, results, strict=True)):
                    kept = results
            tokens = sum(len(result.tokens) for result in kept)
            out[drafter] += [
                Measured(prompt, result, median(walls) * len(result.tokens) / tokens if tokens else 0.0)
                for prompt, result in zip(batch, kept, strict=True)
            ]
    return out


def differences(drafter: str, baseline: Sequence[Measured], measured: Sequence[Measured]) -> list[Difference]:
    """The first difference of each prompt whose result is not the baseline's."""
    out: list[Difference] = []
    for index, (plain, drafted) in enumerate(zip(baseline, measured, strict=True)):
        found = difference(plain.result, drafted.result)
        if found is not None:
            position, what, expected, got = found
            out.append(Difference(drafter, index, plain.prompt.line, position, what, expected, got))
    return out


def difference(plain: Result, drafted: Result) -> tuple[int, str, Any, Any] | None:
    """The first difference in tokens or logprobs, else in how the text ends: position, kind, both sides; or None."""
    for position, (a, b) in enumerate(_padded(plain.tokens, drafted.tokens)):
        if a != b:
            return position, "tokens", a, b
    if (plain.logprobs is None) != (drafted.logprobs is None):
        return 0, "logprobs", plain.logprobs, drafted.logprobs
    entries: Iterator[tuple[TokenLogprobs | None, TokenLogprobs | None]] = _padded(
        plain.logprobs or [], drafted.logprobs or []
    )
    for position, (one, other) in enumerate(entries):
        if one != other:
            return position, "logprobs", one, other
    end = len(plain.tokens)
    if plain.finish_reason != drafted.finish_reason:
        return end, "finish_reason", plain.finish_reason, drafted.finish_reason
    if plain.text != drafted.text:
        return end, "text", plain.text, drafted.text
    return None


def _padded(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for index in range(max(len(a), len(b))):
        yield (a[index] if index < len(a) else None), (b[index] if index < len(b) else None)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the values lie, linear between neighbours; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean_acceptance_length(results: Sequence[Result]) -> float:
    """Committed tokens per forward of the target: 1 + accepted / forwards."""
    steps = [step for result in results for step in result.steps]
    return 1 + sum(step.accepted for step in steps) / len(steps) if steps else 1.0


def acceptance_by_position(results: Sequence[Result]) -> list[float]:
    """For each depth, the share of all drafts in which the guess at that depth was accepted."""
    drafts = [step for result in results for step in result.steps if step.drafted]
    deepest = max((step.depth for step in drafts), default=0)
    return [sum(step.accepted > depth for step in drafts) / len(drafts) for depth in range(deepest)]


def summarise(
    drafter: str,
    dtype: str,
    measured: Sequence[Measured],
    baseline: Sequence[Measured],
) -> dict[str, Any]:
    """One entry of the report's `runs`. Times in milliseconds, speeds in committed tokens per second of wall time."""
    found = differences(drafter, baseline, measured)
    differing = {entry.prompt for entry in found}
    results = [entry.result for entry in measured]
    groups: Mapping[str, list[int]] = _by_category(measured)
    return {
        "drafter": drafter,
        "dtype": dtype,
        **_totals(measured, baseline, differing, range(len(measured))),
        "acceptance_by_position": acceptance_by_position(results),
        "ttft_ms": _spread([1000 * result.ttft for result in results]),
        "tpot_ms": _spread(
            [
                1000 * (result.seconds - result.ttft) / (len(result.tokens) - 1)
                for result in results
                if len(result.tokens) > 1
            ]
        ),
        "by_category": {name: _totals(measured, baseline, differing, indices) for name, indices in groups.items()},
        "differences": [asdict(entry) for entry in found],
    }


def _totals(
    measured: Sequence[Measured], baseline: Sequence[Measured], differing: set[int], indices: Iterable[int]
) -> dict[str, Any]:
    chosen = list(indices)
    speed = _speed([measured[i] for i in chosen])
    plain = _speed([baseline[i] for i in chosen])
    return {
        "prompts": len(chosen),
        "identical": sum(i not in differing for i in chosen),
        "tokens": sum(len(measured[i].result.tokens) for i in chosen),
        "tokens_per_second": speed,
        "speedup": speed / plain if plain else None,
        "mean_acceptance_length": mean_acceptance_length([measured[i].result for i in chosen]),
    }


def _speed(measured: Sequence[Measured]) -> float:
    seconds = sum(entry.seconds for entry in measured)
    return sum(len(entry.result.tokens) for entry in measured) / seconds if seconds else 0.0


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 50), "p95": percentile(values, 95)}


def _by_category(measured: Sequence[Measured]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(measured):
        groups[entry.prompt.category or "uncategorised"].append(index)
    return dict(groups)
