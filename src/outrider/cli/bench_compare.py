"""`outrider bench compare` and `outrider bench report`: two reports against each other, and one as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from outrider.cli.bench_output import Output
from outrider.cli.errors import CommandError

__all__ = ["compare", "report"]


def compare(
    old: Annotated[Path, typer.Argument(metavar="A.json", help="The report before.")],
    new: Annotated[Path, typer.Argument(metavar="B.json", help="The report after.")],
    metric: Annotated[
        Literal["speed", "speedup"],
        typer.Option(help="speed: tokens/s, on one machine. speedup: over plain decoding, on any."),
    ] = "speed",
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit code 1 if a run is slower by more, as in 5%, and not by noise."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what changed between two reports of the same prompts, and what is no more than noise.

    A change counts if the 95 % interval of the ratio, over the prompts, leaves out 1, and if it is larger than the
    repeats in either report scatter. Texts that newly differ from plain decoding's make the exit code 1 too, with
    --fail-if-slower.

    \b
    outrider bench compare before.json after.json
    outrider bench compare main.json branch.json --metric speedup --fail-if-slower 5%
    """
    from outrider.bench import compare as comparing
    from outrider.bench.report import read_report

    limit = None if fail_if_slower is None else _share(fail_if_slower)
    before, after = read_report(old), read_report(new)
    found = comparing.compare(before, after, metric)
    if as_json:
        print(json.dumps(found.told(), indent=1))
    else:
        _print(found)
    if limit is not None:
        slower = [change.name for change in found.changes if change.slower_by(limit)]
        wrong = [change.name for change in found.changes if change.newly_differs]
        for names, what in ((slower, f"slower by more than {limit:.3g}"), (wrong, "texts differ that did not before")):
            if names:
                print(f"{what}: {', '.join(names)}", file=sys.stderr)
        if slower or wrong:
            raise typer.Exit(1)


def _share(text: str) -> float:
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise CommandError(f"--fail-if-slower: {text!r} is not a share like 5% or 0.05")
    return share


def _print(found: object) -> None:
    from outrider.bench.compare import Comparison
    from outrider.bench.tables import number
    from outrider.cli.tables import print_table

    assert isinstance(found, Comparison)
    print_table(
        ["run", "before", "after", "change", "95 % of it", "repeats scatter", "identical texts", ""],
        [
            [
                change.name,
                number(change.old),
                number(change.new),
                f"{change.ratio - 1:+.1%}",
                "-" if change.interval is None else f"{change.interval[0] - 1:+.1%} to {change.interval[1] - 1:+.1%}",
                f"{change.scatter:.1%}",
                change.texts,
                change.verdict,
            ]
            for change in found.changes
        ],
        sys.stdout,
        numbers=range(1, 6),
    )
    for title, lines in (
        ("only before", found.only_old),
        ("only after", found.only_new),
        ("not the same either", found.circumstances),
    ):
        for line in lines:
            print(f"{title}: {line}")


def report(
    source: Annotated[Path, typer.Argument(metavar="REPORT.json", help="What outrider bench --json wrote.")],
    as_html: Annotated[
        str | None, typer.Option("--html", metavar="OUT", help="Write it as one page, with charts.")
    ] = None,
) -> None:
    """Show a report again: as tables, and as one page that opens from disk.

    \b
    outrider bench report out.json
    outrider bench report out.json --html out.html
    """
    from outrider.bench.report import read_report

    output = Output(None, as_html)
    output.write(read_report(source))
