"""`outrider serve`: OpenAI's API over one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from outrider.cli.front import FrontOptions, check_alone, check_way, open_fleet
from outrider.cli.options import (
    DEFAULT_MODEL,
    DraftOptions,
    EngineOptions,
    check_draft_model,
    flatten,
    open_engine,
    words_of,
)
from outrider.cli.speculative_config import merged

if TYPE_CHECKING:
    from outrider import Engine
    from outrider.server.settings import Auditing, Keys

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where it listens, to whom, and what a client may cost."""

    host: Annotated[str, Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1"
    port: Annotated[int, Option(metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Name that requests use; may be repeated.  [default: MODEL's]"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        Option(metavar="KEY", envvar="OUTRIDER_API_KEY", help="A key that is let in; may be repeated."),
    ] = None
    api_key_file: Annotated[
        Path | None, Option(metavar="FILE", exists=True, dir_okay=False, help="Keys with names: lines of NAME KEY.")
    ] = None
    allow_anonymous: Annotated[
        bool, Option("--allow-anonymous", help="Let others than this machine in without a key.")
    ] = False
    cors_origin: Annotated[
        list[str] | None, Option(metavar="URL", help="Web pages from here may call; may be repeated.")
    ] = None
    dashboard: Annotated[
        bool, Option("--dashboard/--no-dashboard", help="The page at / that shows what the server does.")
    ] = True
    chat_template: Annotated[
        Path | None,
        Option(metavar="FILE", exists=True, dir_okay=False, help="A Jinja template in place of the model's own."),
    ] = None
    batch_size: Annotated[int, Option("--batch-size", "--max-num-seqs", metavar="N", help="Texts at once.")] = 8
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Let texts that begin alike share cache rows, also with texts that have ended.",
        ),
    ] = True
    queue: Annotated[int, Option(metavar="N", help="Texts that may wait for a place; more get 429.")] = 256
    requests: Annotated[int, Option(metavar="N", help="HTTP requests at once; more get 503.")] = 1024
    requests_per_key: Annotated[int | None, Option(metavar="N", help="Running requests of one key; more get 429.")] = (
        None
    )
    body_bytes: Annotated[int, Option(metavar="N", help="Largest request; more gets 413.")] = 8 << 20
    prompt_tokens: Annotated[int | None, Option(metavar="N", help="Longest prompt.  [default: the context]")] = None
    output_tokens: Annotated[int | None, Option(metavar="N", help="Longest text.  [default: the context]")] = None
    choices: Annotated[int, Option(metavar="N", help="Texts of one request.")] = 128
    request_seconds: Annotated[float, Option(metavar="S", help="After which a text is cut.")] = 600.0
    send_seconds: Annotated[float, Option(metavar="S", help="A reader that takes longer is dropped.")] = 30.0
    drain_seconds: Annotated[float, Option(metavar="S", help="Left to running texts at SIGTERM.")] = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option(help="What is logged.")] = "info"
    log_json: Annotated[bool, Option("--log-json", help="One JSON object per line of the log.")] = False
    speculative_config: Annotated[
        str | None,
        Option(metavar="JSON", help="vLLM's way to choose the drafter: method, model, num_speculative_tokens ..."),
    ] = None
    request_drafters: Annotated[
        str | None,
        Option(
            metavar="A,B", help="Methods that a request may choose.  [default: the server's, and all that need nothing]"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """What is kept for an auditor."""

    ledger: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            envvar="OUTRIDER_LEDGER",
            help="Keep an audit ledger here (see 'outrider audit').  [default: none is kept]",
        ),
    ] = None
    ledger_on_error: Annotated[
        Literal["stop", "continue"],
        Option(help="When it cannot be written: stop serving (503) until it can, or go on unrecorded."),
    ] = "stop"
    ledger_keep: Annotated[
        str | None, Option(metavar="TIME", help="Remove older rows, as in 90d.  [default: keep all]")
    ] = None
    ledger_text: Annotated[bool, Option("--ledger-text", help="Keep the text of prompts and answers too.")] = False
    ledger_key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Hash with the key in this file, so that only its owner can compute the chain anew."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Several of it, by Ray Serve."""

    ray: Annotated[
        bool, Option("--ray", help="Serve by Ray Serve: on RAY_ADDRESS's cluster, or here. Needs ray[serve].")
    ] = False
    max_replicas: Annotated[
        int | None,
        Option(metavar="N", min=1, help="With --ray: as many at most, as the queue grows.  [default: --replicas]"),
    ] = None
    replica_cpus: Annotated[float, Option(metavar="N", help="With --ray: cores that a replica reserves.")] = 1.0


