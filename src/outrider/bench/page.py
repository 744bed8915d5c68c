"""A report as one web page that needs nothing else: opened from disk, without network, light or dark."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from outrider.bench.charts import Line, bars, lines
from outrider.bench.report import load_label, run_label
from outrider.bench.tables import tables
from outrider.bench.verdict import verdict

__all__ = ["page"]

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    svg: str
    note: str


def page(report: Mapping[str, Any]) -> str:
    """The page, as HTML. Whatever a report holds is text on it: markup in it has no effect."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("outrider.bench").joinpath("page.html").read_text("utf-8"))
    charts = _of_servers(report["runs"]) if report["kind"] == "server" else _of_engine(report)
    return template.render(
        report=report,
        verdict=verdict(report),
        charts=[(chart.title, Markup(chart.svg), chart.note) for chart in charts],
        tables=tables(report),
        facts=_facts(report),
        command=shlex.join(report["argv"]),
    )


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a figure can be checked by."""
    machine, prompts, git = report["machine"], report["prompts"], report["git"]
    changed = ", with changes that are not committed" if git and git["changed"] else ""
    out = [
        ("Measured", report["created"]),
        ("Machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"),
        ("Instructions", ", ".join(machine["instructions"]) or "none of those that matter"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("Commit", f"{git['commit']}{changed}" if git else "not from a repository"),
        ("Prompts", f"{prompts['count']} from {prompts['source']}"),
        ("Prompts' SHA-256", prompts["sha256"]),
        ("Settings", ", ".join(f"{name} {_plainly(value)}" for name, value in report["settings"].items())),
    ]
    if "model" in report:
        model = report["model"]
        out[1:1] = [("Model", f"{model['name']} ({model['quantisation']})"), ("Model's SHA-256", model["sha256"])]
    if report["kind"] == "server":
        servers = {run["server"]: f"{run['server']}: {run['model']} at {run['url']}" for run in report["runs"]}
        out[1:1] = [("Servers", "; ".join(servers.values()))]
    if report.get("memory"):
        held = ", ".join(f"{purpose} {size / 1e6:,.1f}" for purpose, size in report["memory"]["bytes"].items())
        out.append(("Memory in MB", f"{held}; the process at its peak {report['memory']['peak_rss_bytes'] / 1e6:,.0f}"))
    return out


def _plainly(value: Any) -> str:
    return "-" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


# -- an engine's charts ---------------------------------------------------------------------------------------------


def _of_engine(report: Mapping[str, Any]) -> list[Chart]:
    runs = report["runs"]
    drafted = [run for run in runs if run["drafter"] != "none"]
    out = []
    if drafted:
        out.append(_speedups(drafted, runs))
        depths = _depths([(run_label(run, runs), run["acceptance_by_position"]) for run in drafted])
        out += [depths] if depths else []
    cost = report.get("step_cost")
    if cost is not None:
        relative = [(rows, ms / cost["ms"][0]) for rows, ms in zip(cost["rows"], cost["ms"], strict=True)]
        title = "What a forward costs by its rows"
        svg = lines(
            title, [Line("measured", relative)], x_axis="rows of one forward", y_axis="time, of one row", reference=1.0
        )
        note = f"Each guess is a row. Guesses are cheap where the line is flat. One row takes {cost['ms'][0]:.2f} ms."
        out.append(Chart(title, svg, note))
    return out


def _speedups(drafted: Runs, runs: Runs) -> Chart:
    categories = list(drafted[0]["by_category"])
    groups = ["all", *categories] if len(categories) > 1 else ["all"]
    rows = [[run, *(run["by_category"][name] for name in groups[1:])] for run in drafted]
    title = "Speed-up over plain decoding, by category"
    svg = bars(
        title,
        groups,
        [run_label(run, runs) for run in drafted],
        [[entry["speedup"] for entry in row] for row in rows],
        axis="times as fast as plain decoding",
        unit="x",
        reference=1.0,
        intervals=[[entry["speedup_interval"] for entry in row] for row in rows],
    )
    note = (
        "The line is plain decoding, measured in the same run. Whiskers are 95 % intervals over the prompts; "
        "there are none where fewer than three prompts were measured."
    )
    return Chart(title, svg, note)


def _depths(curves: Sequence[tuple[str, Sequence[float]]]) -> Chart | None:
    series = [Line(name, [(depth, share) for depth, share in enumerate(curve, 1)]) for name, curve in curves if curve]
    if not series:
        return None
    title = "How deep drafts are right"
    svg = lines(title, series, x_axis="depth of the guess", y_axis="share of drafts right to there", even=True, top=1.0)
    return Chart(title, svg, "Of all drafts, the share whose guesses were accepted down to each depth.")


# -- servers' charts ------------------------------------------------------------------------------------------------


def _of_servers(runs: Runs) -> list[Chart]:
    kinds = list(dict.fromkeys(run["load"]["kind"] for run in runs))
    out = []
    for kind in kinds:
        group = [run for run in runs if run["load"]["kind"] == kind]
        axis = "users at once" if kind == "closed" else "requests per second"
        out += [chart for what in _MEASURES if (chart := _against_load(group, axis, *what)) is not None]
    first = [run for run in runs if run["load"] == runs[0]["load"]]
    if len({name for run in first for name in run["by_category"]}) > 1:
        out.append(_server_categories(first))
    depths = _depths(
        [(run_label(run, runs), run["acceptance"]["acceptance_by_position"]) for run in runs if run["acceptance"]]
    )
    return [*out, depths] if depths else out


# title, unit, path to the figure
_MEASURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Tokens per second", "tokens/s", ("tokens_per_second",)),
    ("Time to the first token, median", "ms", ("ttft_ms", "p50")),
    ("Time to the first token, 99th percentile", "ms", ("ttft_ms", "p99")),
    ("Time per token, median", "ms", ("tpot_ms", "p50")),
    ("Whole answer, median", "ms", ("e2e_ms", "p50")),
    ("Requests that met the objective", "share", ("goodput", "share")),
)


def _against_load(runs: Runs, axis: str, title: str, unit: str, path: Sequence[str]) -> Chart | None:
    """A line per server over the loads; bars where there is one load."""
    servers = list(dict.fromkeys(run["server"] for run in runs))
    levels = sorted({run["load"]["level"] for run in runs})
    values = {(run["server"], run["load"]["level"]): _figure(run, path) for run in runs}
    if all(value is None for value in values.values()):
        return None
    if len(levels) == 1:
        figures = [[values[server, levels[0]] for server in servers]]
        return Chart(title, bars(title, servers, [""], figures, axis=unit), f"At {load_label(runs[0]['load'])}.")
    series = [Line(server, [(level, values.get((server, level))) for level in levels]) for server in servers]
    top = 1.0 if unit == "share" else None
    return Chart(title, lines(title, series, x_axis=axis, y_axis=unit, even=True, top=top), "")


def _figure(run: Mapping[str, Any], path: Sequence[str]) -> float | None:
    found: Any = run
    for key in path:
        found = None if found is None else found[key]
    return None if found is None else float(found)


def _server_categories(runs: Runs) -> Chart:
    names = list(dict.fromkeys(name for run in runs for name in run["by_category"]))
    rivals = [run for run in runs if run["server"] != run["baseline"]] or list(runs)
    title = f"Speed-up over {runs[0]['baseline']}, by category"
    svg = bars(
        title,
        names,
        [run["server"] for run in rivals],
        [[run["by_category"].get(name, {}).get("speedup") for name in names] for run in rivals],
        axis=f"times as fast as {runs[0]['baseline']}",
        unit="x",
        reference=1.0,
    )
    return Chart(title, svg, f"Tokens over the seconds of a request, at {load_label(runs[0]['load'])}.")
