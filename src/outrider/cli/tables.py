"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

__all__ = ["print_table"]


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO, *, numbers: Sequence[int] = ()
) -> None:
    """Print rows under their columns; the columns listed in `numbers` are set to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    # A pipe has no width: do not fold a path or a number in two there.
    console = Console(file=file, width=None if file.isatty() else 200, highlight=False)
    console.print(table)
