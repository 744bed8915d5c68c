"""Sampling parameters and drafter options are checked at the door."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.params import ParameterError, SamplingParams
from outrider.drafters import registry
from outrider.drafters.base import DrafterError
from outrider.engine.speculation import Speculation

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -1),
    ("top_k", -1),
    ("top_k", 1.5),
    ("repetition_penalty", 0),
    ("frequency_penalty", 3),
    ("presence_penalty", -3),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", 1000),
    ("seed", 2**64),
    ("seed", 0.5),
    ("logprobs", -1),
    ("stop", [""]),
    ("stop", [1]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {" 5": 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {1: 1000}),
    ("ignore_eos", 1),
    ("temprature", 1),
    ("temperature", 10**400),
    ("stop", 5),
    ("stop", {"x": 1}),
    ("stop_token_ids", 5),
    ("logit_bias", [1]),
    ("logit_bias", {1.5: 1}),
    ("logit_bias", {True: 1}),
    ("logit_bias", {1: float("nan")}),
    ("max_tokens", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_parameter_is_refused_by_its_name(name: str, value: Any) -> None:
    """The error carries the parameter's name, and the message begins with it."""
    with pytest.raises(ParameterError, match=f"^{name}: ") as error:
        SamplingParams.from_dict({name: value})
    assert error.value.parameter == name


def test_null_in_json_is_the_default() -> None:
    """Clients send null for lists that they do not set."""
    empty = SamplingParams.from_dict({"stop": None, "stop_token_ids": None, "logit_bias": None})
    assert empty == SamplingParams()


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    """Bias and stop ids name tokens of this model."""
    for params in (SamplingParams(logit_bias={50: 1}), SamplingParams(stop_token_ids=[50])):
        params.check_vocabulary(51)
        with pytest.raises(ParameterError, match="token 50 is outside the vocabulary of 50"):
            params.check_vocabulary(50)


def test_drafter_options_come_from_text_and_from_json() -> None:
    """`key=value` strings and JSON values give the same options."""
    text = registry.options("suffix", {"max_draft_tokens": "3", "row_cost": "2.5"})
    assert text == registry.options("suffix", {"max_draft_tokens": 3, "row_cost": 2.5})
    assert registry.options("junk", {"chain": "true"}) == registry.options("junk", {"chain": True})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("nope", {}, "drafter 'nope' is unknown; there are .*none"),
        ("ngram", {"max_ngrams": 1}, "ngram: unknown option 'max_ngrams'; there are .*max_ngram"),
        ("ngram", {"max_ngram": "x"}, "ngram: max_ngram: 'x' is not a whole number"),
        ("ngram", {"max_ngram": 2.5}, "ngram: max_ngram: 2.5 is not a whole number"),
        ("suffix", {"row_cost": "nan"}, "suffix: row_cost: 'nan' is not a number"),
        ("junk", {"chain": "perhaps"}, "junk: chain: 'perhaps' is not true or false"),
        ("ngram", {"max_draft_tokens": -1}, "ngram: max_draft_tokens -1 is outside"),
    ],
)
def test_bad_drafter_options_are_refused_by_name(name: str, values: dict[str, Any], message: str) -> None:
    """Unknown methods, options and kinds of value are named, with what there is."""
    with pytest.raises(DrafterError, match=message):
        registry.options(name, values)


@pytest.mark.parametrize(
    ("name", "value"), [("verify", "typical"), ("max_draft_tokens", -1), ("enabled", "yes"), ("k", 1)]
)
def test_bad_speculation_is_refused_by_name(name: str, value: Any) -> None:
    """Per-request options too."""
    with pytest.raises(ParameterError, match=f"^{name}: "):
        Speculation.from_dict({name: value})
