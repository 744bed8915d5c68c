"""`outrider profile`: what steps cost on this machine, and which acceptance pays for them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.errors import CommandError
from outrider.cli.report_file import ReportFile

if TYPE_CHECKING:
    from outrider import Engine
    from outrider.advise.compatibility import Compatibility
    from outrider.engine.profile import Profile

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name or path of the model.")],
    draft: Annotated[
        str | None, typer.Option(metavar="D", help="A draft model or head to measure besides those that come along.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, int8, int4, bf16 or fp32.")] = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", help="[default: all cores]")] = None,
    acceptance_sweep: Annotated[
        bool, typer.Option("--acceptance-sweep", help="Also measure speed-up against acceptance; takes minutes.")
    ] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds of the forwards; medians count.")] = 15,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens written per text and method.")] = 48,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a copy: .html with plots, .svg, or .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure what steps cost here: by rows, batch and context, and what each drafting method adds.

    Says from which acceptance on a draft pays, by its length and the batch. The profile is kept in the cache folder,
    where 'outrider advise' and 'outrider check' find it. Leave the machine alone meanwhile.

    \b
    outrider profile smollm2-135m
    outrider profile smollm2-135m --out profile.html
    outrider profile target.gguf --draft small.gguf --dtype int8 --threads 4
    outrider profile smollm2-135m --acceptance-sweep --out sweep.html
    """
    for option, value in (("--rounds", rounds), ("--tokens", tokens)):
        if value < 2:
            raise CommandError(f"{option}: {value} is not at least 2")
    kind = None if out is None else Path(out).suffix
    if kind not in (None, ".html", ".svg", ".json"):
        raise CommandError(f"--out: {out!r} ends in none of .html, .svg, .json")
    file = None if out is None else ReportFile(out, "--out")
    found = _measure(model, draft, dtype, threads, rounds, tokens, acceptance_sweep)
    place = found.save()
    if file is not None:
        file.write(_written(found, str(kind)))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    _print(found)
    print(f"kept in {place}", file=sys.stderr)


def _measure(
    model: str, draft: str | None, dtype: str, threads: int | None, rounds: int, tokens: int, swept: bool
) -> Profile:
    from outrider import __version__
    from outrider.advise.measure import Plan, measure
    from outrider.advise.sweep import sweep
    from outrider.cli.drafts import drafting_engine

    plan = Plan(rounds=rounds, tokens=tokens)
    drafts = _drafts(model, draft)
    engine = drafting_engine(
        model,
        drafts.get("given"),
        dtype=dtype,
        threads=threads,
        cache_tokens=plan.cache_rows,
        batch_size=1,
    )
    found = measure(engine.loaded, _available(engine), version=__version__, plan=plan, progress=_progress)
    for draft_of in drafts.values():
        for drafting in found.draftings:
            if drafting.method == draft_of.method:
                drafting.draft_sha256 = draft_of.sha256
    if swept:
        cells = sweep(engine.loaded, progress=lambda done, total: _progress("acceptance sweep", done, total))
        found.sweep = [cell.as_dict() for cell in cells]
    return found


def _drafts(model: str, given: str | None) -> dict[str, Compatibility]:
    """The drafts that will be measured: those that come along, and the one that was given, which comes last."""
    from outrider.advise.compatibility import compare
    from outrider.cli.drafts import opened, shipped
    from outrider.models.shipped import find_shipped

    target = opened(model)
    out: dict[str, Compatibility] = {}
    for kind in ("draft", "medusa", "eagle"):
        path = find_shipped(kind, target.sha256())
        if path is not None:
            out[kind] = compare(target, str(path))
    if given is not None:
        found = compare(target, shipped(target, given))
        refused = found.refused
        if refused is not None:
            raise CommandError(f"--draft: {refused.told}")
        out["given"] = found
    return out


def _available(engine: Engine) -> dict[str, Engine]:
    """The methods that can run here; those that cannot are named."""
    from outrider.advise.measure import METHODS
    from outrider.drafters.base import DrafterError

    out: dict[str, Engine] = {}
    for method in METHODS:
        try:
            engine.prepare(method)
        except DrafterError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            out[method] = engine
    return out


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "" if done < total else "\r\033[K"
        print(f"\r{what}: {done} of {total}\033[K", end=end, file=sys.stderr, flush=True)


def _written(found: Profile, kind: str) -> str:
    from outrider.advise.chart import svg
    from outrider.advise.picture import charts, profile_page

    if kind == ".json":
        return json.dumps(asdict(found), indent=1) + "\n"
    if kind == ".svg":
        return svg(charts(found)[-1][1], style=True) + "\n"
    return profile_page(found)


def _print(found: Profile) -> None:
    from outrider.advise.chart import bar
    from outrider.advise.picture import LENGTHS, break_evens, sweep_errors
    from outrider.cli.tables import print_table

    one = found.seconds(1)
    base = sorted((f.rows, f.seconds) for f in found.forwards if f.batch == 1 and f.context == found.context)
    most = base[-1][1]
    print_table(
        ["rows", "ms", "of one row", ""],
        [[str(rows), f"{s * 1e3:.2f}", f"{s / one:.2f}", bar(s, most)] for rows, s in base],
        sys.stdout,
        numbers=range(3),
    )
    print_table(
        ["method", "ms without guesses", "ms with guesses", "ms per guess", "tokens per step", "MB"],
        [
            [
                d.method,
                f"{d.none * 1e3:.3f}",
                f"{d.some * 1e3:.3f}",
                f"{d.guess * 1e3:.3f}",
                f"{d.counts().tokens_per_step:.2f}",
                f"{d.memory / 1e6:.1f}",
            ]
            for d in found.draftings
        ],
        sys.stdout,
        numbers=range(1, 6),
    )
    batches = sorted({f.batch for f in found.forwards})
    drafting = {d.method for d in found.draftings}
    columns = [("ngram", batch) for batch in batches if "ngram" in drafting]
    columns += [(method, 1) for method in ("draft_model", "medusa", "eagle") if method in drafting]
    shown = [dict(break_evens(found, method, batch)) for method, batch in columns]
    print_table(
        ["pays above", *(_title(method, batch) for method, batch in columns)],
        [[f"{k} guesses", *("never" if e[k] is None else f"{e[k]:.2f}" for e in shown)] for k in LENGTHS],
        sys.stdout,
        numbers=range(1, len(columns) + 1),
    )
    if found.sweep:
        _print_sweep(sweep_errors(found))


def _title(method: str, batch: int) -> str:
    return method if method != "ngram" else "look-up" + (f", batch {batch}" if batch > 1 else "")


def _print_sweep(cells: list[dict[str, float]]) -> None:
    from outrider.cli.tables import print_table

    acceptances = sorted({cell["acceptance"] for cell in cells})
    lengths = sorted({cell["guesses"] for cell in cells})
    by_place = {(cell["guesses"], cell["acceptance"]): cell for cell in cells}
    print_table(
        ["speed-up measured / formula / profile", *(f"a = {a:g}" for a in acceptances)],
        [
            [
                f"{k:g} guesses",
                *(
                    " / ".join(f"{by_place[k, a][name]:.2f}" for name in ("measured", "formula", "profile"))
                    for a in acceptances
                ),
            ]
            for k in lengths
        ],
        sys.stdout,
        numbers=range(1, len(acceptances) + 1),
    )

    def worst(one: str, other: str) -> float:
        return max(abs(cell[one] / cell[other] - 1) for cell in cells)

    print(
        f"largest difference from what was measured: formula {worst('formula', 'measured'):.1%}, "
        f"profile {worst('profile', 'measured'):.1%}"
    )
