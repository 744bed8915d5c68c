"""What `outrider bench` hands out: a report, a page, tables, and a bar while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outrider.cli.errors import CommandError
from outrider.cli.report_file import ReportFile

__all__ = ["Output", "bar", "print_report"]


class Output:
    """Where the report goes: `--json` (a file, or - for standard output) and `--html`. Refuses bad paths at once."""

    def __init__(self, as_json: str | None, as_html: str | None) -> None:
        if as_html == "-":
            raise CommandError("--html: give a file; only --json goes to standard output")
        self._json = None if as_json in (None, "-") else ReportFile(str(as_json))
        self._html = None if as_html is None else ReportFile(as_html, "--html")
        self._printed = as_json == "-"

    @property
    def wanted(self) -> bool:
        return self._printed or self._json is not None or self._html is not None

    def write(self, report: Mapping[str, Any]) -> None:
        """Write the files, and print the tables where the report itself is not on standard output."""
        text = json.dumps(report, indent=1, allow_nan=False)
        if self._json is not None:
            self._json.write(text + "\n")
        if self._html is not None:
            from outrider.bench.page import page

            self._html.write(page(report))
        if self._printed:
            print(text)
        print_report(report, sys.stderr if self._printed else sys.stdout)


def print_report(report: Mapping[str, Any], file: Any) -> None:
    """The brief tables, and the verdict below them."""
    from outrider.bench.tables import tables
    from outrider.bench.verdict import verdict
    from outrider.cli.tables import print_table

    for table in tables(report):
        if table.brief:
            columns = [table.title, *table.columns[1:]] if table.columns[0] in ("category", "depth") else table.columns
            print_table(columns, table.rows, file, numbers=range(table.first, len(table.columns)))
    print(verdict(report), file=file)


@contextmanager
def bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on standard error, on a terminal only: `advance(steps, what is known by now)`."""
    if not sys.stderr.isatty():
        yield lambda steps, told: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance(steps: int, told: str) -> None:
            progress.update(task, advance=steps, description=told)

        yield advance
