"""`outrider advise`: which method, how set up, for which hardware and load."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.errors import CommandError
from outrider.core.names import near

if TYPE_CHECKING:
    from outrider.advise.advice import Advice, Load
    from outrider.advise.shape import Shape

__all__ = ["app", "shape_of"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_FILES = (".gguf", ".safetensors")  # the name of a file, then, and not of a shape

Workload = Literal["chat", "code", "json", "summarise", "rag", "creative"]


@app.command()
def advise(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name, path, or size such as 8B.")] = None,
    hardware: Annotated[str, typer.Option(metavar="NAME", help="'this', or a device; 'list' lists them all.")] = "this",
    devices: Annotated[int, typer.Option(metavar="N", help="Devices that share each layer (tensor parallel).")] = 1,
    software: Annotated[
        str, typer.Option(metavar="NAME", help="vllm, sglang, tensorrt-llm, llama.cpp or transformers.")
    ] = "vllm",
    workload: Annotated[Workload, typer.Option(help="Kind of text.")] = "chat",
    batch: Annotated[int, typer.Option(metavar="N", help="Texts side by side.")] = 1,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Requests per second, in place of --batch.")] = None,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Length of a prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Length of an answer.")] = 256,
    memory: Annotated[float | None, typer.Option(metavar="GB", help="Memory in all, in place of the device's.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="bf16, fp8, int8 or int4.  [default: bf16, or the file's]")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Draft model: name, path or size.  [default: the usual one]")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="With 'this': how the model is run.")] = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", help="With 'this'.  [default: all cores]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the commands of every method.")] = False,
) -> None:
    """Say which drafting method to run, how long its drafts should be, and when it turns harmful.

    On 'this' machine from what 'outrider profile MODEL' measured; on other hardware from its public figures and from
    published acceptance. docs/advice.md says how far either can be trusted.

    \b
    outrider advise smollm2-135m
    outrider advise llama-3.1-8b --hardware h100 --workload code
    outrider advise 70B --hardware h100 --devices 4 --weights fp8 --rate 5 --prompt-tokens 2000
    outrider advise qwen3-8b --hardware rtx-4090 --workload summarise --batch 8 --json
    outrider advise --hardware list
    """
    from outrider.advise.advice import MOST, Load

    if hardware == "list":
        _list()
        return
    if model is None:
        raise CommandError("MODEL: missing; give a name, a path, or a size such as 8B")
    if devices < 1:
        raise CommandError(f"--devices: {devices} is not at least 1")
    if memory is not None and not 0 <= memory < math.inf:
        raise CommandError(f"--memory: {memory:g} is no number of GB")
    for option, value in (
        ("--batch", batch),
        ("--rate", rate),
        ("--prompt-tokens", prompt_tokens),
        ("--output-tokens", output_tokens),
    ):
        if value is not None and not 0 < value <= MOST:
            raise CommandError(f"{option}: {value:g} is not above 0 and at most {MOST:,}")
    load = Load(batch=batch, rate=rate, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    if hardware == "this":
        found = _here(model, load, workload, dtype, threads, memory)
    else:
        found = _elsewhere(model, load, workload, hardware, software, devices, weights, draft, memory)
    if as_json:
        out = asdict(found)
        for row, plain in zip(found.rows, out["rows"], strict=True):
            plain["draft"] = row.draft
        print(json.dumps(out, indent=2))
        return
    _print(found)


def _here(model: str, load: Load, workload: str, dtype: str, threads: int | None, memory: float | None) -> Advice:
    from outrider.advise.advice import by_profile
    from outrider.engine.profile import find
    from outrider.models.errors import ModelError
    from outrider.runtime.load import load as load_model

    if load.rate is not None:
        raise CommandError("--rate: on this machine give --batch, the texts that run side by side")
    try:
        target = load_model(model, dtype=dtype, threads=threads, cache_tokens=64)
    except ModelError:
        if not _is_known_shape(model):
            raise
        raise CommandError(
            f"MODEL: {model} is known by its shape alone and does not lie here: "
            "name other hardware with --hardware ('list' lists it), or give the path of its files"
        ) from None
    profile = find(target)
    if profile is None:
        settings = ("" if dtype == "auto" else f" --dtype {dtype}") + (f" --threads {threads}" if threads else "")
        raise CommandError(
            f"--hardware: nothing is known of {model} on this machine yet: "
            f"run `outrider profile {model}{settings}` first"
        )
    left = None if memory is None else round(memory * 1e9)
    return by_profile(profile, workload, batch=load.batch, memory_left=left, local=model)


def _elsewhere(
    model: str,
    load: Load,
    workload: str,
    hardware: str,
    software: str,
    devices: int,
    weights: str | None,
    draft: str | None,
    memory: float | None,
) -> Advice:
    from outrider.advise.advice import by_figures
    from outrider.advise.roofline import Roofline, hardware_named, stacks
    from outrider.advise.shape import BITS

    if software not in stacks():
        raise CommandError(f"--software: {software!r} is not one of {', '.join(stacks())}{near(software, stacks())}")
    if weights is not None and weights not in BITS:
        raise CommandError(f"--weights: {weights!r} is not one of {', '.join(BITS)}")
    machine = Roofline(hardware_named(hardware), stacks()[software], devices)
    target, local = shape_of(model)
    if weights is not None:
        target = target.at(weights)
    second = None if draft is None else shape_of(draft)[0]
    if second is not None and weights is not None:
        second = second.at(weights)
    return by_figures(machine, target, load, workload, draft=second, memory_gb=memory, local=local)


def shape_of(model: str) -> tuple[Shape, str | None]:
    """Of a known name or size, or of a model that lies here; and how this machine knows it."""
    from outrider.advise.shape import ShapeError, from_files, named
    from outrider.cli.drafts import opened
    from outrider.models.errors import ModelError

    try:
        return named(model), None
    except ShapeError as unknown:
        try:
            return from_files(opened(model)), model
        except ModelError as error:
            raise error if "/" in model or model.endswith(_FILES) else unknown from None


def _is_known_shape(model: str) -> bool:
    from outrider.advise.shape import ShapeError, named

    try:
        named(model)
    except ShapeError:
        return False
    return True


def _list() -> None:
    from outrider.advise.roofline import hardware
    from outrider.cli.tables import print_table

    print_table(
        ["name", "device", "GB/s", "GB", "TFLOP/s", "source"],
        [
            [
                device.name,
                device.title,
                f"{device.bandwidth:g}",
                f"{device.memory:g}",
                ", ".join(f"{name} {rate:g}" for name, rate in device.compute.items()),
                device.source,
            ]
            for device in hardware().values()
        ],
        sys.stdout,
        numbers=(2, 3),
    )


def _print(found: Advice) -> None:
    from outrider.advise.commands import LOOKED_UP
    from outrider.cli.tables import print_table

    texts = f"{found.batch} text{'s' if found.batch > 1 else ''} side by side"
    print(f"{found.model}\n{found.hardware}; {found.software}; {found.workload}, {texts}\nBasis: {found.basis}")
    print_table(
        ["method", "speed-up", "range", "memory", "draft", "pays above", "loses from batch", "use"],
        [
            [
                row.method,
                f"{row.usual:.2f}x",
                "-" if row.method == "none" else f"{row.low:.2f} to {row.high:.2f}",
                f"{row.memory / 1e9:.2f} GB" if row.memory >= 1e8 else f"{row.memory / 1e6:.1f} MB",
                row.draft,
                "-" if row.break_even is None else f"{row.break_even:.2f}",
                "-" if row.harmful_batch is None else str(row.harmful_batch),
                row.use,
            ]
            for row in found.rows
        ],
        sys.stdout,
        numbers=(1, 2, 3, 5, 6),
    )
    for reason in found.reasons:
        print(reason)
    if not found.commands:
        return
    print("\nMeasure:")
    for line in found.measure:
        print(f"  {line}")
    print(f"\nCommands for {found.best.method}:")
    for engine in found.commands[found.best.method]:
        version = f" {LOOKED_UP[engine]}" if engine in LOOKED_UP else ""
        method, command = found.ready(engine)
        other = "" if method == found.best.method else f": no {found.best.method}, so {method}"
        print(f"  {engine}{version}{other}\n    {command}")
