"""What servers did, in figures: latencies, goodput, acceptance, and whose texts differ from plain decoding's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from outrider.bench.client import Answer, Failure
from outrider.bench.loads import Sample
from outrider.bench.prompts import Prompt
from outrider.bench.race import Taken
from outrider.bench.slo import Slo
from outrider.bench.spread import Columns, percentiles, ratio_interval

__all__ = ["summarise_servers"]

_AROUND = 24  # characters of a text that are shown around a difference


def summarise_servers(
    taken: Sequence[Taken], prompts: Sequence[Prompt], *, baseline: str, slo: Slo | None = None
) -> list[dict[str, Any]]:
    """The report's `runs`: one per server and load. `baseline` is the name of the server that decodes plainly.

    Of one server alone there is no speed-up: nothing decoded plainly beside it.
    A text is compared with the one that the baseline wrote first, under whichever load. `unstable` lists prompts to
    which a server itself wrote different texts, in different runs or under different loads.
    """
    first = _first_texts(taken)
    unstable = _unstable(taken)
    plain = {entry.load: entry for entry in taken if entry.server.name == baseline}
    alone = len(plain) == len(taken)
    return [
        _summary(entry, None if alone else plain[entry.load], prompts, slo)
        | _equality(entry, baseline, first[baseline], prompts)
        | {"unstable": sorted(prompts[index].line for index in unstable[entry.server.name])}
        for entry in taken
    ]


def _first_texts(taken: Sequence[Taken]) -> dict[str, dict[int, str]]:
    out: dict[str, dict[int, str]] = defaultdict(dict)
    for entry in taken:
        for sample, answer in entry.answers:
            out[entry.server.name].setdefault(sample.prompt, answer.text)
    return out


def _unstable(taken: Sequence[Taken]) -> dict[str, set[int]]:
    first = _first_texts(taken)
    out: dict[str, set[int]] = defaultdict(set)
    for entry in taken:
        for sample, answer in entry.answers:
            if first[entry.server.name][sample.prompt] != answer.text:
                out[entry.server.name].add(sample.prompt)
    return out


def _equality(entry: Taken, baseline: str, plain: Mapping[int, str], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """How many prompts have the baseline's text, and where the others part from it."""
    compared: set[int] = set()
    found: dict[int, dict[str, Any]] = {}
    for sample, answer in entry.answers:
        expected = plain.get(sample.prompt)
        if expected is None:
            continue
        compared.add(sample.prompt)
        if answer.text != expected and sample.prompt not in found:
            place = next((i for i, (a, b) in enumerate(zip(expected, answer.text, strict=False)) if a != b), None)
            place = min(len(expected), len(answer.text)) if place is None else place
            begin = max(0, place - _AROUND)
            found[sample.prompt] = {
                "prompt": sample.prompt,
                "line": prompts[sample.prompt].line,
                "position": place,
                "plain": expected[begin : place + _AROUND],
                "drafted": answer.text[begin : place + _AROUND],
            }
    return {
        "baseline": baseline,
        "compared": len(compared),
        "identical": len(compared) - len(found),
        "differences": [found[index] for index in sorted(found)],
    }


def _summary(entry: Taken, plain: Taken | None, prompts: Sequence[Prompt], slo: Slo | None) -> dict[str, Any]:
    answers = [answer for _, answer in entry.answers]
    speeds = _speeds(entry)
    reasons = Counter(sample.outcome.reason for sample in entry.samples if isinstance(sample.outcome, Failure))
    ttft = percentiles([1000 * answer.ttft for answer in answers])
    tpot = percentiles([1000 * tpot for answer in answers if (tpot := answer.tpot) is not None])
    seconds = sum(entry.seconds)
    return {
        "server": entry.server.name,
        "url": entry.server.url,
        "model": entry.model,
        "body": dict(entry.server.body),
        "load": {"kind": entry.load.kind, "level": entry.load.level},
        "requests": len(entry.samples),
        "completed": len(answers),
        "failed": len(entry.samples) - len(answers),
        "failures": dict(reasons.most_common()),
        "tokens": sum(answer.tokens for answer in answers),
        "tokens_counted": all(answer.counted for answer in answers),
        "seconds": seconds,
        "tokens_per_second": median(speeds) if speeds else 0.0,
        "tokens_per_second_by_repeat": speeds,
        "requests_per_second": len(answers) / seconds if seconds else 0.0,
        **_speedup(entry, plain),
        "ttft_ms": ttft,
        "tpot_ms": tpot,
        "itl_ms": percentiles([1000 * gap for answer in answers for gap in answer.gaps]),
        "e2e_ms": percentiles([1000 * answer.seconds for answer in answers]),
        "late_ms": percentiles([1000 * sample.late for sample in entry.samples]),
        "goodput": None if slo is None else _goodput(entry, slo),
        "acceptance": _acceptance(entry),
        "memory_bytes": None if entry.counters is None else dict(entry.counters.memory_bytes) or None,
        "by_category": _by_category(entry, plain, prompts),
        "samples": [_sample(sample, answer, prompts) for sample, answer in entry.answers],
    }


