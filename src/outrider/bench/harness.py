"""The benchmark of an engine: contenders in turn on the same prompts, equality with plain decoding before speed.

Pure functions around one call, `generate(contender, prompts) -> results`, so that a test can run them on an engine that
lies.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, TypeVar

from outrider.bench.prompts import Prompt
from outrider.bench.spread import percentiles, ratio_interval
from outrider.engine.results import Result, TokenLogprobs

__all__ = [
    "BASELINE",
    "Contender",
    "Difference",
    "Measured",
    "acceptance_by_position",
    "acceptance_rate",
    "contenders",
    "difference",
    "differences",
    "mean_acceptance_length",
    "measure",
    "summarise",
]

BASELINE = "none"

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Contender:
    """What is measured: a drafter at a temperature under a rule of verification."""

    drafter: str
    temperature: float = 0.0
    verify: Literal["match", "rejection"] = "match"

    @property
    def exact(self) -> bool:
        """Whether its texts must be plain decoding's. Rejection sampling keeps the distribution alone."""
        return self.drafter == BASELINE or self.verify == "match" or self.temperature == 0

    @property
    def baseline(self) -> Contender:
        return Contender(BASELINE, self.temperature)

    def __str__(self) -> str:
        return self.drafter if self.temperature == 0 else f"{self.drafter} T={self.temperature:g} {self.verify}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt's result. `seconds` is its share of the wall time of its batch: the median of `walls`, one a run."""

    prompt: Prompt
    result: Result
    seconds: float
    walls: tuple[float, ...] = field(default=())


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


def contenders(
    drafters: Iterable[str],
    temperatures: Iterable[float] = (0.0,),
    rules: Iterable[Literal["match", "rejection"]] = ("match",),
) -> list[Contender]:
    """Each drafter at each temperature under each rule, without repetition; plain decoding first at each temperature.

    At temperature 0 both rules keep the same guesses, so one of them is enough.
    """
    names, checks = list(dict.fromkeys(drafters)), list(dict.fromkeys(rules))
    out: list[Contender] = []
    for temperature in dict.fromkeys(temperatures):
        out.append(Contender(BASELINE, temperature))
        for rule in checks[:1] if temperature == 0 else checks:
            out += [Contender(name, temperature, rule) for name in names if name != BASELINE]
    return out


def measure(
    generate: Callable[[K, Sequence[Prompt]], list[Result]],
    contenders: Sequence[K],
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 1,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[K, list[Result], float], None] = lambda contender, results, seconds: None,
) -> dict[K, list[Measured]]:
    """Run every contender on every prompt and return what each wrote, with the median time of `repeat` runs.

    The contenders take turns on each batch, and another one begins each time, so that a machine that slows down or
    warms up favours none. A repeated run that differs from the first one stands in its place, so that `differences`
    finds it. `progress` hears of each batch, with its seconds.
    """
    out: dict[K, list[Measured]] = {contender: [] for contender in contenders}
    for number, start in enumerate(range(0, len(prompts), batch_size)):
        batch = prompts[start : start + batch_size]
        kept: dict[K, list[Result]] = {}
        walls: dict[K, list[float]] = {contender: [] for contender in contenders}
        for run in range(repeat):
            turn = (number + run) % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                began = clock()
                results = generate(contender, batch)
                walls[contender].append(clock() - began)
                progress(contender, results, walls[contender][-1])
                if contender not in kept or any(map(difference, kept[contender], results)):
                    kept[contender] = results
        for contender in contenders:
            out[contender] += _shared(batch, kept[contender], walls[contender])
    return out


def _shared(batch: Sequence[Prompt], results: Sequence[Result], walls: Sequence[float]) -> list[Measured]:
    """A batch's times, given to its prompts by their tokens."""
    tokens = sum(len(result.tokens) for result in results)
    out = []
    for prompt, result in zip(batch, results, strict=True):
        share = len(result.tokens) / tokens if tokens else 0.0
        out.append(Measured(prompt, result, median(walls) * share, tuple(wall * share for wall in walls)))
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


def mean_acceptance_length(results: Sequence[Result]) -> float:
    """Committed tokens per forward of the target: 1 + accepted / forwards."""
    steps = [step for result in results for step in result.steps]
    return 1 + sum(step.accepted for step in steps) / len(steps) if steps else 1.0


def acceptance_rate(results: Sequence[Result]) -> float | None:
    """Accepted guesses over all guesses; None if nothing was guessed. A tree's siblings cannot all be right."""
    drafted = sum(step.drafted for result in results for step in result.steps)
    return sum(step.accepted for result in results for step in result.steps) / drafted if drafted else None


