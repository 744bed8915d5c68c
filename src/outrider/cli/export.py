"""`outrider export`: a model in the layout that other engines read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.errors import CommandError

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

LAYOUTS = ("hf",)


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name or path of the model.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write: new, or empty.")],
    to: Annotated[str, typer.Option(metavar="LAYOUT", help="hf: the layout of Hugging Face's transformers.")] = "hf",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="fp32 (quantised weights without loss), bf16 or fp16.")
    ] = "fp32",
) -> None:
    """Write a model as a Hugging Face folder, for vLLM, SGLang, transformers and others that read no GGUF file.

    The tokenizer comes along as it cuts here, with the chat template and all tokens that end a text.

    \b
    outrider export smollm2-135m smollm2-hf
    outrider export model.gguf --to hf --dtype bf16 model-hf
    """
    from outrider.models.export import DTYPES, write_hf
    from outrider.models.load import open_model
    from outrider.models.registry import resolve

    if to not in LAYOUTS:
        raise CommandError(f"--to: {to!r} is none of {', '.join(LAYOUTS)}")
    if dtype not in DTYPES:
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    on_terminal = sys.stderr.isatty()
    try:
        files = open_model(resolve(model))
        place = write_hf(files, folder, dtype, progress=_show if on_terminal else None)
    except OSError as error:
        raise CommandError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        if on_terminal:
            sys.stderr.write("\r\x1b[K")
    size = sum(path.stat().st_size for path in place.iterdir())
    print(f"{place}: {files.name} in {dtype}, {size / (1 << 20):.0f} MiB")


def _show(done: int, total: int) -> None:
    """One line on the terminal, written over itself."""
    sys.stderr.write(f"\r\x1b[K{100 * done // total} % of {total >> 20} MiB")
    sys.stderr.flush()