def _speeds(entry: Taken) -> list[float]:
    """Tokens per second of each run."""
    tokens = [0] * len(entry.seconds)
    for sample, answer in entry.answers:
        tokens[sample.repeat] += answer.tokens
    return [count / seconds if seconds else 0.0 for count, seconds in zip(tokens, entry.seconds, strict=True)]


def _speedup(entry: Taken, plain: Taken | None) -> dict[str, Any]:
    """Over the baseline under the same load: of all tokens per second in a closed loop, of a request's in an open one.

    An open loop's tokens per second are what was asked for, however fast the server is. The interval is of what a
    request sees, under either.
    """
    if plain is None:
        return {"speedup": None, "speedup_by_repeat": [], "speedup_interval": None}
    speeds = _speeds if entry.load.kind == "closed" else _seen_speeds
    by_repeat = [ours / theirs for ours, theirs in zip(speeds(entry), speeds(plain), strict=True) if theirs]
    return {
        "speedup": median(by_repeat) if by_repeat else None,
        "speedup_by_repeat": by_repeat,
        "speedup_interval": None if entry is plain else ratio_interval(*_paired(entry, plain)),
    }


def _seen_speeds(entry: Taken) -> list[float]:
    """Tokens over the seconds of their requests, for each run."""
    tokens, seconds = [0] * len(entry.seconds), [0.0] * len(entry.seconds)
    for sample, answer in entry.answers:
        tokens[sample.repeat] += answer.tokens
        seconds[sample.repeat] += answer.seconds
    return [count / spent if spent else 0.0 for count, spent in zip(tokens, seconds, strict=True)]


def _paired(entry: Taken, plain: Taken) -> tuple[list[Columns], list[Columns]]:
    """Tokens and seconds per prompt of both, for the prompts that both answered."""
    ours, theirs = _by_prompt(entry), _by_prompt(plain)
    both = sorted(ours.keys() & theirs.keys())
    return (
        [([ours[i][0] for i in both], [ours[i][1] for i in both])],
        [([theirs[i][0] for i in both], [theirs[i][1] for i in both])],
    )


def _by_prompt(entry: Taken) -> dict[int, tuple[float, float]]:
    out: dict[int, tuple[float, float]] = {}
    for sample, answer in entry.answers:
        tokens, seconds = out.get(sample.prompt, (0.0, 0.0))
        out[sample.prompt] = (tokens + answer.tokens, seconds + answer.seconds)
    return out


def _times(answer: Answer) -> dict[str, float | None]:
    tpot = answer.tpot
    return {"ttft": 1000 * answer.ttft, "tpot": None if tpot is None else 1000 * tpot, "e2e": 1000 * answer.seconds}


def _goodput(entry: Taken, slo: Slo) -> dict[str, Any]:
    """Requests that met the objective: of all that were sent, failures included, and per second."""
    good = sum(slo.met(_times(answer)) for _, answer in entry.answers)
    seconds = sum(entry.seconds)
    return {
        "slo": dict(slo.limits),
        "good": good,
        "share": good / len(entry.samples) if entry.samples else 0.0,
        "requests_per_second": good / seconds if seconds else 0.0,
    }


def _acceptance(entry: Taken) -> dict[str, Any] | None:
    """From what the answers tell; else from the server's counters; else None."""
    told = [answer.speculation for _, answer in entry.answers if answer.speculation]
    if not told:
        return None if entry.counters is None else entry.counters.summary()
    drafted = sum(one["num_draft_tokens"] for one in told)
    accepted = sum(one["num_accepted_draft_tokens"] for one in told)
    drafts = sum(one["num_spec_steps"] for one in told)
    histogram: Counter[int] = Counter()
    for one in told:
        histogram.update(dict(enumerate(one["acceptance_histogram"])))
    deepest = max((depth for depth, count in histogram.items() if count), default=0)
    return {
        "source": "the answers",
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_by_position": [
            sum(count for place, count in histogram.items() if place > depth) / drafts for depth in range(deepest)
        ]
        if drafts
        else [],
    }


def _by_category(entry: Taken, plain: Taken | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Speed as one request sees it: tokens over the seconds from its sending to its last token."""
    ours, theirs = _of_categories(entry, prompts), {} if plain is None else _of_categories(plain, prompts)
    out = {}
    for name, (count, tokens, seconds) in ours.items():
        speed = tokens / seconds if seconds else 0.0
        _, base_tokens, base_seconds = theirs.get(name, (0, 0.0, 0.0))
        base = base_tokens / base_seconds if base_seconds else 0.0
        out[name] = {"completed": count, "tokens_per_second": speed, "speedup": speed / base if base else None}
    return out


def _of_categories(entry: Taken, prompts: Sequence[Prompt]) -> dict[str, tuple[int, float, float]]:
    out: dict[str, tuple[int, float, float]] = {}
    for sample, answer in entry.answers:
        name = prompts[sample.prompt].group
        count, tokens, seconds = out.get(name, (0, 0.0, 0.0))
        out[name] = (count + 1, tokens + answer.tokens, seconds + answer.seconds)
    return out


def _sample(sample: Sample, answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    prompt = prompts[sample.prompt]
    return {
        "line": prompt.line,
        "category": prompt.group,
        "repeat": sample.repeat,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "seconds": answer.seconds,
        "ttft_ms": 1000 * answer.ttft,
    }
