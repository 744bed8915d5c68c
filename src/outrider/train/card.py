"""The model card that lies beside trained weights."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.train.loop import Report

__all__ = ["write_card"]


def write_card(folder: Path, title: str, what: str, notes: Mapping[str, Any], report: Report, command: str) -> None:
    """Writes README.md: what it is, for which target, from which data, how well it guesses, how to make it again."""
    points = [
        f"**Target**: {notes['target']}, SHA-256 `{notes['target_sha256']}`. Another target gets a warning, for the "
        "guesses would be worse. The text is the target's own in any case: a drafter decides how soon it comes, "
        "never what it is.",
        f"**Data**: {report.tokens:,} answer tokens seen, {notes['tokens_on_disk']:,} different ones, written by the "
        f"target itself at temperatures {notes['temperatures']}"
        + (f", to {notes['about']}" if notes["about"] else "")
        + "; no prompt that a drafter is measured with.",
    ]
    if report.steps:
        points.append(
            f"**Training**: {report.steps:,} steps, {report.seconds / 60:,.0f} minutes; these are the weights of step "
            f"{report.best_step:,}."
        )
    if (before := notes.get("began_with")) is not None:
        points[-1] += (
            f" It began with the weights of another training, of {before['step']:,} steps and {before['tokens']:,} "
            f"tokens in {before['seconds'] / 60:,.0f} minutes."
        )
    if (best := report.best) is not None:
        depths, tops = (", ".join(f"{value:.1%}" for value in shares) for shares in (best.by_depth, best.top))
        points.append(
            f"**Acceptance** on held-out prompts at temperature 0: the first 1, 2 ... guesses are all right at "
            f"{depths} of the positions; {best.length:.2f} tokens per step of a chain. The next token but one is "
            f"among the best 1, 2 ... guesses at {tops}."
        )
    if notes["found"]:
        points.append(f"**Held-out answers**: {notes['found']}.")
    if notes["licence"]:
        points.append(f"**Licence**: {notes['licence']}.")
    text = [f"# {title}", "", what, "", *(textwrap.fill(f"- {point}", 118, subsequent_indent="  ") for point in points)]
    (folder / "README.md").write_text("\n".join([*text, "", "Made again with", "", f"    {command}", ""]))
