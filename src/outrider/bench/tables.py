"""A report as tables: the same for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.report import run_label

__all__ = ["Table", "number", "tables"]

_DEEPEST = 8  # depths shown; the report has all
_SHOWN = 20  # differences shown per run

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """`first` columns are text, the others numbers. `brief`: shown on the terminal too."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    first: int = 1
    brief: bool = True


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def tables(report: Mapping[str, Any]) -> list[Table]:
    """All tables of a report; none is empty."""
    runs = report["runs"]
    found = _of_servers(runs) if report["kind"] == "server" else _of_engine(runs, report.get("step_cost"))
    return [table for table in found if table.rows and len(table.columns) > 1]


# -- of an engine ---------------------------------------------------------------------------------------------------


def _of_engine(runs: Runs, step_cost: Mapping[str, Any] | None) -> list[Table]:
    drafted = [run for run in runs if run["drafter"] != "none"]
    labels = [run_label(run, runs) for run in drafted]
    categories = list(runs[0]["by_category"])
    out = [_speeds(runs), _rules(drafted)]
    if len(categories) > 1:
        for title, key in (
            ("speed-up by category", "speedup"),
            ("acceptance length by category", "mean_acceptance_length"),
        ):
            rows = [[name, *(number(run["by_category"][name][key]) for run in drafted)] for name in categories]
            out.append(Table(title, ["category", *labels], rows))
    out.append(_depths("drafts right to depth", labels, [run["acceptance_by_position"] for run in drafted]))
    if len(categories) > 1:
        for run, label in zip(drafted, labels, strict=True):
            curves = [run["by_category"][name]["acceptance_by_position"] for name in categories]
            out.append(_depths(f"drafts right to depth by category: {label}", categories, curves, brief=False))
    out.append(_memory(runs))
    if step_cost is not None:
        rows = [[str(rows), number(ms, ".3f"), number(ms / step_cost["ms"][0])] for rows, ms in _steps(step_cost)]
        title = f"a forward by its rows, behind {step_cost['context']} tokens"
        out.append(Table(title, ["rows", "ms", "of one row"], rows, brief=False))
    return [*out, _differences(runs), _prompts(runs)]
    return out


def _speeds(runs: Runs) -> Table:
    columns = [
        "drafter",
        "identical",
        "tokens/s",
        "speed-up",
        "95 % of it",
        "acceptance length",
        "TTFT p50 / p95 ms",
        "TPOT p50 / p95 ms",
    ]
    rows = [
        [
            run_label(run, runs),
            f"{run['identical']}/{run['prompts']}",
            number(run["tokens_per_second"], ".1f"),
            number(run["speedup"]),
            _interval(run["speedup_interval"]),
            number(run["mean_acceptance_length"]),
            _two(run["ttft_ms"], "p95", ".1f"),
            _two(run["tpot_ms"], "p95", ".2f"),
        ]
        for run in runs
    ]
    return Table("speed", columns, rows)


def _rules(drafted: Runs) -> Table:
    """Match and rejection side by side, where a drafter was measured under both at one temperature."""
    by_key = {(run["drafter"], run["temperature"], run["verify"]): run for run in drafted}
    rows = []
    for (drafter, temperature, verify), match in by_key.items():
        rejection = by_key.get((drafter, temperature, "rejection"))
        if verify == "match" and rejection is not None:
            pair = (match, rejection)
            rows.append(
                [
                    drafter,
                    number(temperature, "g"),
                    *(number(run["speedup"]) for run in pair),
                    *(number(run["mean_acceptance_length"]) for run in pair),
                    *(number(run["acceptance_rate"]) for run in pair),
                    *(number((run["acceptance_by_position"] or [None])[0]) for run in pair),
                ]
            )
    columns = ["match against rejection", "T"]
    for what in ("speed-up", "acceptance length", "guesses right", "first guess right"):
        columns += [f"{what}: match", "rejection"]
    return Table("match against rejection", columns, rows)


def _depths(title: str, labels: Sequence[str], curves: Sequence[Sequence[float]], *, brief: bool = True) -> Table:
    deepest = min(_DEEPEST, max(map(len, curves), default=0))
    rows = [
        [str(depth + 1), *(number(curve[depth] if depth < len(curve) else None) for curve in curves)]
        for depth in range(deepest)
    ]
    return Table(title, ["depth", *labels], rows, brief=brief)


def _memory(runs: Runs) -> Table:
    held = {str(run["drafter"]): run["memory_bytes"] for run in runs if run["memory_bytes"] is not None}
    rows = [[drafter, number(size / 1e6, ".1f")] for drafter, size in held.items()]
    return Table("what a drafter holds in memory", ["drafter", "MB"], rows, brief=False)


def _steps(step_cost: Mapping[str, Any]) -> list[tuple[int, float]]:
    return list(zip(step_cost["rows"], step_cost["ms"], strict=True))


def _prompts(runs: Runs) -> Table:
    """Tokens per second of each prompt in each run."""
    columns = ["line", "category", "prompt tokens", "tokens", *(run_label(run, runs) for run in runs)]
    rows = []
    for samples in zip(*(run["samples"] for run in runs), strict=True):
        one = samples[0]
        speeds = [number(each["tokens"] / each["seconds"] if each["seconds"] else None, ".1f") for each in samples]
        rows.append([str(one["line"]), one["category"], str(one["prompt_tokens"]), str(one["tokens"]), *speeds])
    return Table("each prompt, tokens per second", columns, rows, first=2, brief=False)


