"""`outrider bench --url`: servers with OpenAI's API side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from typer import Option

from outrider.cli.bench_output import Output, bar
from outrider.cli.errors import CommandError
from outrider.core.names import near

if TYPE_CHECKING:
    from outrider.bench.client import Server
    from outrider.bench.loads import Load, Sample
    from outrider.bench.prompts import Prompt
    from outrider.bench.race import Taken

__all__ = ["ServerOptions", "bench_servers"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which servers, under which load."""

    url: Annotated[
        list[str] | None,
        Option(metavar="[NAME=]URL", help="A server to measure; may be repeated: they take turns on the same prompts."),
    ] = None
    baseline: Annotated[
        str | None, Option(metavar="NAME", help="The server that decodes plainly.  [default: the first]")
    ] = None
    concurrency: Annotated[
        str | None, Option(metavar="N,...", help="Closed loops: users at once, a run for each.  [default: 1]")
    ] = None
    rate: Annotated[
        str | None, Option(metavar="R,...", help="Open loops: requests per second, arriving at random (Poisson).")
    ] = None
    requests: Annotated[
        int | None,
        Option(metavar="N", help="Requests per run.  [default: each prompt once, and 4 for each of several users]"),
    ] = None
    slo: Annotated[
        str | None,
        Option("--slo", metavar="LIMITS", help="Count goodput: requests within ttft=200ms,tpot=20ms,e2e=5s."),
    ] = None
    warm_up: Annotated[int, Option(metavar="N", help="Requests to each server that do not count.")] = 1
    timeout: Annotated[float, Option(metavar="SECONDS", help="Give a request up if nothing comes for so long.")] = 300.0
    time_limit: Annotated[float, Option(metavar="SECONDS", help="Give a request up after so long, whatever comes.")] = (
        1200.0
    )
    api_key: Annotated[
        list[str] | None,
        Option(metavar="[NAME=]KEY", envvar="OUTRIDER_BENCH_API_KEY", help="Key of all servers, or of one."),
    ] = None
    extra_body: Annotated[
        list[str] | None,
        Option(metavar="[NAME=]JSON", help="Fields added to each request, of all servers or of one."),
    ] = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Ask for texts of full length (vLLM, SGLang, outrider).")
    ] = False
    require_equal: Annotated[
        bool, Option("--require-equal", help="Exit code 1 if a text differs from the baseline's.")
    ] = False


def bench_servers(
    options: ServerOptions,
    prompts: Sequence[Prompt],
    source: str,
    output: Output,
    *,
    model: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    repeat: int,
) -> bool:
    """Measure and report. True if a request failed or, where that is asked for, a text differs."""
    import asyncio

    from outrider import __version__
    from outrider.bench.client import Asking
    from outrider.bench.race import Plan, race
    from outrider.bench.report import document
    from outrider.bench.servers import summarise_servers
    from outrider.bench.slo import Slo

    servers = _servers(options)
    baseline = options.baseline or servers[0].name
    if baseline not in [server.name for server in servers]:
        names = [server.name for server in servers]
        raise CommandError(f"--baseline: {baseline!r} is none of {', '.join(names)}{near(baseline, names)}")
    slo = None if options.slo is None else Slo.parse(options.slo)
    _check(options, max_tokens)
    plan = Plan(
        prompts=prompts,
        loads=_loads(options),
        asking=Asking(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=options.ignore_eos),
        requests=options.requests,
        repeat=repeat,
        warm_up=options.warm_up,
        timeout=options.timeout,
        limit=options.time_limit,
        seed=seed,
    )
    with bar(plan.total * len(servers)) as advance:
        taken: list[Taken] = asyncio.run(race(servers, plan, model=model, progress=_telling(advance)))
    runs = summarise_servers(taken, prompts, baseline=baseline, slo=slo)
    settings = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "repeat": repeat,
        "requests": options.requests,
        "warm_up": options.warm_up,
        "ignore_eos": options.ignore_eos,
        "slo": options.slo,
    }
    report = document(
        "server",
        runs,
        prompts,
        settings=settings,
        source=source,
        argv=["outrider", *sys.argv[1:]],
        version=__version__,
    )
    output.write(report)
    return any(run["failed"] for run in runs) or (options.require_equal and any(run["differences"] for run in runs))


