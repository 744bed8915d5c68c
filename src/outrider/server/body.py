"""What the bodies of all generating requests have in common. Unknown names and wrong kinds are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.core.params import Constraint, ParameterError, SamplingParams
from outrider.engine.speculation import Speculation

__all__ = ["Body", "Listed", "Prediction", "SamplingFields", "SpeculationFields", "StreamOptions", "TextPart", "joined"]

MAX_STOPS = 64  # they are looked for at every token
MAX_BIASES = 4096
ANY_OBJECT = Constraint("json_schema", '{"type": "object"}')
ENGINE_NAMES = {"verify": "speculation.verify", "max_draft_tokens": "speculation.max_draft_tokens"}


class Body(BaseModel):
    """A JSON object with these names only, each of its own kind: no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        """Refuse an object with more names than there are before each of them is looked at, which takes seconds."""
        if isinstance(value, dict) and len(value) > 2 * len(cls.model_fields) + 100:
            raise PydanticCustomError("too_many_names", "the object has {count} names", {"count": f"{len(value):,}"})
        return value


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]  # a long list is wrong at its first fault: nobody reads a million


class TextPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's predicted outputs."""

    type: Literal["content"]
    content: str | list[TextPart]


class SpeculationFields(Body):
    """How this request is drafted for. It changes the time that the text takes, not the text (`verify: match`)."""

    drafter: str | None = None
    max_draft_tokens: int | None = None
    verify: Literal["match", "rejection"] | None = None
    enabled: bool = True
    trace: bool = False  # tell with each piece of text who wrote it


class JsonSchema(Body):
    """`name` and `description` are labels for people."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the schema is kept either way


class ResponseFormat(Body):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None


class StreamOptions(Body):
    include_usage: bool = False


class SamplingFields(Body):
    """Under the names of OpenAI and vLLM. Ranges are checked by `core.params.SamplingParams`."""

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculation: SpeculationFields | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None  # kept in the log

    def sampling(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        grammar: Constraint | None = None,
        skip_special: bool = True,
    ) -> list[SamplingParams]:
        """One set per choice. The choices of a seed have the seeds after it. Raises ParameterError.

        `grammar` takes the place of the request's own form; special tokens are shown if `skip_special` says so.
        """
        given: dict[str, Any] = {
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens if skip_special else False,
            "seed": self.seed,
            "grammar": self.constraint() if grammar is None else grammar,
        }
        params = SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{name: value for name, value in given.items() if value is not None},
        )
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ParameterError("stop", f"{len(self.stop):,} strings, and {MAX_STOPS} are allowed")
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise ParameterError("logit_bias", f"{len(self.logit_bias or ()):,} tokens, and {MAX_BIASES:,} are allowed")
        if self.n in (None, 1) or self.seed is None:
            return [params] * (self.n or 1)
        return [replace(params, seed=(self.seed + index) % 2**64) for index in range(self.n)]

    def constraint(self) -> Constraint | None:
        """The form that the text must have. Raises ParameterError."""
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.type != "text" and outputs is not None:
            raise ParameterError("structured_outputs", "response_format says another form; leave out one of the two")
        if outputs is not None:
            return _constraint(outputs)
        if form is None:
            return None
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise ParameterError("response_format.json_schema", 'it comes with "type": "json_schema", and only with it')
        if form.json_schema is not None:
            return Constraint("json_schema", json.dumps(form.json_schema.schema_))
        return ANY_OBJECT if form.type == "json_object" else None

    def speculative(self, encode: Any) -> Speculation:
        """How it is drafted for; `encode` makes tokens of the prediction. Raises ParameterError."""
        wanted = self.speculation or SpeculationFields()
        if self.prediction is None:
            if wanted.drafter == "prediction":
                raise ParameterError(
                    "speculation.drafter", "'prediction' guesses from the field prediction, which is missing"
                )
        elif wanted.enabled and wanted.drafter not in (None, "prediction"):
            raise ParameterError(
                "prediction", f"the drafter {wanted.drafter!r} has no use for it; leave out one of the two"
            )
        return Speculation(
            drafter=wanted.drafter,
            max_draft_tokens=wanted.max_draft_tokens,
            verify=wanted.verify,
            enabled=wanted.enabled,
            prediction=None if self.prediction is None else encode(joined(self.prediction.content)),
        )

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", 'it is for streams; add "stream": true')

    @property
    def traced(self) -> bool:
        return self.speculation is not None and self.speculation.trace

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _constraint(outputs: StructuredOutputs) -> Constraint:
    given: dict[str, str] = {}
    if outputs.json_ is not None:
        given["json_schema"] = outputs.json_ if isinstance(outputs.json_, str) else json.dumps(outputs.json_)
    if outputs.json_object:
        given["json_object"] = ANY_OBJECT.text
    if outputs.regex is not None:
        given["regex"] = outputs.regex
    if outputs.choice is not None:
        given["choice"] = json.dumps(outputs.choice)
    if outputs.grammar is not None:
        given["grammar"] = outputs.grammar
    if len(given) != 1:
        raise ParameterError("structured_outputs", "give one of json, json_object, regex, choice and grammar")
    ((kind, text),) = given.items()
    return Constraint("json_schema" if kind == "json_object" else kind, text)


def joined(content: str | Sequence[TextPart]) -> str:
    """The text of a content, its parts one line after the other."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def names(body: SamplingFields | None = None, **own: str) -> Mapping[str, str]:
    """What the engine's parameters are called in one API, and in one request where it has a choice."""
    form = "structured_outputs" if body is not None and body.structured_outputs is not None else "response_format"
    return ENGINE_NAMES | {"grammar": form} | own
