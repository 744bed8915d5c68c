"""Options of `outrider serve` for a server in front of others."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from outrider.cli.errors import CommandError
from outrider.cli.options import DraftOptions, EngineOptions
from outrider.cli.speculative_config import read_object

if TYPE_CHECKING:
    from outrider.scale.fleet import Fleet
    from outrider.scale.supervise import Child, Supervisor
    from outrider.scale.upstream import Pool

__all__ = ["FrontOptions", "check_alone", "check_way", "open_fleet"]

UPSTREAM_KEY = "OUTRIDER_UPSTREAM_KEY"
_OWN_PLACES = 8  # texts at once of our own engine, by default
_PLACES = 256  # of an upstream: vLLM's own default


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """Other servers that write the texts."""

    upstream: Annotated[
        list[str] | None,
        Option(metavar="URL", help="Stand in front of a server that runs already; may be repeated."),
    ] = None
    plain_upstream: Annotated[
        list[str] | None,
        Option(metavar="URL", help="The same, of one that does not speculate: where requests go while that pays."),
    ] = None
    upstream_key: Annotated[
        str | None, Option(metavar="KEY", envvar=UPSTREAM_KEY, help="The API key of those servers.")
    ] = None

    backend: Annotated[
        Literal["native", "vllm"], Option(help="Who writes the texts: the engine here, or vLLM servers started here.")
    ] = "native"
    replicas: Annotated[
        int,
        Option(metavar="N", min=0, help="With --backend vllm: servers that speculate. With --ray: at least so many."),
    ] = 1
    plain_replicas: Annotated[int, Option(metavar="N", min=0, help="And servers that do not, to fall back to.")] = 0
    vllm: Annotated[str, Option(metavar="PROGRAM", help="vLLM's command.")] = "vllm"
    hardware: Annotated[
        str | None,
        Option(metavar="NAME", help="With --backend vllm: let 'outrider advise' choose how to speculate on this."),
    ] = None

    @property
    def asked(self) -> bool:
        """Whether other servers write the texts."""
        return bool(self.upstream or self.plain_upstream) or self.backend == "vllm"


def check_way(options: FrontOptions, *, ray: bool) -> None:
    """Refuse options of another way of serving than the one that is asked for: they would do nothing."""
    vllm, attached = options.backend == "vllm", bool(options.upstream or options.plain_upstream)
    ways = {
        "replicas": (vllm or ray, "--backend vllm or --ray"),
        "plain_replicas": (vllm, "--backend vllm"),
        "vllm": (vllm, "--backend vllm"),
        "hardware": (vllm, "--backend vllm"),
        "upstream_key": (attached, "--upstream or --plain-upstream"),
    }
    for name, (taken, way) in ways.items():
        usual = (getattr(FrontOptions, name), os.environ.get(UPSTREAM_KEY) if name == "upstream_key" else None)
        if not taken and getattr(options, name) not in usual:
            raise CommandError(f"--{name.replace('_', '-')}: it comes with {way}")


def check_alone(engine: EngineOptions, draft: DraftOptions, **others: object) -> None:
    """Refuse what only an engine here could do. `others`: further options that were given, by name."""
    names = [entry.name for entry in fields(EngineOptions) if entry.name != "model"]
    others |= {name: getattr(engine, name) != getattr(EngineOptions, name) for name in names}
    others |= {e.name: getattr(draft, e.name) != getattr(DraftOptions, e.name) for e in fields(DraftOptions)}
    for name, value in others.items():
        if value:
            raise CommandError(
                f"--{name.replace('_', '-')}: it is for an engine here, and other servers write the texts: "
                "set it there, or leave out --upstream, --plain-upstream and --backend"
            )


def open_fleet(
    options: FrontOptions, model: str, flags: Sequence[str], *, speculative: str | None, batch_size: int
) -> tuple[Fleet, Supervisor | None]:
    """The upstreams of the options, none of them asked anything or started yet, and who starts those of vLLM.

    `flags` are vLLM's own, `speculative` its JSON. Raises AddressError, FlagError or CommandError.
    """
    from outrider.scale.fleet import Fleet
    from outrider.scale.supervise import Supervisor
    from outrider.scale.upstream import Address

    addresses: list[Address] = []
    groups: tuple[tuple[str, Pool, Sequence[str]], ...] = (
        ("--upstream", "speculative", options.upstream or ()),
        ("--plain-upstream", "plain", options.plain_upstream or ()),
    )
    for option, pool, urls in groups:
        for url in urls:
            address = Address.at(url, pool, option=option, key=options.upstream_key)
            if any(address.url == other.url for other in addresses):
                raise CommandError(f"{option}: {url} is given twice")
            addresses.append(address)
    supervisor = None
    if options.backend == "vllm":
        children = _children(options, model, flags, speculative)
        supervisor = Supervisor(children)
        addresses += [child.address for child in children]
    elif flags:
        raise CommandError(f"--: {flags[0]!r} is for vLLM; it comes with --backend vllm")
    elif speculative is not None:
        raise CommandError("--speculative-config: how the servers at --upstream speculate is theirs to set")
    places = _PLACES if batch_size == _OWN_PLACES else batch_size
    return Fleet(addresses, wanted=model, places=places), supervisor


def _children(options: FrontOptions, model: str, flags: Sequence[str], speculative: str | None) -> list[Child]:
    """The servers that are to be started, their files read and checked."""
    from outrider.scale.supervise import Child, free_port, vllm_command

    if not options.replicas + options.plain_replicas:
        raise CommandError("--replicas: no server is left to start; give --replicas or --plain-replicas")
    program = shutil.which(options.vllm)
    if program is None:
        raise CommandError(f"--vllm: there is no {options.vllm!r} on the path: install vLLM, or name its command")
    speculating: list[Pool] = ["speculative"] * options.replicas
    plain: list[Pool] = ["plain"] * options.plain_replicas
    config = None
    if options.replicas:
        config = speculative or _advised(model, options.hardware)
        _check_draft(model, config)
    drafting = () if config is None else _weights("draft", read_object(config).get("model"))
    out = []
    for pool in speculating + plain:
        port, own = free_port(), config if pool == "speculative" else None
        command = vllm_command([program], model, port, flags, own)
        out.append(Child(command, port, pool, _weights("target", model) + (drafting if own else ())))
    return out


def _advised(model: str, hardware: str | None) -> str:
    """vLLM's JSON for the best method that is advised for the hardware, and that needs no name unknown here."""
    from outrider.advise.advice import Load, by_figures
    from outrider.advise.roofline import Roofline, hardware_named, stacks
    from outrider.cli.advise import shape_of

    if hardware is None:
        raise CommandError(
            "--speculative-config: say how to speculate, or name the --hardware to be advised for "
            "(`outrider advise --hardware list`); --replicas 0 --plain-replicas 1 does without"
        )
    target, local = shape_of(model)
    found = by_figures(Roofline(hardware_named(hardware), stacks()["vllm"], 1), target, Load(), "chat", local=local)
    for row in found.rows:
        if row.method == "none":  # what follows is expected to lose
            break
        words = shlex.split(found.commands[row.method]["vllm"], comments=True)
        config = read_object(words[-1]) if "--speculative-config" in words else {}
        draft = config.get("model", "")
        if config and not (isinstance(draft, str) and draft.isupper()):  # a word in capitals stands for a name
            print(f"--speculative-config {words[-1]} (advised for {hardware})", file=sys.stderr)
            return words[-1]
    raise CommandError(
        f"--hardware: no method is advised for {model} on {hardware}: use --replicas 0 --plain-replicas 1"
    )


def _check_draft(model: str, config: str) -> None:
    """As `outrider check` before it measures: same tokenizer, vocabulary, context. Where both lie here."""
    draft = read_object(config).get("model")
    if not isinstance(draft, str) or not (Path(draft).exists() and Path(model).exists()):
        return
    from outrider.advise.compatibility import compare
    from outrider.cli.drafts import opened

    found = compare(opened(model), draft)
    for finding in found.findings:
        if finding.level != "ok":
            print(f"{finding.level}: {finding.what}: {finding.told}", file=sys.stderr)
    if found.refused is not None:
        raise CommandError(f"--speculative-config: {draft} cannot draft for {model}: {found.refused.told}")


def _weights(role: str, model: object) -> tuple[dict[str, str], ...]:
    """What lies in a folder here, hashed for the ledger; nothing of a name that vLLM fetches itself."""
    if not isinstance(model, str) or not Path(model).is_dir():
        return ()
    from outrider.models.digest import sha256_of_weights

    return ({"role": role, "name": Path(model).name, "sha256": sha256_of_weights(Path(model))},)
