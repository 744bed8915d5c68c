"""`outrider models`: the known models."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False) -> None:
    """List the known models: size, licence, and where they lie once they are pulled.

    Any other GGUF file or Hugging Face folder can be given to --model by its path.

    \b
    outrider models
    outrider models --json
    """
    from outrider.models import registry

    rows = registry.listing()
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "name": row.name,
                        "bytes": row.size,
                        "licence": row.licence,
                        "path": None if row.path is None else str(row.path),
                        "source": row.source,
                    }
                    for row in rows
                ],
                indent=2,
            )
        )
        return
    from outrider.cli.tables import print_table

    print_table(
        ["name", "MiB", "licence", "path"],
        [
            [
                row.name,
                "?" if row.size is None else f"{row.size / (1 << 20):.0f}",
                row.licence or "?",
                f"not here: outrider pull {row.name}" if row.path is None else str(row.path),
            ]
            for row in rows
        ],
        sys.stdout,
        numbers=[1],
    )
