"""What a caller may ask of the text: the sampling parameters, checked at the door."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

__all__ = ["Constraint", "ParameterError", "SamplingParams"]

CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")


class ParameterError(ValueError):
    """A parameter outside its range. `parameter` is its name, for error objects that carry one."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Constraint:
    """What form the text must have.

    `text` is a JSON schema, a regular expression, a JSON list of strings (`choice`), or a grammar in Lark's or
    llama.cpp's (GBNF) notation. It is checked for being sound by `engine.grammar`.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINTS:
            raise ParameterError("grammar", f"{self.kind!r} is not one of {', '.join(CONSTRAINTS)}")
        if not isinstance(self.text, str) or not self.text:
            raise ParameterError("grammar", f"{self.text!r} is no {self.kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters under the names of OpenAI and vLLM. With prompt and weights, all that the text depends on.

    Applied in vLLM's order: `logit_bias`, `min_tokens`, repetition penalty (over prompt and output), frequency and
    presence penalties (over the output), temperature, `min_p`, `top_k`, `top_p`. `logprobs` are those of the model's
    own logits, before all of these (vLLM's `raw_logprobs`).
    """

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    min_tokens: int = 0  # no end of text before so many tokens
    max_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # leave the names of special tokens out of the text
    seed: int | None = None  # None = drawn at admission and reported
    logprobs: int | None = None  # None = none, k = the chosen token's and the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; `max_tokens` may be 0 then
    grammar: Constraint | None = None  # the form that the text must have

    def __post_init__(self) -> None:
        def real(name: str, low: float, high: float, *, open_low: bool = False) -> None:
            value = getattr(self, name)
            # not math.isfinite: a whole number may be too large for a float
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == inf:
                raise ParameterError(name, f"{value!r} is not a finite number")
            if value > high or value < low or (open_low and value == low):
                raise ParameterError(name, f"{value!r} is outside {'(' if open_low else '['}{low:g}, {high:g}]")

        def whole(name: str, low: int, high: int) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ParameterError(name, f"{value!r} is not a whole number")
            if not low <= value <= high:
                raise ParameterError(name, f"{value!r} is outside [{low:,}, {high:,}]")

        def listed(name: str) -> tuple[Any, ...]:
            value = getattr(self, name)
            if value is not None and (isinstance(value, Mapping) or not isinstance(value, Iterable)):
                raise ParameterError(name, f"{value!r} is not a list")
            return tuple(value or ())

        real("temperature", 0, 100)
        real("top_p", 0, 1, open_low=True)
        real("min_p", 0, 1)
        real("repetition_penalty", 0, 100, open_low=True)
        real("frequency_penalty", -2, 2)
        real("presence_penalty", -2, 2)
        whole("top_k", 0, 2**31 - 1)
        whole("max_tokens", 1 if self.prompt_logprobs is None else 0, 2**31 - 1)
        whole("min_tokens", 0, self.max_tokens)
        if self.seed is not None:
            whole("seed", -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, 0, 1024)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"{getattr(self, name)!r} is neither true nor false")
        if isinstance(self.grammar, Mapping):
            object.__setattr__(self, "grammar", Constraint(**self.grammar))
        if self.grammar is not None and not isinstance(self.grammar, Constraint):
            raise ParameterError("grammar", f"{self.grammar!r} is no constraint")
        if self.grammar is not None and self.ignore_eos:
            raise ParameterError("ignore_eos", "a grammar's text ends with the end of text; leave out one of the two")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", listed("stop"))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ParameterError("stop", f"{text!r} is not a non-empty string")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ParameterError("stop", f"{text!r} is not Unicode: no text has half a surrogate pair")
        object.__setattr__(self, "stop_token_ids", listed("stop_token_ids"))
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ParameterError("stop_token_ids", f"{token!r} is not a token id")
        bias: dict[int, float] = {}
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ParameterError("logit_bias", f"{self.logit_bias!r} does not map token ids to biases")
        for key, value in (self.logit_bias or {}).items():
            try:
                token = int(key) if isinstance(key, int | str) and not isinstance(key, bool) else -1
            except ValueError:
                token = -1
            if isinstance(key, str) and key != str(token):  # " 5" or "05" beside "5" would be one token twice
                raise ParameterError("logit_bias", f"{key!r} is not a token id")
            if token < 0 or isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                raise ParameterError("logit_bias", f"{key!r}: {value!r} is not a token id with a bias in [-100, 100]")
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise ParameterError if a parameter names a token outside the vocabulary."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if token >= vocabulary:
                    raise ParameterError(name, f"token {token} is outside the vocabulary of {vocabulary:,}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from JSON; an unknown name is refused."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise ParameterError(name, f"unknown sampling parameter; known are {', '.join(sorted(known))}")
        return cls(**values)

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on the tokens before it other than through the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