def acceptance_by_position(results: Sequence[Result]) -> list[float]:
    """For each depth, the share of all drafts in which the guess at that depth was accepted."""
    drafts = [step for result in results for step in result.steps if step.drafted]
    deepest = max((step.depth for step in drafts), default=0)
    return [sum(step.accepted > depth for step in drafts) / len(drafts) for depth in range(deepest)]


def summarise(
    contender: Contender,
    dtype: str,
    measured: Sequence[Measured],
    baseline: Sequence[Measured],
    *,
    memory: int | None = None,
) -> dict[str, Any]:
    """One entry of the report's `runs`. Times in milliseconds, speeds in committed tokens per second of wall time.

    `memory`: bytes that the drafter holds.
    """
    found = differences(contender.drafter, baseline, measured)
    differing = {entry.prompt for entry in found}
    results = [entry.result for entry in measured]
    groups: Mapping[str, list[int]] = _by_category(measured)
    return {
        "drafter": contender.drafter,
        "temperature": contender.temperature,
        "verify": contender.verify,
        "exact": contender.exact,
        "dtype": dtype,
        **_totals(measured, baseline, differing, range(len(measured))),
        **_by_repeat(measured, baseline),
        "ttft_ms": percentiles([1000 * result.ttft for result in results]),
        "tpot_ms": percentiles(
            [
                1000 * (result.seconds - result.ttft) / (len(result.tokens) - 1)
                for result in results
                if len(result.tokens) > 1
            ]
        ),
        "e2e_ms": percentiles([1000 * result.seconds for result in results]),
        "memory_bytes": memory,
        "drafter_failures": dict(Counter(result.drafter_error for result in results if result.drafter_error)),
        "by_category": {name: _totals(measured, baseline, differing, indices) for name, indices in groups.items()},
        "differences": [asdict(entry) for entry in found],
        "samples": [_sample(entry) for entry in measured],
    }


def _totals(
    measured: Sequence[Measured], baseline: Sequence[Measured], differing: set[int], indices: Iterable[int]
) -> dict[str, Any]:
    chosen = list(indices)
    ours, plain = [measured[i] for i in chosen], [baseline[i] for i in chosen]
    results = [entry.result for entry in ours]
    speed, plain_speed = _speed(ours), _speed(plain)
    interval = None if measured is baseline else ratio_interval([_columns(ours)], [_columns(plain)])
    return {
        "prompts": len(chosen),
        "identical": sum(i not in differing for i in chosen),
        "tokens": sum(len(result.tokens) for result in results),
        "tokens_per_second": speed,
        "speedup": speed / plain_speed if plain_speed else None,
        "speedup_interval": interval,
        "mean_acceptance_length": mean_acceptance_length(results),
        "acceptance_rate": acceptance_rate(results),
        "acceptance_by_position": acceptance_by_position(results),
    }


def _columns(measured: Sequence[Measured]) -> tuple[list[float], list[float]]:
    return [float(len(entry.result.tokens)) for entry in measured], [entry.seconds for entry in measured]


def _by_repeat(measured: Sequence[Measured], baseline: Sequence[Measured]) -> dict[str, list[float]]:
    """Speed and speed-up of each run over all prompts."""

    def speeds(entries: Sequence[Measured]) -> list[float]:
        tokens = sum(len(entry.result.tokens) for entry in entries)
        runs = zip(*(entry.walls for entry in entries), strict=True)
        return [tokens / total if (total := sum(walls)) else 0.0 for walls in runs]

    ours, plain = speeds(measured), speeds(baseline)
    return {
        "tokens_per_second_by_repeat": ours,
        "speedup_by_repeat": [a / b for a, b in zip(ours, plain, strict=True) if b],
    }


def _sample(entry: Measured) -> dict[str, Any]:
    result = entry.result
    return {
        "line": entry.prompt.line,
        "category": entry.prompt.group,
        "prompt_tokens": result.usage.prompt_tokens,
        "tokens": len(result.tokens),
        "seconds": entry.seconds,
        "ttft_ms": 1000 * result.ttft,
        "forwards": len(result.steps),
        "drafted": sum(step.drafted for step in result.steps),
        "accepted": sum(step.accepted for step in result.steps),
    }


def _speed(measured: Sequence[Measured]) -> float:
    seconds = sum(entry.seconds for entry in measured)
    return sum(len(entry.result.tokens) for entry in measured) / seconds if seconds else 0.0


def _by_category(measured: Sequence[Measured]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(measured):
        groups[entry.prompt.group].append(index)
    return dict(groups)
