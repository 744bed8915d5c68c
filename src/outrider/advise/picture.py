"""A profile as charts: what rows cost, what acceptance has to be to pay for them, and what a sweep measured."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from outrider.advise.chart import Chart, Series, page, svg
from outrider.advise.expected import break_even, tokens
from outrider.advise.predict import chain_cost
from outrider.engine.profile import Profile

__all__ = ["LENGTHS", "break_evens", "charts", "profile_page", "sweep_chart", "sweep_errors"]

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)  # of drafts
_LOOKUP = "ngram"  # stands for all that guess without a model


def break_evens(profile: Profile, method: str, batch: int = 1) -> list[tuple[int, float | None]]:
    """(draft length, acceptance above which it pays), None where even full acceptance does not."""
    return [(k, break_even(k, lambda guesses: chain_cost(profile, method, guesses, batch=batch))) for k in LENGTHS]


def charts(profile: Profile) -> list[tuple[str, Chart]]:
    """(heading, chart) of all that the profile has."""
    out = [("What a forward costs by its rows", _cost_chart(profile)), ("Break-even acceptance", _even_chart(profile))]
    if profile.sweep:
        out.append(("Speed-up against acceptance, measured", sweep_chart(profile.sweep)))
    return out


def sweep_chart(cells: Sequence[dict[str, Any]]) -> Chart:
    """Dots are measured, lines the formula with the measured costs of a step."""
    series = []
    for place, k in enumerate(sorted({int(cell["guesses"]) for cell in cells})):
        found = sorted((c for c in cells if c["guesses"] == k), key=lambda c: float(c["acceptance"]))
        series.append(Series(f"{k} guesses", [(c["acceptance"], c["formula"]) for c in found], place % 7))
        series.append(Series("", [(c["acceptance"], c["measured"]) for c in found], place % 7, dots=True))
    return Chart("Speed-up against acceptance", "acceptance of a guess", "speed-up over plain decoding", series, 1.0)


def sweep_errors(profile: Profile) -> list[dict[str, float]]:
    """Of each cell of the sweep: measured, the formula with its steps' costs, and with bare forwards' costs.

    What a step takes beside its forward is the profile's: plainly, and with guesses that were looked up.
    """
    plain, lookup = profile.drafting("none"), profile.drafting(_LOOKUP)
    if plain is None or lookup is None:
        return []
    out = []
    for cell in profile.sweep:
        k, a = int(cell["guesses"]), float(cell["acceptance"])
        price = (cell["forward"] + lookup.extra(k)) / (cell["plain_forward"] + plain.none)
        out.append({**cell, "profile": tokens(a, k) / price})
    return out


def profile_page(profile: Profile) -> str:
    """The whole report as HTML, to be opened from disk."""
    machine = profile.key["machine"]
    intro = (
        f"{profile.name} on {machine['cpu']}, {profile.key['threads']} threads, measured {profile.made} "
        f"with outrider {profile.outrider}"
    )
    sections = [(heading, svg(chart)) for heading, chart in charts(profile)]
    sections.append(("What each method adds to a step", _methods(profile)))
    return page(f"Profile of {profile.name}", intro, sections)


def _cost_chart(profile: Profile) -> Chart:
    series = []
    base = [f for f in profile.forwards if f.context == profile.context]
    for place, batch in enumerate(sorted({f.batch for f in base})):
        points = sorted((f.rows / batch, f.seconds * 1e3) for f in base if f.batch == batch)
        series.append(Series(f"{batch} text{'s' if batch > 1 else ''}", points, place))
    return Chart("Forward by rows", "rows of each text", "milliseconds", series)


def _even_chart(profile: Profile) -> Chart:
    series = []
    batches = sorted({f.batch for f in profile.forwards})
    methods = [d.method for d in profile.draftings if d.method in (_LOOKUP, "draft_model", "medusa", "eagle")]
    for place, batch in enumerate(batches if _LOOKUP in methods else ()):
        points = [(float(k), a) for k, a in break_evens(profile, _LOOKUP, batch) if a is not None]
        if points:
            series.append(Series(f"look-up, {batch} text{'s' if batch > 1 else ''}", points, place))
    for place, method in enumerate(m for m in methods if m != _LOOKUP):
        points = [(float(k), a) for k, a in break_evens(profile, method) if a is not None]
        if points:
            series.append(Series(method, points, 4 + place % 4, dashed=True))
    return Chart("Break-even acceptance", "guesses in a row", "acceptance above which they pay", series)


def _methods(profile: Profile) -> str:
    rows = "\n".join(
        f"<tr><td>{html.escape(d.method)}</td><td>{d.none * 1e3:.3f}</td><td>{d.some * 1e3:.3f}</td>"
        f"<td>{d.guess * 1e3:.3f}</td><td>{d.counts().tokens_per_step:.2f}</td><td>{d.memory / 1e6:,.1f}</td></tr>"
        for d in profile.draftings
    )
    return (
        "<table><tr><th>method</th><th>ms without guesses</th><th>ms with guesses</th><th>ms per guess</th>"
        f"<th>tokens per step</th><th>MB</th></tr>\n{rows}</table>"
        "<p class=faint>Beside the target's forward; tokens per step on the built-in texts.</p>"
    )