@app.command()
@flatten
def serve(
    server: ServerOptions,
    front: FrontOptions,
    ledger: LedgerOptions,
    scale: RayOptions,
    engine: EngineOptions,
    draft: DraftOptions,
    model_path: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAGS", help="vLLM's own, behind --, with --backend vllm.")
    ] = None,
) -> None:
    """Serve OpenAI's API: chat and text completions, with streaming.

    \b
    outrider serve
    outrider serve model.gguf --port 8080 --batch-size 16
    outrider serve --host 0.0.0.0 --api-key-file keys.txt --log-json
    outrider serve --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}'
    outrider serve ./qwen3-8b --backend vllm --hardware h100 --plain-replicas 1 -- --tensor-parallel-size 2
    outrider serve qwen3-8b --upstream http://gpu-1:8000 --plain-upstream http://gpu-2:8000
    outrider serve --ray --replicas 2 --max-replicas 8 --threads 4 --replica-cpus 4
    """
    from outrider.cli.errors import CommandError
    from outrider.server.app import create_app
    from outrider.server.logs import configure
    from outrider.server.process import listen, serve
    from outrider.server.settings import Keys, Limits, Settings, check_exposure

    check_way(front, ray=scale.ray)
    passed = list(flags or ())
    if model_path is not None and model_path.startswith("-"):  # only flags stand behind --
        passed.insert(0, model_path)
        model_path = None
    if not front.asked:
        draft = merged(draft, server.speculative_config)
        if passed:
            raise CommandError(f"MODEL: {passed[0]!r} is one too many; vLLM's flags come with --backend vllm")
    if draft.draft_model is None or "draft_model" not in (server.request_drafters or ""):
        check_draft_model(draft)
    if model_path is not None:
        if engine.model != DEFAULT_MODEL and engine.model != model_path:
            raise CommandError(
                f"MODEL: {model_path!r} and --model {engine.model!r} are given; leave out one of the two"
            )
        engine = replace(engine, model=model_path)
    keys = Keys.read(server.api_key or (), server.api_key_file)
    check_exposure(server.host, keys, allow_anonymous=server.allow_anonymous)
    if scale.ray:
        if front.asked:
            raise CommandError("--ray: it is for engines of ours; leave out --upstream, --plain-upstream and --backend")
        # where Ray's proxy listens is not the replicas' to know, and the drafter is chosen by now
        own = replace(server, host=ServerOptions.host, port=ServerOptions.port, speculative_config=None)
        words = [word for group in (own, ledger, engine, draft) for word in words_of(group)]
        _serve_by_ray(server, scale, front.replicas, words)
        return
    if scale != RayOptions():
        raise CommandError("--max-replicas, --replica-cpus: they come with --ray")
    limits = Limits(
        body_bytes=server.body_bytes,
        prompt_tokens=server.prompt_tokens,
        output_tokens=server.output_tokens,
        choices=server.choices,
        queue=server.queue,
        requests=server.requests,
        requests_per_key=server.requests_per_key,
        request_seconds=server.request_seconds,
        send_seconds=server.send_seconds,
        drain_seconds=server.drain_seconds,
    )
    drafters = _request_drafters(draft.drafter, server.request_drafters)
    given = {**_plain(server), **_plain(engine), **_plain(draft), **_plain(front)}
    if front.asked:
        if model_path is None and engine.model == DEFAULT_MODEL:
            raise CommandError("MODEL: name the model that the servers at --upstream write with")
        check_alone(
            engine,
            draft,
            prompt_tokens=server.prompt_tokens,
            chat_template=server.chat_template,
            request_drafters=server.request_drafters,
            ledger_text=ledger.ledger_text,
            no_enable_prefix_caching=not server.enable_prefix_caching,
        )
        fleet, supervisor = open_fleet(
            front, engine.model, passed, speculative=server.speculative_config, batch_size=server.batch_size
        )
    with closing(listen(server.host, server.port)) as listener, _auditing(ledger, given) as auditing:
        configure(server.log_level, as_json=server.log_json)
        settings = Settings(
            names=server.served_model_name or [engine.model],
            drafters=drafters,
            limits=limits,
            keys=keys,
            cors_origins=server.cors_origin or (),
            dashboard=server.dashboard,
            hosts=("localhost", "127.0.0.1", "::1") if _is_private(server, keys) else (),
            auditing=auditing,
        )
        if front.asked:
            from outrider.scale.front import create_front

            serve(*create_front(fleet, settings, supervisor), listener)
            return
        opened = open_engine(
            engine, draft, batch_size=server.batch_size, enable_prefix_caching=server.enable_prefix_caching
        )
        opened.use_profile()
        for name in drafters if server.request_drafters else ():
            opened.prepare(name)
        if server.chat_template is not None:
            _replace_template(opened, server.chat_template)
        names = server.served_model_name or _names(engine.model, opened.files.name)
        serve(*create_app(opened, replace(settings, names=names)), listener)


