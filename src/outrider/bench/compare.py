"""Two reports against each other: what changed, and whether it is more than noise.

Runs are paired by what they measured, prompts by their place. A change counts as real if the 95 % interval of the
ratio, by a paired bootstrap over the prompts, leaves out 1, and if it is larger than the repeats of either report
scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outrider.bench.report import ReportError, run_key, run_label
from outrider.bench.spread import Columns, ratio_interval

__all__ = ["Change", "Comparison", "Metric", "compare"]

Metric = Literal["speed", "speedup"]


@dataclass(frozen=True, slots=True)
class Change:
    """One run in both reports. `ratio` is new over old; above 1 is faster."""

    name: str
    old: float
    new: float
    ratio: float
    interval: tuple[float, float] | None  # of the ratio, 95 %; None of too few prompts
    scatter: float  # how far repeats lie from their median at most, as a share of it, in the worse of both reports
    texts: str  # what became of equality with plain decoding
    newly_differs: bool  # texts that must equal plain decoding's did before, and no longer do

    @property
    def measured(self) -> bool:
        """Whether anything says how large noise is: enough prompts for an interval, or repeats."""
        return self.interval is not None or self.scatter > 0

    @property
    def real(self) -> bool:
        if not self.measured:
            return False
        if self.interval is not None and self.interval[0] <= 1 <= self.interval[1]:
            return False
        return abs(self.ratio - 1) > self.scatter

    @property
    def verdict(self) -> str:
        if not self.measured:
            return "cannot be told: take more prompts, or --repeat"
        if not self.real:
            return "no change beyond noise"
        return "faster" if self.ratio > 1 else "slower"

    def slower_by(self, share: float) -> bool:
        """Whether it is slower by more than `share`, and not by noise alone."""
        return self.real and self.ratio < 1 - share


@dataclass(frozen=True, slots=True)
class Comparison:
    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    circumstances: list[str]  # what else is not the same, a line each

    def told(self) -> dict[str, Any]:
        """For JSON."""
        changes = [asdict(change) | {"verdict": change.verdict} for change in self.changes]
        return asdict(self) | {"changes": changes}


def compare(old: Mapping[str, Any], new: Mapping[str, Any], metric: Metric = "speed") -> Comparison:
    """Raises ReportError where the reports measured different things altogether.

    `speed` compares tokens per second, which need the same machine; `speedup` the speed-ups over plain decoding in the
    same run, which mean something on another machine too.
    """
    if old["kind"] != new["kind"]:
        raise ReportError(f"one report is of {_of(old)}, the other of {_of(new)}: they have no run in common")
    if old["prompts"]["sha256"] != new["prompts"]["sha256"]:
        raise ReportError(
            f"the reports measured different prompts ({old['prompts']['count']} from {old['prompts']['source']}, "
            f"{new['prompts']['count']} from {new['prompts']['source']}); measure again with the same ones"
        )
    before = {run_key(run): run for run in old["runs"]}
    after = {run_key(run): run for run in new["runs"]}
    both = [key for key in before if key in after]
    if not both:
        raise ReportError("no run is in both reports: they measured other drafters, servers or loads")
    return Comparison(
        [
            _change(before, after, key, metric, old["runs"])
            for key in both
            if _measured(before[key], after[key], metric)
        ],
        [run_label(run, old["runs"]) for key, run in before.items() if key not in after],
        [run_label(run, new["runs"]) for key, run in after.items() if key not in before],
        _circumstances(old, new),
    )


def _of(report: Mapping[str, Any]) -> str:
    return "servers" if report["kind"] == "server" else "an engine"


def _measured(old: Mapping[str, Any], new: Mapping[str, Any], metric: Metric) -> bool:
    """Whether there is something to compare: a run without any answer has no speed, the baseline no speed-up."""
    if metric == "speedup" and _is_baseline(old):
        return False
    return bool(_value(old, metric)) and bool(_value(new, metric))


def _is_baseline(run: Mapping[str, Any]) -> bool:
    return bool(run["server"] == run["baseline"]) if "server" in run else bool(run["drafter"] == "none")


def _plain(runs: Mapping[Any, Mapping[str, Any]], run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run of the baseline beside `run`."""
    if "server" in run:
        return runs[run["baseline"], run["load"]["kind"], run["load"]["level"]]
    return next(one for key, one in runs.items() if key[0] == "none" and one["temperature"] == run["temperature"])


def _value(run: Mapping[str, Any], metric: Metric) -> float | None:
    found = run["tokens_per_second" if metric == "speed" else "speedup"]
    return None if found is None else float(found)


def _change(
    before: Mapping[Any, Any], after: Mapping[Any, Any], key: Any, metric: Metric, runs: Sequence[Mapping[str, Any]]
) -> Change:
    old, new = before[key], after[key]
    over, under = [new], [old]
    if metric == "speedup":  # the plain runs come in the other way round
        over, under = [new, _plain(before, old)], [old, _plain(after, new)]
    was, now = _value(old, metric) or 0.0, _value(new, metric) or 0.0
    return Change(
        run_label(old, runs),
        was,
        now,
        now / was,
        _interval(over, under),
        max(_scatter(old, metric), _scatter(new, metric)),
        _texts(old, new),
        bool(new.get("exact", True)) and _differing(new) > _differing(old),
    )


def _interval(over: Sequence[Mapping[str, Any]], under: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Of the ratio of the runs' speeds, over the prompts that all of them answered."""
    tables = [_by_prompt(run) for run in (*over, *under)]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    columns: list[Columns] = [([table[i][0] for i in shared], [table[i][1] for i in shared]) for table in tables]
    return ratio_interval(columns[: len(over)], columns[len(over) :])


def _by_prompt(run: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    out: dict[int, tuple[float, float]] = {}
    for sample in run["samples"]:
        tokens, seconds = out.get(sample["line"], (0.0, 0.0))
        out[sample["line"]] = (tokens + sample["tokens"], seconds + sample["seconds"])
    return out


def _scatter(run: Mapping[str, Any], metric: Metric) -> float:
    values = run["tokens_per_second_by_repeat" if metric == "speed" else "speedup_by_repeat"]
    if len(values) < 2:
        return 0.0
    middle = sorted(values)[len(values) // 2]
    return max(abs(value / middle - 1) for value in values) if middle else 0.0


def _texts(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    def told(run: Mapping[str, Any]) -> str:
        return f"{run['identical']}/{run.get('compared', run.get('prompts'))}"

    return told(new) if told(old) == told(new) else f"{told(old)} before, {told(new)} now"


def _differing(run: Mapping[str, Any]) -> int:
    return int(run.get("compared", run.get("prompts", 0))) - int(run["identical"])


def _circumstances(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs besides the figures, so that nobody takes another machine for a faster program."""
    was, now = _stated(old), _stated(new)
    return [
        f"{name}: {was.get(name)} before, {now.get(name)} now"
        for name in {**was, **now}
        if was.get(name) != now.get(name)
    ]


def _stated(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "machine": report["machine"]["cpu"],
        "cores": report["machine"]["cores"],
        "outrider": report["versions"]["outrider"],
        "python": report["versions"]["python"],
        "commit": (report["git"] or {}).get("commit"),
        "model": report.get("model", {}).get("sha256"),
        **report["settings"],
    }
