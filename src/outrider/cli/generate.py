"""`outrider generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.errors import CommandError
from outrider.cli.options import (
    DEFAULT_DRAFTER,
    PREDICTION,
    DraftOptions,
    EngineOptions,
    SamplingOptions,
    check_draft_model,
    flatten,
    open_engine,
)
from outrider.cli.prompt import read_prompt, read_text

if TYPE_CHECKING:
    from outrider import Delta, Engine, Speculation

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@flatten
def generate(
    sampling: SamplingOptions,
    engine: EngineOptions,
    draft: DraftOptions,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="The system message, with --chat.")] = None,
    prediction: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text that you expect; what of it is right comes sooner.")
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark each token by who wrote it: drafter or model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, not the text.")] = False,
) -> None:
    """Continue a prompt, or answer it with --chat. The text comes as it is written.

    \b
    outrider generate "The sea is"
    outrider generate --chat "Name three rivers." --temperature 0.8 --seed 1
    outrider generate --chat --file question.txt --show-drafts
    cat story.txt | outrider generate - --max-tokens 64 --json
    outrider generate --chat --file edit.txt --prediction old.py --max-tokens 800
    outrider generate "def area(r):" --drafter none
    """
    if system is not None and not chat:
        raise CommandError("--system: there is no system message without --chat; add --chat")
    if as_json and show_drafts:
        raise CommandError("--show-drafts: --json already tells the origin of each token; leave out one of the two")
    if sampling.logprobs is not None and not as_json:
        raise CommandError("--logprobs: only --json shows them; add --json")
    params = sampling.params()
    check_draft_model(draft)
    draft, speculation = _prediction(draft, prediction)
    text = read_prompt(prompt, file)
    request: str | list[dict[str, str]] = text
    if chat:
        before = [] if system is None else [{"role": "system", "content": system}]
        request = [*before, {"role": "user", "content": text}]

    opened = open_engine(engine, draft)
    if as_json:
        from outrider.cli.report import result_json

        (result,) = opened.generate([request], params, speculation=speculation)
        print(json.dumps(result_json(result, model=opened.files.name, drafter=draft.drafter, verify=draft.verify)))
        return
    stream = opened.stream(request, params, speculation=speculation)
    _write(stream, opened, show_drafts)
    if sys.stderr.isatty():
        from outrider.cli.report import summary

        assert stream.result is not None
        print(f"\x1b[2m{summary(stream.result)}\x1b[0m", file=sys.stderr)


def _prediction(draft: DraftOptions, file: Path | None) -> tuple[DraftOptions, Speculation | None]:
    """A prediction chooses its own drafter; that one is no use without."""
    if file is None:
        if draft.drafter == PREDICTION:
            raise CommandError(f"--drafter: {PREDICTION} guesses from the text that you expect; add --prediction FILE")
        return draft, None
    if draft.drafter not in (DEFAULT_DRAFTER, PREDICTION):
        raise CommandError(f"--prediction: it is for the drafter {PREDICTION!r}, not {draft.drafter!r}; leave one out")
    from outrider import Speculation

    return replace(draft, drafter=PREDICTION), Speculation(prediction=read_text("--prediction", file))


def _write(stream: Any, engine: Engine, show_drafts: bool) -> None:
    """Print the text as it comes, and end with a new line."""
    painter = None
    if show_drafts:
        from outrider.cli.origins import OriginPainter, wants_colour

        tokenizer = engine.tokenizer
        painter = OriginPainter(tokenizer.token_bytes, tokenizer.is_special, colour=wants_colour(sys.stdout))
    last = "\n"
    delta: Delta
    try:
        for delta in stream:
            if delta.text:
                sys.stdout.write(painter.paint(delta) if painter else delta.text)
                sys.stdout.flush()
                last = delta.text[-1]
            elif painter:
                painter.paint(delta)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            print()  # the shell's prompt gets a line of its own
        raise
    if last != "\n":
        print()
    if painter:
        print(f"\n{painter.legend()}")
    sys.stdout.flush()
