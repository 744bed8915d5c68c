"""The promise on the real model: SmolLM2-135M-Instruct, 20 prompts, every drafter, dtype and kind of sampling.

The draft model is the target itself in another precision: it agrees most of the time and differs now and then.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outrider import Engine, Result, SamplingParams
from outrider.runtime.load import Loaded, load
from rigs import MIXES, accepted, rejected, said

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError(shape.kind)
"""
PROMPTS: list[Any] = [
    "The sea was calm that morning, and",
    "Once upon a time, in a town of clocks,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import json\n\n\ndef read(path):\n",
    "Q: What is the capital of France?\nA:",
    "| name | age |\n|---|---|\n| Ada | 36 |\n",
    '{"name": "Ada", "born": 1815, "tags": [',
    "tick tock tick tock tick tock tick",
    "Überraschung! Das Wetter wird 🚀 und naïve",
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Name three rivers and where they end."}],
    [{"role": "user", "content": f"Rename area to surface and change nothing else:\n\n{CODE}"}],
    [{"role": "user", "content": f"Explain this function:\n\n{CODE}"}],
    [{"role": "user", "content": "Translate into French: Good morning, how are you?"}],
    [{"role": "user", "content": "What is 17 times 23? Think step by step."}],
    [{"role": "user", "content": "Write a limerick about a cat."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "The opposite of hot?"}],
    [{"role": "user", "content": "Repeat: one two three four five six seven eight nine ten eleven twelve."}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "ngram_model": {"drafter": "ngram_model"},
    "eagle": {"drafter": "eagle"},  # the head that comes with the package
    "auto": {"drafter": "auto"},
    "lookahead": {"drafter": "lookahead"},
    "layer_skip": {"drafter": "layer_skip"},
    "draft_model, tree": {"drafter": "draft_model", "drafter_options": {"max_draft_tokens": 9, "width": 3, "depth": 4}},
    "junk, tree": {"drafter": "junk", "drafter_options": {"max_draft_tokens": 12}},
}
DTYPES = ["auto", "int8", "bf16"]
CASES = [("greedy", 1, 512), ("T 0.7, top-p, penalties", 4, 16), ("T 1.3, min-p", 4, 512)]


@cache
def model(dtype: str) -> Loaded:
    return load(MODEL, dtype=dtype, cache_tokens=4096)


def params(mix: str) -> SamplingParams:
    return replace(MIXES[mix], seed=11, logprobs=3, max_tokens=24)


@cache
def plain(dtype: str, mix: str) -> list[Result]:
    return Engine.from_loaded(model(dtype), batch_size=1).generate(PROMPTS, params(mix))


@pytest.mark.parametrize(("mix", "batch_size", "chunk"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_and_logprobs_equal_plain_decoding(
    dtype: str, drafter: str, mix: str, batch_size: int, chunk: int
) -> None:
    """20 prompts x 24 tokens, `==` in tokens, text, log-probabilities and ends; guesses were refused."""
    draft = model("int8" if dtype == "auto" else "auto") if drafter.startswith("draft_model") else None
    engine = Engine.from_loaded(
        model(dtype), draft=draft, batch_size=batch_size, prefill_chunk=chunk, **DRAFTERS[drafter]
    )
    got = engine.generate(PROMPTS, params(mix))
    want = plain(dtype, mix)
    assert [said(a)[:-1] for a in got] == [said(b)[:-1] for b in want]
    assert rejected(got) > 0
    if draft is not None:
        assert accepted(got) > 100
    assert engine.runner.pages.free == engine.runner.pages.count