def _requests(run: Mapping[str, Any], runs: Runs) -> Table:
    rows = [
        [
            str(sample["line"]),
            sample["category"],
            str(sample["repeat"] + 1),
            number(sample["prompt_tokens"], "d"),
            str(sample["tokens"]),
            number(sample["ttft_ms"], ".1f"),
            number(1000 * sample["seconds"], ".0f"),
        ]
        for sample in run["samples"]
    ]
    columns = ["line", "category", "run", "prompt tokens", "tokens", "TTFT ms", "E2E ms"]
    return Table(f"each request: {run_label(run, runs)}", columns, rows, first=2, brief=False)


def _differences(runs: Runs) -> Table:
    rows = [
        [
            run_label(run, runs),
            str(entry["line"]),
            f"{entry['position']}, {entry.get('what', 'text')}",
            repr(entry["plain"]),
            repr(entry["drafted"]),
        ]
        for run in runs
        for entry in run["differences"][:_SHOWN]
    ]
    columns = ["texts that differ from plain decoding's", "line", "position", "plain", "this one"]
    return Table("texts that differ from plain decoding's", columns, rows, first=5, brief=False)


# -- of servers -----------------------------------------------------------------------------------------------------


def _of_servers(runs: Runs) -> list[Table]:
    loads = list(dict.fromkeys((run["load"]["kind"], run["load"]["level"]) for run in runs))
    light = [run for run in runs if (run["load"]["kind"], run["load"]["level"]) == loads[0]]
    return [
        _latencies(runs),
        _goodput(runs),
        _texts(runs),
        _acceptance(runs),
        _categories(light),
        _failures(runs),
        _depths(
            "drafts right to depth",
            [run_label(run, runs) for run in runs if run["acceptance"]],
            [run["acceptance"]["acceptance_by_position"] for run in runs if run["acceptance"]],
            brief=False,
        ),
        _differences(light),
        *(_requests(run, runs) for run in runs),
    ]


def _latencies(runs: Runs) -> Table:
    columns = [
        "server",
        "requests",
        "failed",
        "tokens/s",
        "speed-up",
        "TTFT p50 / p99 ms",
        "TPOT p50 / p99 ms",
        "ITL p50 / p99 ms",
        "E2E p50 / p99 ms",
    ]
    rows = [
        [
            run_label(run, runs),
            str(run["requests"]),
            str(run["failed"]),
            number(run["tokens_per_second"], ".1f"),
            number(run["speedup"]),
            *(_two(run[key], "p99", ".1f") for key in ("ttft_ms", "tpot_ms", "itl_ms")),
            _two(run["e2e_ms"], "p99", ".0f"),
        ]
        for run in runs
    ]
    return Table("speed", columns, rows)


def _goodput(runs: Runs) -> Table:
    measured = [run for run in runs if run["goodput"]]
    rows = [
        [
            run_label(run, runs),
            f"{run['goodput']['good']}/{run['requests']}",
            number(run["goodput"]["share"], ".0%"),
            number(run["goodput"]["requests_per_second"]),
        ]
        for run in measured
    ]
    limits = measured[0]["goodput"]["slo"] if measured else {}
    objective = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items())
    return Table("goodput", [f"goodput ({objective})", "good", "share", "good requests/s"], rows)


def _texts(runs: Runs) -> Table:
    columns = ["server", "texts compared", "as plain decoding", "differ", "differ from its own"]
    alone = all(run["server"] == run["baseline"] for run in runs)
    rows = [
        [
            run_label(run, runs),
            *(
                "-" if alone else str(count)
                for count in (run["compared"], run["identical"], run["compared"] - run["identical"])
            ),
            str(len(run["unstable"])),
        ]
        for run in runs
    ]
    return Table("texts", columns, rows)


def _acceptance(runs: Runs) -> Table:
    rows = [
        [
            run_label(run, runs),
            number(run["acceptance"]["mean_acceptance_length"]),
            number(run["acceptance"]["acceptance_rate"]),
            run["acceptance"]["source"],
        ]
        for run in runs
        if run["acceptance"]
    ]
    return Table("acceptance", ["server", "acceptance length of a draft", "guesses right", "told by"], rows)


def _categories(runs: Runs) -> Table:
    names = list(dict.fromkeys(name for run in runs for name in run["by_category"]))
    rows = [
        [name, *(number(run["by_category"].get(name, {}).get("speedup")) for run in runs)]
        for name in names
        if len(names) > 1 and any(run["speedup"] is not None for run in runs)
    ]
    return Table("speed-up by category", ["category", *(run_label(run, runs) for run in runs)], rows)


def _failures(runs: Runs) -> Table:
    rows = [[run_label(run, runs), reason, str(count)] for run in runs for reason, count in run["failures"].items()]
    return Table("failures", ["failures", "reason", "requests"], rows, first=2)


def _two(values: Mapping[str, float | None], high: str, form: str) -> str:
    return f"{number(values['p50'], form)} / {number(values[high], form)}"


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
