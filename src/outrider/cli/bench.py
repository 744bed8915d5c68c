"""`outrider bench`: drafters against plain decoding, and servers side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from outrider.cli.bench_compare import compare, report
from outrider.cli.bench_kernels import kernels
from outrider.cli.bench_output import Output, bar
from outrider.cli.bench_servers import ServerOptions, bench_servers
from outrider.cli.errors import CommandError
from outrider.cli.options import (
    PREDICTION,
    DraftOptions,
    EngineOptions,
    GuessOptions,
    flatten,
    open_engine,
    parse_assignments,
)

if TYPE_CHECKING:
    from outrider import Engine, Result
    from outrider.bench.harness import Contender, Measured
    from outrider.bench.prompts import Prompt

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command("kernels")(kernels)
app.command("compare")(compare)
app.command("report")(report)

Rule = Literal["match", "rejection"]
_WARM_UP = "The river ran past the mill, and the river ran past the old bridge, and the river ran past"


@app.callback(invoke_without_command=True)
@flatten
def bench(
    ctx: typer.Context,
    engine: EngineOptions,
    draft: GuessOptions,
    servers: ServerOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="One JSON object per line: prompt, turns or messages, maybe category, prediction.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Built-in prompts: copy, json, random, humaneval, mt-bench; spec-bench with --prompts."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use the first prompts only.")] = None,
    per_category: Annotated[int | None, typer.Option(metavar="N", help="Use so many of each category at most.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each 'prompt' into the model's chat template.")] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens to write per prompt at most.")
    ] = 128,
    temperature: Annotated[
        str, typer.Option("--temperature", "-t", metavar="T,...", help="0 is greedy; several are measured in one run.")
    ] = "0",
    verify: Annotated[str, typer.Option(metavar="RULE,...", help="match, rejection, or both side by side.")] = "match",
    seed: Annotated[int, typer.Option(metavar="N", help="Fixes the draws, and the arrivals of --rate.")] = 0,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Prompts at once.")] = 1,
    repeat: Annotated[int, typer.Option(metavar="N", help="Runs per prompt; the median time counts.")] = 1,
    as_json: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write the report; - is stdout.")] = None,
    as_html: Annotated[
        str | None, typer.Option("--html", metavar="OUT", help="Write the report as one page, with charts.")
    ] = None,
) -> None:
    """Measure drafters against plain decoding, equality first; or servers side by side, with --url.

    Each prompt goes to each drafter in turn and to plain decoding ('none', always run). Tokens and log-probabilities
    must be equal; a difference is printed and makes the exit code 1. Speeds count committed tokens per second of wall
    time, prompt included, after a warm-up. --drafter takes several names: ngram,draft_model; their options are then
    written as --drafter-option METHOD.KEY=VALUE.

    With --url, OpenAI-compatible servers (vLLM, llama.cpp, SGLang, outrider serve) get the same prompts in turns, under
    closed loops of users (--concurrency) or open loops of arrivals (--rate). docs/bench.md explains it all.

    \b
    outrider bench --prompts prompts.jsonl --drafter ngram
    outrider bench --suite copy --drafter auto,suffix --html report.html
    outrider bench --suite spec-bench --prompts question.jsonl --per-category 4 --json out.json
    outrider bench --suite mt-bench -t 0.8,1.0 --verify match,rejection --drafter eagle
    outrider bench --prompts prompts.jsonl --drafter ngram,draft_model --draft-model small.gguf
    outrider bench --prompts prompts.jsonl --drafter auto,suffix --drafter-option auto.head=FOLDER
    \b
    outrider bench --suite json --url http://127.0.0.1:8000 --concurrency 1,4,16
    outrider bench --suite json --url plain=http://HOST:8000 --url drafted=http://HOST:8001 --baseline plain
    outrider bench --suite mt-bench --url http://HOST:8000 --rate 2,4,8 --slo ttft=200ms,tpot=20ms
    \b
    outrider bench compare before.json after.json --fail-if-slower 5%
    outrider bench report out.json --html out.html
    """
    if ctx.invoked_subcommand is not None:
        return
    if prompts is None and suite is None:
        raise CommandError(
            "--prompts: missing; give a file with one JSON object with 'prompt' per line, or a built-in --suite"
        )
    for option, value in (("--batch-size", batch_size), ("--repeat", repeat)):
        if value < 1:
            raise CommandError(f"{option}: {value} is not at least 1")
    _refuse_the_other_kind(ctx, bool(servers.url))
    temperatures, rules = _temperatures(temperature), _rules(verify)
    chosen, source = _read(prompts, suite, limit, per_category, chat)
    output = Output(as_json, as_html)
    if servers.url:
        if len(temperatures) > 1:
            raise CommandError(f"--temperature: {temperature!r}: with --url give one; run again for another")
        given = _is_given(ctx, "model")
        failed = bench_servers(
            servers,
            chosen,
            source,
            output,
            model=engine.model if given else None,
            max_tokens=max_tokens,
            temperature=temperatures[0],
            seed=seed,
            repeat=repeat,
        )
        if failed:
            raise typer.Exit(1)
        return
    from outrider.bench.harness import contenders

    drafters = _names(draft)
    plan = contenders(drafters, temperatures, rules)
    opened = _open(engine, draft, drafters, batch_size)
    settings = {
        "max_tokens": max_tokens,
        "seed": seed,
        "batch_size": batch_size,
        "repeat": repeat,
        "adapt": draft.adapt,
        "max_draft_tokens": draft.max_draft_tokens,
        "drafter_options": list(draft.drafter_option or ()),
        "draft_model": draft.draft_model,
        "runner": engine.runner,
        "dtype": engine.dtype,
        "threads": engine.threads,
    }
    measured = _measure(opened, plan, chosen, max_tokens, seed, batch_size, repeat)
    document = _document(opened, measured, chosen, source, settings, costs=output.wanted)
    output.write(document)
    _print_differences(document["runs"])
    if any(run["exact"] and run["differences"] for run in document["runs"]):
        raise typer.Exit(1)


def _is_given(ctx: typer.Context, name: str) -> bool:
    found = ctx.get_parameter_source(name)
    return found is not None and found.name == "COMMANDLINE"


def _refuse_the_other_kind(ctx: typer.Context, with_servers: bool) -> None:
    """An option that would have no effect is refused by its name."""
    engine_only = [field.name for group in (EngineOptions, GuessOptions) for field in fields(group)]
    engine_only = [*(name for name in engine_only if name != "model"), "verify", "batch_size"]
    server_only = [field.name for field in fields(ServerOptions) if field.name != "url"]
    for name in engine_only if with_servers else server_only:
        if _is_given(ctx, name):
            option = "--" + name.replace("_", "-")
            raise CommandError(
                f"{option}: a server runs with its own; leave it out with --url"
                if with_servers
                else f"{option}: is for servers; name one with --url"
            )


def _temperatures(text: str) -> list[float]:
    from outrider.core.params import SamplingParams

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"--temperature: {text!r} is not a list of numbers like 0,0.8") from None
    return [SamplingParams(temperature=value).temperature for value in values]  # refuses what is none


def _rules(text: str) -> list[Rule]:
    known = get_args(Rule)
    rules: list[Rule] = [rule for part in text.split(",") for rule in known if rule == part.strip()]
    if len(rules) != text.count(",") + 1:
        raise CommandError(f"--verify: {text!r} is not match, rejection or match,rejection")
    return rules


def _read(
    path: Path | None, suite: str | None, limit: int | None, per_category: int | None, chat: bool
) -> tuple[list[Prompt], str]:
    """The prompts, and where they came from."""
    from outrider.bench.prompts import cut, read_prompts
    from outrider.bench.suites import read_suite

    if suite is not None:
        found = read_suite(suite, path, limit=limit, per_category=per_category, chat=chat)
        return found, f"--suite {suite}" + (f" of {path}" if path else "")
    assert path is not None
    if per_category is None:
        return read_prompts(path, limit, chat=chat), str(path)
    return cut(read_prompts(path, chat=chat), limit, per_category), str(path)


def _names(draft: GuessOptions) -> list[str]:
    from outrider.drafters import registry

    names = [name.strip() for name in draft.drafter.split(",")]
    for name in names:
        registry.find(name)  # refuses unknown ones
    return names


def _open(engine: EngineOptions, draft: GuessOptions, drafters: Sequence[str], batch_size: int) -> Engine:
    """One engine for all drafters: the weights are loaded once."""
    from outrider.drafters import registry

    drafting = [name for name in drafters if name != "none"]
    options = _options(draft, drafting)
    for name, values in options.items():
        registry.options(name, values)  # refuses wrong ones before anything is loaded
    plain = DraftOptions(**(asdict(draft) | {"drafter": "none", "drafter_option": None}))
    # each drafter gets each prompt, and all of them shall feed it
    opened = open_engine(engine, plain, batch_size=batch_size, enable_prefix_caching=False)
    for name, values in options.items():
        opened.configure(name, values)
    return opened


def _options(draft: GuessOptions, drafting: Sequence[str]) -> dict[str, dict[str, str]]:
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
    plan: Sequence[Contender],
    prompts: Sequence[Prompt],
    max_tokens: int,
    seed: int,
    batch_size: int,
    repeat: int,
) -> dict[Contender, list[Measured]]:
    from outrider.bench.harness import measure
    from outrider.core.params import SamplingParams
    from outrider.engine.speculation import Speculation

    _check_prompts(engine, [contender.drafter for contender in plan], prompts)

    def params(contender: Contender, limit: int) -> SamplingParams:
        return SamplingParams(max_tokens=limit, temperature=contender.temperature, seed=seed, logprobs=0)

    def generate(contender: Contender, batch: Sequence[Prompt]) -> list[Result]:
        guided = contender.drafter == PREDICTION
        each = [
            Speculation(
                drafter=contender.drafter, verify=contender.verify, prediction=prompt.prediction if guided else None
            )
            for prompt in batch
        ]
        return engine.generate([prompt.content for prompt in batch], params(contender, max_tokens), speculation=each)

    for contender in plan:  # loads what the drafter needs, and wakes the threads
        spoken = Speculation(drafter=contender.drafter, verify=contender.verify)
        engine.generate([_WARM_UP], params(contender, min(16, max_tokens)), speculation=spoken)
    with bar(len(plan) * len(prompts) * repeat) as advance:
        return measure(generate, plan, prompts, batch_size=batch_size, repeat=repeat, progress=_telling(plan, advance))


def _telling(
    plan: Sequence[Contender], advance: Callable[[int, str], None]
) -> Callable[[Contender, list[Result], float], None]:
    """What the bar says: each drafter's speed-up by now."""
    tokens, spent = dict.fromkeys(plan, 0), dict.fromkeys(plan, 0.0)

    def progress(contender: Contender, results: list[Result], seconds: float) -> None:
        tokens[contender] += sum(len(result.tokens) for result in results)
        spent[contender] += seconds
        plain = {one: tokens[one.baseline] / spent[one.baseline] for one in plan if spent[one.baseline]}
        told = [
            f"{one} {tokens[one] / spent[one] / plain[one]:.2f}x"
            for one in plan
            if one != one.baseline and spent[one] and plain.get(one)
        ]
        advance(len(results), "  ".join(told))

    return progress


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


