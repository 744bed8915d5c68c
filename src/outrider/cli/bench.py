"""`outrider bench`: drafters against plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.bench_kernels import kernels
from outrider.cli.errors import CommandError
from outrider.cli.options import PREDICTION, DraftOptions, EngineOptions, flatten, open_engine, parse_assignments
from outrider.cli.report_file import ReportFile

if TYPE_CHECKING:
    from outrider import Engine, Result, SamplingParams
    from outrider.bench.harness import Measured
    from outrider.bench.prompts import Prompt

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command("kernels")(kernels)

_DEEPEST = 8  # depths that are printed; the report has all
_WARM_UP = "The river ran past the mill, and the river ran past the old bridge, and the river ran past"


@app.callback(invoke_without_command=True)
@flatten
def bench(
    ctx: typer.Context,
    engine: EngineOptions,
    draft: DraftOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="One JSON object per line: prompt, turns or messages, maybe category, prediction.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use the first prompts only.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each 'prompt' into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to write per prompt at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Fixes the draws.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts at once.")] = 1,
    repeat: Annotated[int, typer.Option(help="Runs per prompt; the median time counts.")] = 1,
    as_json: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write the report; - is stdout.")] = None,
) -> None:
    """Measure drafters against plain decoding, equality first.

    Each prompt goes to each drafter in turn and to plain decoding ('none', always run). Tokens and log-probabilities
    must be equal; a difference is printed and makes the exit code 1. Speeds count committed tokens per second of wall
    time, prompt included, after a warm-up. --drafter takes several names: ngram,draft_model; their options are then
    written as --drafter-option METHOD.KEY=VALUE.

    \b
    outrider bench --prompts prompts.jsonl --drafter ngram
    outrider bench --prompts prompts.jsonl --drafter ngram,draft_model --draft-model small.gguf --json out.json
    outrider bench --prompts prompts.jsonl --drafter auto,suffix --drafter-option auto.head=FOLDER
    outrider bench --prompts prompts.jsonl --temperature 0.8 --limit 20 --json -
    """
    if ctx.invoked_subcommand is not None:
        return
    if prompts is None:
        raise CommandError("--prompts: missing; give a file with one JSON object with 'prompt' per line")
    for option, value in (("--batch-size", batch_size), ("--repeat", repeat)):
        if value < 1:
            raise CommandError(f"{option}: {value} is not at least 1")
    from outrider.bench.harness import summarise, with_baseline
    from outrider.bench.prompts import read_prompts
    from outrider.core.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, logprobs=0)
    chosen = read_prompts(prompts, limit, chat=chat)
    drafters = with_baseline(_names(draft))
    report = _Report(as_json)
    opened = _open(engine, draft, drafters, batch_size)
    measured = _measure(opened, drafters, chosen, params, batch_size, repeat)
    runs = [summarise(drafter, engine.dtype, measured[drafter], measured["none"]) for drafter in drafters]
    report.write(runs, opened)
    exact = draft.verify == "match" or temperature == 0
    _print_differences(runs, exact)
    _print_table(runs, sys.stderr if as_json == "-" else sys.stdout)
    if exact and any(run["differences"] for run in runs):
        raise typer.Exit(1)


def _names(draft: DraftOptions) -> list[str]:
    from outrider.drafters import registry

    names = [name.strip() for name in draft.drafter.split(",")]
    for name in names:
        registry.find(name)  # refuses unknown ones
    return names


def _open(engine: EngineOptions, draft: DraftOptions, drafters: Sequence[str], batch_size: int) -> Engine:
    """One engine for all drafters: the weights are loaded once."""
    from dataclasses import replace

    from outrider.drafters import registry

    drafting = [name for name in drafters if name != "none"]
    options = _options(draft, drafting)
    for name, values in options.items():
        registry.options(name, values)  # refuses wrong ones before anything is loaded
    opened = open_engine(engine, replace(draft, drafter="none", drafter_option=None), batch_size=batch_size)
    for name, values in options.items():
        opened.configure(name, values)
    return opened


def _options(draft: DraftOptions, drafting: Sequence[str]) -> dict[str, dict[str, str]]:
    """The options of each drafter: METHOD.KEY=VALUE, or KEY=VALUE where there is one method."""
    out: dict[str, dict[str, str]] = {}
    for key, value in parse_assignments("--drafter-option", draft.drafter_option or ()).items():
        name, dot, option = key.partition(".")
        if not dot:
            if len(drafting) != 1:
                raise CommandError(
                    f"--drafter-option: {key!r} could be any of {len(drafting)} drafters'; write METHOD.{key}=..."
                )
            name, option = drafting[0], key
        if name not in drafting:
            raise CommandError(f"--drafter-option: {key!r} is for {name!r}, which is not among --drafter")
        out.setdefault(name, {})[option] = value
    return out


def _measure(
    engine: Engine,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch_size: int,
    repeat: int,
) -> dict[str, list[Measured]]:
    from dataclasses import replace

    from outrider.bench.harness import measure
    from outrider.engine.speculation import Speculation

    _check_prompts(engine, drafters, prompts)

    def generate(drafter: str, batch: Sequence[Prompt]) -> list[Result]:
        each = [
            Speculation(drafter=drafter, prediction=prompt.prediction if drafter == PREDICTION else None)
            for prompt in batch
        ]
        return engine.generate([prompt.content for prompt in batch], params, speculation=each)

    warm_up = replace(params, max_tokens=min(16, params.max_tokens))
    for drafter in drafters:  # loads what the drafter needs, and wakes the threads
        engine.generate([_WARM_UP], warm_up, speculation=Speculation(drafter=drafter))
    with _progress(len(drafters) * len(prompts) * repeat) as progress:
        return measure(generate, drafters, prompts, batch_size=batch_size, repeat=repeat, progress=progress)


def _check_prompts(engine: Engine, drafters: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """Refuse a prompt that does not fit before hours of measuring, by its line."""
    limit = min(engine.config.context, engine.runner.pages.count * engine.runner.pages.page_size)
    for prompt in prompts:
        if PREDICTION in drafters and prompt.prediction is None:
            raise CommandError(
                f"--prompts: line {prompt.line} has no 'prediction', which the drafter of that name needs"
            )
        length = len(engine.encode(prompt.content))
        if length >= limit:
            raise CommandError(
                f"--prompts: line {prompt.line} has {length:,} tokens and leaves no room in the {limit:,} of "
                "context or cache; shorten it, or give --cache-tokens"
            )


class _Report:
    """The JSON report, where one is wanted."""

    def __init__(self, path: str | None) -> None:
        self._file = None if path in (None, "-") else ReportFile(str(path))
        self._printed = path == "-"

    def write(self, runs: list[dict[str, Any]], engine: Engine) -> None:
        if self._file is None and not self._printed:
            return
        from outrider import __version__
        from outrider.bench import environment

        files = engine.files
        text = json.dumps(
            {
                "runs": runs,
                "model": {"name": files.name, "quantisation": files.quantisation, "sha256": files.sha256()},
                "machine": environment.machine(),
                "versions": {"outrider": __version__, **environment.versions()},
                "git": environment.git(),
                "argv": ["outrider", *sys.argv[1:]],
            },
            indent=2,
        )
        if self._file is None:
            print(text)
        else:
            self._file.write(text + "\n")


def _print_differences(runs: Sequence[dict[str, Any]], exact: bool) -> None:
    for run in runs:
        if run["differences"] and not exact:
            print(
                f"{run['drafter']}: {len(run['differences'])} texts differ from plain decoding's, as they may: "
                "rejection sampling keeps the distribution, not the text",
                file=sys.stderr,
            )
            continue
        for entry in run["differences"]:
            print(
                f"DIFFERENT: {entry['drafter']}, prompt {entry['prompt']} (line {entry['line']}), position "
                f"{entry['position']}, {entry['what']}: {entry['drafted']!r} instead of {entry['plain']!r}",
                file=sys.stderr,
            )


def _print_table(runs: Sequence[dict[str, Any]], file: Any) -> None:
    from outrider.cli.tables import print_table

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print_table(
        ["drafter", "identical", "tokens/s", "speed-up", "acceptance length", "TTFT p50 / p95 ms", "TPOT p50 / p95 ms"],
        [
            [
                run["drafter"],
                f"{run['identical']}/{run['prompts']}",
                number(run["tokens_per_second"], ".1f"),
                number(run["speedup"], ".2f"),
                number(run["mean_acceptance_length"], ".2f"),
                " / ".join(number(run["ttft_ms"][key], ".1f") for key in ("p50", "p95")),
                " / ".join(number(run["tpot_ms"][key], ".2f") for key in ("p50", "p95")),
            ]
            for run in runs
        ],
        file,
        numbers=range(1, 7),
    )
    drafted, categories = runs[1:], list(runs[0]["by_category"])
    columns = [run["drafter"] for run in drafted]
    if len(categories) > 1:
        for title, key in (("speed-up", "speedup"), ("acceptance length", "mean_acceptance_length")):
            print_table(
                [f"{title} by category", *columns],
                [[name, *(number(run["by_category"][name][key], ".2f") for run in drafted)] for name in categories],
                file,
                numbers=range(1, len(runs)),
            )
    deepest = min(_DEEPEST, max((len(run["acceptance_by_position"]) for run in drafted), default=0))
    if deepest:
        print_table(
            ["drafts right to depth", *columns],
            [
                [str(depth + 1), *(number(_at(run["acceptance_by_position"], depth), ".2f") for run in drafted)]
                for depth in range(deepest)
            ],
            file,
            numbers=range(1, len(runs)),
        )


def _at(values: Sequence[float], place: int) -> float | None:
    return values[place] if place < len(values) else None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, list[Result]], None]]:
    """A bar on standard error, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda drafter, results: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(drafter: str, results: list[Result]) -> None:
            bar.update(task, advance=len(results), description=drafter)

        yield advance
