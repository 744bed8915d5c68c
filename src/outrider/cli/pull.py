"""`outrider pull`: fetch a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_MIB = 1 << 20


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from 'outrider models', or hf:ORG/REPO.")],
) -> None:
    """Fetch a model into the cache folder, and check what has come. Does nothing if it is there.

    The cache folder is $OUTRIDER_CACHE, or else the user's.

    \b
    outrider pull smollm2-135m
    outrider pull hf:HuggingFaceTB/SmolLM2-360M-Instruct
    """
    from outrider.models import registry

    on_terminal = sys.stderr.isatty()
    try:
        path = registry.pull(name, _show if on_terminal else None)
    finally:
        if on_terminal:
            sys.stderr.write("\r\x1b[K")
    print(f"{name}: {path}")


def _show(step: str, done: int, total: int) -> None:
    """One line on the terminal, written over itself."""
    share = f" {100 * done // total} % of {total // _MIB} MiB" if total else ""
    sys.stderr.write(f"\r\x1b[K{step}{share}")
    sys.stderr.flush()
