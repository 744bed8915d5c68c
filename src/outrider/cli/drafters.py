"""`outrider drafters`: the drafting methods."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

from outrider.cli.errors import CommandError
from outrider.cli.options import memory_line

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def drafters(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Tell each method's memory beside this model.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --model: the second model of draft_model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, options and their help included.")] = False,
) -> None:
    """List the drafting methods: what each does, needs and holds, and when it helps.

    Memory is what a method adds to the model's own, told without loading it; texts that run add a little.

    \b
    outrider drafters
    outrider drafters --model smollm2-135m
    outrider drafters --json
    """
    from outrider.drafters import registry

    if draft_model is not None and model is None:
        raise CommandError("--draft-model: memory is told beside a model; add --model")
    memory = {} if model is None else _memory(model, draft_model)
    methods = [{**_describe(name), "memory": memory.get(name)} for name in registry.names()]
    if as_json:
        print(json.dumps(methods, indent=2))
        return
    from outrider.cli.tables import print_table

    print_table(
        ["method", "guesses", "needs", *(["memory"] if model else []), "helps with", "options"],
        [
            [
                m["name"],
                m["summary"],
                m["needs"],
                *([_told(m["memory"])] if model else []),
                m["helps"],
                _defaults(m["options"]),
            ]
            for m in methods
        ],
        sys.stdout,
    )


def _memory(model: str, draft_model: str | None) -> dict[str, dict[str, int] | str]:
    """Bytes by purpose of each method beside the model, or why it cannot run there."""
    from outrider import Engine
    from outrider.drafters import registry
    from outrider.drafters.base import DrafterError

    engine = Engine(model, draft_model=draft_model)
    out: dict[str, dict[str, int] | str] = {}
    for name in registry.names():
        try:
            out[name] = engine.forecast(name)
        except DrafterError as error:
            out[name] = str(error).removeprefix(f"{name}: ")
    return out


def _told(memory: dict[str, int] | str) -> str:
    return f"not here: {memory}" if isinstance(memory, str) else memory_line(memory)


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