def _serve_by_ray(server: ServerOptions, scale: RayOptions, replicas: int, words: list[str]) -> None:
    """Each replica is this command with the same options. Raises CommandError."""
    from outrider.cli.errors import CommandError

    if server.api_key:
        raise CommandError("--api-key: Ray shows it in its own pages; use --api-key-file with --ray")
    try:
        from outrider.scale import ray
    except ModuleNotFoundError as error:
        raise CommandError(f"--ray: {error.name} is not installed; pip install 'ray[serve]'") from None
    from pydantic import ValidationError

    from outrider.scale.deployment import Options

    try:
        options = Options(
            options=words,
            replicas=replicas,
            max_replicas=scale.max_replicas,
            requests=float(server.batch_size),
            max_requests=server.batch_size + server.queue,
            cpus=scale.replica_cpus,
            body_bytes=server.body_bytes,
            drain_seconds=server.drain_seconds,
        )
    except ValidationError as error:
        raise CommandError(f"--ray: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    ray.run(options, server.host, server.port)


@contextmanager
def _auditing(options: LedgerOptions, settings: Mapping[str, Any]) -> Iterator[Auditing | None]:
    """The ledger for the time of the block, if one is wanted. Raises LedgerError or CommandError."""
    from outrider.cli.errors import CommandError

    if options.ledger is None:
        for name in ("ledger_keep", "ledger_text", "ledger_key_file"):
            if getattr(options, name):
                raise CommandError(f"--{name.replace('_', '-')}: it comes with --ledger FILE")
        yield None
        return
    from outrider import __version__
    from outrider.audit.chain import read_key
    from outrider.audit.code import sha256_of_code
    from outrider.audit.reading import duration
    from outrider.audit.store import Ledger
    from outrider.audit.verification import verify
    from outrider.bench.environment import git, machine
    from outrider.server.settings import Auditing

    keep = None if options.ledger_keep is None else duration("--ledger-keep", options.ledger_keep)
    key = read_key("--ledger-key-file", options.ledger_key_file)
    with closing(Ledger(options.ledger, key=key, made_by=f"outrider {__version__}")) as ledger:
        findings = verify(options.ledger, key=key).findings
        if findings:
            raise CommandError(
                f"--ledger: {options.ledger} is not as it was written: {findings[0]}. "
                "See `outrider audit verify`, keep the file as evidence, and name a new one"
            )
        yield Auditing(
            ledger=ledger,
            on_error=options.ledger_on_error,
            keep_seconds=keep,
            with_text=options.ledger_text,
            origin={
                "code": {"version": __version__, "git": git(), "sha256": sha256_of_code()},
                "hardware": machine(),
                "settings": settings,
            },
        )


def _is_private(server: ServerOptions, keys: Keys) -> bool:
    """Whether only this machine may call: then no other name for it is answered."""
    from outrider.server.settings import is_loopback

    return is_loopback(server.host) and not keys and not server.allow_anonymous


def _plain(options: object) -> dict[str, Any]:
    """A group of options for the ledger, without the keys."""
    values = {name: value for name, value in vars(options).items() if name not in ("api_key", "upstream_key")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _names(asked: str, file: str) -> list[str]:
    """What the model is called: as `outrider models` does, if the operator did so, and as its file is."""
    from outrider.models.registry import KNOWN

    return [asked, file] if asked in KNOWN else [file]


def _replace_template(engine: Engine, file: Path) -> None:
    from outrider.cli.prompt import read_text
    from outrider.models.chat_template import ChatTemplate

    tokenizer = engine.tokenizer
    known = {} if tokenizer.template is None else tokenizer.template.tokens
    tokenizer.template = ChatTemplate(read_text("--chat-template", file), known)


def _request_drafters(own: str, listed: str | None) -> list[str]:
    from outrider.drafters import registry

    if listed is not None:
        names = [name.strip() for name in listed.split(",") if name.strip()]
        for name in names:
            registry.find(name)
        return names
    methods = {name: registry.find(name) for name in registry.names()}
    free = [name for name, method in methods.items() if method.needs.startswith("nothing") and method.helps != "never"]
    return list(dict.fromkeys([own, *free, "prediction"]))
