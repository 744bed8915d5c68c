"""Figures and the table of a race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from contenders.base import Generation
from contenders.race import Plan, Race

__all__ = ["COUNTERPARTS", "rival_of", "summarise", "table"]

# Their precision -> ours.
COUNTERPARTS = {
    "Q8_0": "int8",
    "Q4_0": "int4",
    "Q4_1": "int4",
    "BF16": "bf16",
    "bf16": "bf16",
    "F32": "fp32",
    "fp32": "fp32",
}


def summarise(race: Race, plan: Plan, settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per contender that went the whole way. Speeds in tokens per second, times in milliseconds.

    `tokens_per_second` counts all new tokens over the whole time of the calls, prefill included, and
    `decode_tokens_per_second` those after the first over the time after it. A prompt's time is
    the median of its repeats.
    """
    entries = [_entry(name, race, plan, settings[name]) for name in settings if name not in race.out]
    by_name = {entry["name"]: entry for entry in entries}
    for entry in entries:
        engine, kind, _ = entry["name"].split(":")
        entry["over_plain"] = _ratios(entry, by_name.get(f"{engine}:{kind}:plain"))
        rival = rival_of(entry["name"], list(by_name))
        entry["ours"] = rival
        entry["ours_over_this"] = _ratios(by_name[rival], entry) if rival else None
    return entries


def rival_of(name: str, names: Sequence[str]) -> str | None:
    """Our contender of the same precision: plain beside plain, ngram beside lookup. None for our own."""
    engine, kind, decoding = name.split(":")
    ours = f"outrider:{COUNTERPARTS.get(kind, kind)}:{'plain' if decoding == 'plain' else 'ngram'}"
    return ours if engine != "outrider" and ours in names else None


def _entry(name: str, race: Race, plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    engine, kind, decoding = name.split(":")
    runs = race.generations.get(name, {})
    groups = {"all": list(runs)}
    for task in runs:
        groups.setdefault(plan.tasks[task].category, []).append(task)
    steps = {rows: median(values) for rows, values in race.steps.get(name, {}).items()}
    return {
        "name": name,
        "engine": engine,
        "kind": kind,
        "decoding": decoding,
        "settings": dict(settings),
        "speeds": {group: _speeds([runs[task] for task in tasks]) for group, tasks in groups.items() if tasks},
        "by_prompt": [
            {"category": plan.tasks[task].category, **_speeds([repeats])} for task, repeats in sorted(runs.items())
        ],
        "tokens_per_forward": _per_forward(runs),
        "same_text_as_plain": _same(runs, race.generations.get(f"{engine}:{kind}:plain", {})),
        "prefill_ms": 1000 * median(race.prefills[name]) if name in race.prefills else None,
        "step_ms": {str(rows): value for rows, value in steps.items()},
        "step_over_one_row": {str(rows): value / steps[1] for rows, value in steps.items()} if 1 in steps else {},
        "no_steps": race.no_steps.get(name),
    }


def _speeds(runs: Sequence[Sequence[Generation]]) -> dict[str, float]:
    tokens = sum(len(repeats[0].tokens) for repeats in runs)
    whole = sum(median(made.seconds for made in repeats) for repeats in runs)
    decode = sum(median(made.seconds - made.ttft for made in repeats) for repeats in runs)
    return {
        "prompts": len(runs),
        "tokens_per_second": tokens / whole,
        "decode_tokens_per_second": (tokens - len(runs)) / decode,
        "ttft_ms": 1000 * median(median(made.ttft for made in repeats) for repeats in runs),
    }


def _per_forward(runs: Mapping[int, Sequence[Generation]]) -> float | None:
    """Tokens per forward after the prefill; None where the engine does not count forwards."""
    made = [(len(repeats[0].tokens) - 1, repeats[0].steps) for repeats in runs.values()]
    if not made or any(not steps for _, steps in made):
        return None
    return sum(tokens for tokens, _ in made) / sum(steps or 0 for _, steps in made)


def _same(runs: Mapping[int, Sequence[Generation]], plain: Mapping[int, Sequence[Generation]]) -> dict[str, int] | None:
    """On how many prompts every repeat wrote what plain decoding of the same engine and precision wrote first."""
    both = [task for task in runs if task in plain]
    if not both:
        return None
    same = sum(all(made.tokens == plain[task][0].tokens for made in runs[task]) for task in both)
    return {"same": same, "prompts": len(both)}


def _ratios(entry: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Ratio of whole speeds by category."""
    if base is None or not base["speeds"]:
        return None
    return {
        group: speeds["tokens_per_second"] / base["speeds"][group]["tokens_per_second"]
        for group, speeds in entry["speeds"].items()
        if group in base["speeds"]
    }


def table(entries: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> str:
    """The report as a Markdown table."""
    categories = list(dict.fromkeys(group for entry in entries for group in entry["speeds"] if group != "all"))
    head = ["contender", *categories, "all", "x plain", "decoding", "ours / this", "text as plain", "TTFT ms"]
    head += [f"M={number}" for number in rows]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for entry in entries:
        speeds, steps = entry["speeds"], entry["step_ms"]
        same = entry["same_text_as_plain"]
        whole = [_number(speeds.get(group, {}).get("tokens_per_second"), 0) for group in (*categories, "all")]
        lines.append(
            [
                entry["name"],
                *whole,
                _number((entry["over_plain"] or {}).get("all"), 2),
                _number(speeds.get("all", {}).get("decode_tokens_per_second"), 0),
                _number((entry["ours_over_this"] or {}).get("all"), 2),
                f"{same['same']}/{same['prompts']}" if same else "",
                _number(entry["prefill_ms"], 0),
                *(_number(steps.get(str(number)), 2) for number in rows),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
