"""What a report says, in words: one short paragraph, every figure of which stands in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.report import run_label

__all__ = ["verdict"]

_EVEN = 0.03  # a speed-up this near to 1 is no gain and no loss


def verdict(report: Mapping[str, Any]) -> str:
    """The paragraph."""
    runs = report["runs"]
    sentences = _of_servers(runs) if report["kind"] == "server" else _of_engine(runs)
    return " ".join(sentences)


def _of_engine(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    drafted = [run for run in runs if run["drafter"] != "none" and run["speedup"] is not None]
    wrong = [run for run in drafted if run["exact"] and run["identical"] < run["prompts"]]
    if wrong:
        names = _listed(
            [f"{run_label(run, runs)} ({run['prompts'] - run['identical']} of {run['prompts']})" for run in wrong]
        )
        return [f"Do not use this: texts that must be plain decoding's differ with {names}. Speeds say nothing then."]
    if not drafted:
        return [f"Plain decoding alone was measured: {runs[0]['tokens_per_second']:.0f} tokens/s. Add --drafter."]
    out = []
    for temperature in dict.fromkeys(run["temperature"] for run in runs):
        group = [run for run in drafted if run["temperature"] == temperature]
        if group:
            plain = next(run for run in runs if run["drafter"] == "none" and run["temperature"] == temperature)
            out += _best(group, plain, runs)
    exact = [run for run in drafted if run["exact"]]
    if exact:
        out.append(f"All {sum(run['prompts'] for run in exact)} drafted texts that must equal plain decoding's do.")
    failed = sorted({run["drafter"] for run in drafted if run["drafter_failures"]})
    if failed:
        out.append(f"Given up in part, so measured too slow: {_listed(failed)}; the report has the reasons.")
    return out


def _best(group: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    best = max(group, key=lambda run: float(run["speedup"]))
    losing = [run_label(run, runs) for run in group if _side(run) < 0]
    name, side = run_label(best, runs), _side(best)
    at = f" at T = {best['temperature']:g}" if len({run["temperature"] for run in runs}) > 1 else ""
    where = f"A{at.strip()[1:]}, s" if at else "S"
    speeds = f"{plain['tokens_per_second']:.0f} to {best['tokens_per_second']:.0f} tokens/s"
    found = f"{name} writes {best['speedup']:.2f} times as fast as plain decoding ({speeds}{_noise(best)})"
    if side < 0:
        return [f"{where}peculation costs here: the best drafter, {found}."]
    if side == 0 and abs(best["speedup"] - 1) > _EVEN:
        return [f"Whether speculation pays here is not settled{at}: {found}. Measure more prompts."]
    out = [f"{where}peculation {'pays' if side > 0 else 'changes little'} here: {found}."]
    categories = {kind: entry["speedup"] for kind, entry in best["by_category"].items() if entry["speedup"] is not None}
    if len(categories) > 1:
        most, least = max(categories, key=categories.__getitem__), min(categories, key=categories.__getitem__)
        out.append(
            f"It gains most on {most} ({categories[most]:.2f}x) and least on {least} ({categories[least]:.2f}x)."
        )
    if losing:
        out.append(f"Slower than plain decoding: {_listed(losing)}.")
    return out


def _side(run: Mapping[str, Any]) -> int:
    """1 of a gain, -1 of a loss, 0 of what is too near to 1 or too noisy to tell."""
    speedup, interval = run["speedup"], run["speedup_interval"]
    if abs(speedup - 1) <= _EVEN or (interval is not None and interval[0] <= 1 <= interval[1]):
        return 0
    return 1 if speedup > 1 else -1


def _noise(run: Mapping[str, Any]) -> str:
    interval = run["speedup_interval"]
    if interval is None:
        return "; too few prompts to say how sure"
    return f"; 95 % interval over the prompts {interval[0]:.2f} to {interval[1]:.2f}"


def _of_servers(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    baseline = runs[0]["baseline"]
    out = []
    failed = sum(run["failed"] for run in runs)
    if failed:
        out.append(
            f"{failed} of {sum(run['requests'] for run in runs)} requests failed; the speeds are of the others alone."
        )
    for level in dict.fromkeys((run["load"]["kind"], run["load"]["level"]) for run in runs):
        group = [run for run in runs if (run["load"]["kind"], run["load"]["level"]) == level and run["completed"]]
        out += _under_load(group, baseline, runs)
    others = [name for name in dict.fromkeys(run["server"] for run in runs) if name != baseline]
    if not others:
        out.append(
            f"Without a plain run there is no speed-up, and nothing to compare {baseline}'s texts with: give a second "
            "--url, of another server or of the same one with --extra-body 'NAME={...}' that switches speculation off."
        )
    for name in others:
        mine = [run for run in runs if run["server"] == name]
        differing = {entry["line"] for run in mine for entry in run["differences"]}
        lines = (
            f" (lines {', '.join(map(str, sorted(differing)[:8]))}{', ...' if len(differing) > 8 else ''})"
            if differing
            else ""
        )
        compared = max(run["compared"] for run in mine)
        out.append(
            f"{name}'s texts differ from those of {baseline} for {len(differing)} of {compared} prompts{lines}."
            if differing
            else f"{name}'s texts are those of {baseline}, all {compared}."
        )
    unstable = {run["server"]: len(run["unstable"]) for run in runs if run["unstable"]}
    for name, count in unstable.items():
        out.append(
            f"{name} wrote different texts to {count} of its own prompts in different runs or under other loads."
        )
    return out


def _under_load(group: Sequence[Mapping[str, Any]], baseline: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rivals = [run for run in group if run["server"] != baseline and run["speedup"] is not None]
    if not rivals:
        return [f"{run_label(run, runs)}: {run['tokens_per_second']:.0f} tokens/s." for run in group]
    return [
        f"{run_label(run, runs)}: {run['tokens_per_second']:.3g} tokens/s, {run['speedup']:.2f} times "
        f"{baseline}{_noise(run)}."
        for run in rivals
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
