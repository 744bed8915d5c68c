"""`outrider drafters`: the drafting methods."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def drafters(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, options and their help included.")] = False,
) -> None:
    """List the drafting methods: what each does, needs, and when it helps.

    \b
    outrider drafters
    outrider drafters --json
    """
    from outrider.drafters import registry

    methods = [_describe(name) for name in registry.names()]
    if as_json:
        print(json.dumps(methods, indent=2))
        return
    from outrider.cli.tables import print_table

    print_table(
        ["method", "guesses", "needs", "helps with", "options"],
        [[m["name"], m["summary"], m["needs"], m["helps"], _defaults(m["options"])] for m in methods],
        sys.stdout,
    )


def _defaults(options: list[dict[str, Any]]) -> str:
    return ", ".join(f"{option['name']}={option['default']}" for option in options)


def _describe(name: str) -> dict[str, Any]:
    from outrider.drafters import registry

    method = registry.find(name)
    return {
        "name": name,
        "summary": method.summary,
        "needs": method.needs,
        "helps": method.helps,
        "options": [
            {
                "name": field.name,
                "default": None if field.default is MISSING else field.default,
                "help": field.metadata.get("help", ""),
            }
            for field in fields(method.Options)
        ],
    }