def _document(
    engine: Engine,
    measured: dict[Contender, list[Measured]],
    prompts: Sequence[Prompt],
    source: str,
    settings: dict[str, Any],
    *,
    costs: bool,
) -> dict[str, Any]:
    """The report. `costs`: measure what a forward costs by its rows too, where the runner is the fast one."""
    from resource import RUSAGE_SELF, getrusage

    from outrider import __version__
    from outrider.bench.harness import summarise
    from outrider.bench.report import document
    from outrider.bench.steps import step_cost
    from outrider.runtime.native import NativeRunner

    memory = engine.memory()
    held = {
        one.drafter: sum(size for purpose, size in memory.items() if purpose.startswith(f"{one.drafter}: "))
        for one in measured
    }
    runs = [
        summarise(one, settings["dtype"], entries, measured[one.baseline], memory=held[one.drafter])
        for one, entries in measured.items()
    ]
    files = engine.files
    return document(
        "engine",
        runs,
        prompts,
        settings=settings,
        source=source,
        argv=["outrider", *sys.argv[1:]],
        version=__version__,
        more={
            "model": {"name": files.name, "quantisation": files.quantisation, "sha256": files.sha256()},
            "memory": {"bytes": memory, "peak_rss_bytes": getrusage(RUSAGE_SELF).ru_maxrss * 1024},
            "step_cost": step_cost(engine.runner) if costs and isinstance(engine.runner, NativeRunner) else None,
        },
    )


def _print_differences(runs: Sequence[dict[str, Any]]) -> None:
    for run in runs:
        for reason, count in run["drafter_failures"].items():
            print(f"{run['drafter']}: given up in {count} texts: {reason}", file=sys.stderr)
        if run["differences"] and not run["exact"]:
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
