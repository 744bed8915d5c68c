"""What a contender is: an engine with one model in memory, that writes greedily from token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from convert_gguf import DEFAULT_FOLDER, ConversionError, convert

__all__ = ["Absent", "Contender", "Generation", "Setup", "Spec", "in_turns", "lookup_settings", "source"]


class Absent(Exception):  # noqa: N818 - not an error of the run: the contender is left out of it and named
    """This contender cannot take part; the message says why."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Which engine, in which precision, with which kind of decoding: `llama.cpp:Q8_0:lookup`."""

    engine: str
    kind: str
    decoding: str = "plain"

    def __str__(self) -> str:
        return f"{self.engine}:{self.kind}:{self.decoding}"


@dataclass(frozen=True, slots=True)
class Setup:
    """The same for all contenders of a run."""

    model: Path  # a GGUF file
    quantisation: str  # what most of its weights are in
    threads: int = 2
    context: int = 2048  # tokens, prompt and answer together
    cache: Path = DEFAULT_FOLDER  # where converted models are kept


class Generation(NamedTuple):
    tokens: list[int]
    ttft: float  # seconds from the call to the first token
    seconds: float  # seconds from the call to the last token
    steps: int | None = None  # forwards after the prefill, where the engine tells


class Contender(Protocol):
    settings: Mapping[str, Any]

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        """Greedy, with the end of text ignored, nothing kept from earlier prompts."""
        ...

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        """Milliseconds of a forward of M tokens with logits for each, after `context`; for each M in `rows`.

        The numbers of rows take turns. Raises Absent where the engine has no call for it.
        """
        ...


def in_turns(rows: Sequence[int], repeats: int) -> Iterator[int]:
    """Every number `repeats` times, up and down by turns: none always follows the largest, which empties the caches."""
    for repeat in range(repeats):
        yield from rows if repeat % 2 == 0 else reversed(rows)


def source(spec: Spec, setup: Setup) -> Path:
    """The GGUF file of the wanted kind: the model itself, or one made from it."""
    if spec.kind == setup.quantisation:
        return setup.model
    try:
        return convert(setup.model, spec.kind, setup.cache)
    except ConversionError as error:
        raise Absent(str(error)) from None


def lookup_settings(decoding: str, default: int) -> int:
    """Number of tokens that `lookup` or `lookup-K` proposes at most."""
    name, _, number = decoding.partition("-")
    if name != "lookup" or (number and not number.isdecimal()) or number == "0":
        raise Absent(f"{decoding!r} is no kind of decoding here: plain, lookup or lookup-K")
    return int(number or default)