def _check(options: ServerOptions, max_tokens: int) -> None:
    for option, value, least in (
        ("--max-tokens", max_tokens, 1),
        ("--requests", options.requests, 1),
        ("--warm-up", options.warm_up, 0),
    ):
        if value is not None and value < least:
            raise CommandError(f"{option}: {value} is not at least {least}")
    for option, seconds in (("--timeout", options.timeout), ("--time-limit", options.time_limit)):
        if not 0 < seconds < float("inf"):
            raise CommandError(f"{option}: {seconds:g} is not a number of seconds above 0")


def _servers(options: ServerOptions) -> list[Server]:
    from outrider.bench.client import Server

    addresses: dict[str, str] = {}
    for given in options.url or ():
        name, equals, url = given.partition("=")
        if not equals or "://" in name:
            name, url = urlsplit(given).netloc or given, given
        if name in addresses:
            raise CommandError(f"--url: two servers are called {name!r}; write NAME=URL")
        addresses[name] = url
    keys = _for_each("--api-key", options.api_key, list(addresses))
    bodies = _for_each("--extra-body", options.extra_body, list(addresses))
    return [Server.at(name, url, key=keys.get(name), body=_body(bodies.get(name))) for name, url in addresses.items()]


def _for_each(option: str, given: Sequence[str] | None, names: Sequence[str]) -> dict[str, str]:
    """What NAME=VALUE says of one server, else what VALUE says of all."""
    of_all: str | None = None
    out: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if equals and name in names:
            out[name] = value
        elif of_all is None:
            of_all = text
        else:
            raise CommandError(f"{option}: given twice for all servers; write NAME=... with one of {', '.join(names)}")
    return out if of_all is None else {name: out.get(name, of_all) for name in names}


def _body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CommandError(f"--extra-body: {text[:80]!r} is no JSON object, and begins with the name of no server")
    for key in ("stream", "stream_options", "messages", "prompt", "model"):
        if key in found:
            raise CommandError(f"--extra-body: {key!r} is set by the benchmark; leave it out")
    return found


def _loads(options: ServerOptions) -> list[Load]:
    from outrider.bench.loads import Load

    out = [Load("closed", level) for level in _levels("--concurrency", options.concurrency, whole=True)]
    out += [Load("open", level) for level in _levels("--rate", options.rate, whole=False)]
    return out or [Load("closed", 1)]


def _levels(option: str, text: str | None, *, whole: bool) -> list[float]:
    if text is None:
        return []
    try:
        levels = [int(part) if whole else float(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 < level < float("inf") for level in levels):
        kind, example = ("whole numbers", "1,4,16") if whole else ("numbers", "0.5,2,8")
        raise CommandError(f"{option}: {text!r} is not a list of {kind} above 0 like {example}")
    return list(dict.fromkeys(levels))


def _telling(advance: Callable[[int, str], None]) -> Callable[[Server, Load, Sample], None]:
    """What the bar says: each server's time per token by now, and what failed."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    failed = 0

    def progress(server: Server, load: Load, sample: Sample) -> None:
        from outrider.bench.client import Answer

        nonlocal failed
        if isinstance(sample.outcome, Answer):
            tokens[server.name] = tokens.get(server.name, 0) + sample.outcome.tokens
            seconds[server.name] = seconds.get(server.name, 0.0) + sample.outcome.seconds
        else:
            failed += 1
        told = [f"{name} {1000 * seconds[name] / count:.1f} ms/token" for name, count in tokens.items() if count]
        advance(1, "  ".join([str(load), *told, *([f"{failed} failed"] if failed else [])]))

    return progress
