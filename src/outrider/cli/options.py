"""Options shared by several commands, as groups, and what they open."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import Option

from outrider.cli.errors import CommandError
from outrider.cli.prompt import read_text

if TYPE_CHECKING:
    from outrider import Engine, SamplingParams
    from outrider.core.params import Constraint

__all__ = [
    "DEFAULT_DRAFTER",
    "DEFAULT_MODEL",
    "PREDICTION",
    "DraftOptions",
    "EngineOptions",
    "GuessOptions",
    "SamplingOptions",
    "check_draft_model",
    "flatten",
    "memory_line",
    "open_engine",
    "parse_assignments",
]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DRAFTER = "auto"
PREDICTION = "prediction"  # the drafter that is given the text it guesses


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which model, and how it is run."""

    model: Annotated[
        str, Option("--model", "-m", metavar="MODEL", help="Name (see 'outrider models') or path of the model.")
    ] = DEFAULT_MODEL
    runner: Annotated[
        Literal["native", "reference"], Option(help="native: C++, fast. reference: numpy, slow, to compare with.")
    ] = "native"
    dtype: Annotated[str, Option(metavar="DTYPE", help="auto (what the file holds), int8, int4, bf16 or fp32.")] = (
        "auto"
    )
    head_dtype: Annotated[
        str | None, Option(metavar="DTYPE", help="The output head's own dtype.  [default: --dtype; auto with int4]")
    ] = None
    kv_dtype: Annotated[str | None, Option(metavar="DTYPE", help="Dtype of the key/value cache.")] = None
    threads: Annotated[int | None, Option(metavar="N", help="Threads of the native runner.  [default: all cores]")] = (
        None
    )
    page_size: Annotated[int, Option(metavar="N", help="Rows of a cache page.")] = 64
    prefill_chunk: Annotated[int, Option(metavar="N", help="Prompt tokens per forward.")] = 512
    cache_tokens: Annotated[
        int | None, Option("--cache-tokens", "--context-tokens", metavar="N", help="Rows of the cache.")
    ] = None
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Tell what a drafter will hold in memory before it is loaded.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class GuessOptions:
    """Who guesses, and how much."""

    drafter: Annotated[
        str, Option("--drafter", "-d", metavar="METHOD", help="Drafting method (see 'outrider drafters').")
    ] = DEFAULT_DRAFTER
    draft_model: Annotated[
        str | None, Option(metavar="MODEL", help="Name or path of the second model, for draft_model.")
    ] = None
    drafter_option: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="An option of the drafter; may be repeated.")
    ] = None
    max_draft_tokens: Annotated[int | None, Option(metavar="N", help="Guesses per step at most.")] = None
    adapt: Annotated[
        bool,
        Option("--adapt/--no-adapt", help="Cut drafts to what pays by measured costs; rest where nothing does."),
    ] = True
    min_acceptance: Annotated[
        float | None,
        Option(
            metavar="F",
            help="Go on plainly while fewer than this share of the guesses come true.  [default: time decides alone]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftOptions(GuessOptions):
    """Who guesses, how much, and how it is checked."""

    verify: Annotated[
        Literal["match", "rejection"],
        Option(help="match: the same text as without a drafter. rejection: the same distribution."),
    ] = "match"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The sampling parameters."""

    max_tokens: Annotated[int, Option("--max-tokens", "-n", metavar="N", help="Tokens to write at most.")] = 128
    min_tokens: Annotated[int, Option(metavar="N", help="No end of text before so many tokens.")] = 0
    temperature: Annotated[float, Option("--temperature", "-t", metavar="T", help="0 is greedy.")] = 0.0
    top_k: Annotated[int, Option(metavar="K", help="Draw from the k likeliest tokens only; 0 is all.")] = 0
    top_p: Annotated[float, Option(metavar="P", help="Draw from the smallest set with this probability only.")] = 1.0
    min_p: Annotated[
        float, Option(metavar="P", help="Leave out tokens below this share of the likeliest one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[float, Option(metavar="X", help="Over prompt and output; 1 is none.")] = 1.0
    frequency_penalty: Annotated[float, Option(metavar="X", help="Per earlier use in the output.")] = 0.0
    presence_penalty: Annotated[float, Option(metavar="X", help="For any earlier use in the output.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, Option(metavar="ID=VALUE", help="Added to a token's logit; may be repeated.")
    ] = None
    stop: Annotated[list[str] | None, Option(metavar="TEXT", help="End before this text; may be repeated.")] = None
    stop_token_id: Annotated[list[int] | None, Option(metavar="ID", help="End at this token; may be repeated.")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after the end of text.")] = False
    seed: Annotated[
        int | None, Option(metavar="N", help="Fixes the draws.  [default: drawn, and reported by --json]")
    ] = None
    logprobs: Annotated[
        int | None, Option(metavar="N", help="With --json: log-probabilities of the N likeliest tokens.")
    ] = None

    json_schema: Annotated[
        Path | None, Option(metavar="FILE", help="Write JSON of this schema; a file with {} takes any JSON.")
    ] = None
    grammar: Annotated[
        Path | None, Option(metavar="FILE", help="Write what this grammar allows, in Lark's or llama.cpp's notation.")
    ] = None

    def params(self) -> SamplingParams:
        """The checked parameters. Raises ParameterError or CommandError."""
        from outrider.core.params import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=_biases(self.logit_bias or ()),
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=self.logprobs,
            grammar=self._constraint(),
        )

    def _constraint(self) -> Constraint | None:
        from outrider.core.params import Constraint

        if self.json_schema is not None and self.grammar is not None:
            raise CommandError("--grammar: --json-schema is one already; leave out one of the two")
        for kind, option, file in (
            ("json_schema", "--json-schema", self.json_schema),
            ("grammar", "--grammar", self.grammar),
        ):
            if file is not None:
                return Constraint(kind, read_text(option, file))
        return None


def parse_assignments(option: str, assignments: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` strings as a dict."""
    out: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not key:
            raise CommandError(f"{option}: {assignment!r} is not of the form KEY=VALUE")
        if key in out:
            raise CommandError(f"{option}: {key!r} is given twice")
        out[key] = value
    return out


def _biases(assignments: Sequence[str]) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in parse_assignments("--logit-bias", assignments).items():
        try:
            out[int(key)] = float(value)
        except ValueError:
            raise CommandError(f"--logit-bias: '{key}={value}' is not a token id and a number, as in 42=-100") from None
    return out


def check_draft_model(draft: DraftOptions) -> None:
    """Refuse a second model that the drafter would never ask for."""
    if draft.draft_model is None:
        return
    from outrider.drafters import registry

    if "--draft-model" not in registry.find(draft.drafter).needs:
        raise CommandError(f"--draft-model: the drafter {draft.drafter!r} has no use for it; add --drafter draft_model")


def open_engine(
    options: EngineOptions, draft: DraftOptions, *, batch_size: int = 1, enable_prefix_caching: bool = True
) -> Engine:
    """Load the model and the drafter. Raises ModelError, DrafterError or ParameterError."""
    drafter_options = parse_assignments("--drafter-option", draft.drafter_option or ())
    from outrider import Engine

    return Engine(
        options.model,
        drafter=draft.drafter,
        draft_model=draft.draft_model,
        drafter_options=drafter_options or None,
        verify=draft.verify,
        max_draft_tokens=draft.max_draft_tokens,
        runner=options.runner,
        dtype=options.dtype,
        head_dtype=options.head_dtype,
        kv_dtype=options.kv_dtype,
        threads=options.threads,
        batch_size=batch_size,
        adapt=draft.adapt,
        min_acceptance=draft.min_acceptance,
        prefill_chunk=options.prefill_chunk,
        enable_prefix_caching=enable_prefix_caching,
        cache_tokens=options.cache_tokens,
        page_size=options.page_size,
        announce=_announce if options.verbose else None,
    )


def _announce(drafter: str, forecast: Mapping[str, int]) -> None:
    if drafter != "none":
        print(f"drafter {drafter}: {memory_line(forecast)}", file=sys.stderr)


def memory_line(forecast: Mapping[str, int]) -> str:
    """A drafter's bytes in a line, in MB; what grows with the texts is not among them."""
    parts = ", ".join(f"{purpose} {size / 1e6:.1f}" for purpose, size in forecast.items() if size)
    return f"{sum(forecast.values()) / 1e6:.1f} MB ({parts})" if parts else "0 MB"


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: a parameter typed with a dataclass becomes that dataclass's fields."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        annotations = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name]
            )
            for field in fields(group)
        ]

    @wraps(function)
    def call(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**values, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def words_of(group: Any) -> list[str]:
    """The command line that gives a group of options its values; those that are as usual are left out."""
    words: list[str] = []
    for field in fields(group):
        value = getattr(group, field.name)
        if value == field.default:
            continue
        name = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(name if value else "--no-" + name.removeprefix("--"))
        else:
            words += [f"{name}={one}" for one in (value if isinstance(value, list) else [value])]
    return words
