"""The promise under load, and bodies that nobody would write: mixed requests at once, in any order, and fuzzed ones."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import Constraint, SamplingParams
from rigs import MIXES, Rig
from serving import MODEL, Running, serving, settled, tiny_engine, wait_until

BEGINNING = "abcdefgh abcdefgh "  # of all prompts: two pages
SMALL = Rig("native", "fp32", page_size=8, cache_tokens=640)  # too small for the batch: texts are preempted
FORMS = (
    None,
    None,
    {"regex": "(yes|no), [a-z]{3,9}[.]"},
    {
        "json": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    },
)


def requests(count: int) -> list[dict[str, Any]]:
    """Bodies of every kind: drafters, temperatures, penalties, seeds, forms, lengths, streams."""
    rng = random.Random(count)
    names = sorted(MIXES)
    out = []
    for index in range(count):
        mix = MIXES[names[index % len(names)]]
        phrase = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(3, 9)))
        form = FORMS[index % len(FORMS)]
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": BEGINNING + (phrase * 30)[: rng.randint(5, 120)],
            "max_tokens": rng.randint(8, 60),
            "seed": rng.randint(0, 2**40),
            "logprobs": 2,
            "speculation": {
                "drafter": rng.choice(["none", "ngram", "suffix", "junk", "lookahead"]),
                "max_draft_tokens": rng.randint(1, 9),
            },
        }
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            body[name] = getattr(mix, name)
        if form is None:
            body["min_tokens"] = min(mix.min_tokens, body["max_tokens"])
            body["logit_bias"] = {str(token): value for token, value in mix.logit_bias.items()}
        else:
            body["structured_outputs"] = form
        if rng.random() < 0.3:
            body["stop"] = ["ab", "!"]
        if rng.random() < 0.2:
            body["n"] = 2
        out.append(body)
    return out


def alone(body: dict[str, Any]) -> list[tuple[str, str, list[float]]]:
    """What plain decoding writes for each choice of the body, by itself."""
    skipped = {"model", "prompt", "speculation", "structured_outputs", "n"}
    given_ = {key: value for key, value in body.items() if key not in skipped}
    ((kind, text),) = body.get("structured_outputs", {"": None}).items()
    if kind:
        given_["grammar"] = Constraint(
            "json_schema" if kind == "json" else kind, text if kind == "regex" else json.dumps(text)
        )
    plain = tiny_engine(drafter="none", batch_size=1, enable_prefix_caching=False)
    out = []
    for index in range(body.get("n", 1)):
        (result,) = plain.generate([body["prompt"]], SamplingParams(**{**given_, "seed": body["seed"] + index}))
        assert result.logprobs is not None
        out.append((result.text, result.finish_reason, [entry.logprob for entry in result.logprobs]))
    return out


def answered(running: Running, body: dict[str, Any]) -> list[tuple[str, str, list[float]]]:
    answer = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [(c["text"], c["finish_reason"], c["logprobs"]["token_logprobs"]) for c in answer.json()["choices"]]


def streamed(running: Running, body: dict[str, Any]) -> list[tuple[str, str, list[float]]]:
    texts: dict[int, Any] = {index: ("", "", []) for index in range(body.get("n", 1))}
    with httpx2.stream("POST", f"{running.url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for c in json.loads(line.removeprefix("data: "))["choices"]:
                    text, reason, logprobs = texts[c["index"]]
                    texts[c["index"]] = (
                        text + c["text"],
                        c["finish_reason"] or reason,
                        logprobs + c["logprobs"]["token_logprobs"],
                    )
    return [texts[index] for index in sorted(texts)]


def abandoned(running: Running, body: dict[str, Any]) -> None:
    """A client that goes after its first chunk, or before."""
    with httpx2.stream("POST", f"{running.url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
        next(answer.iter_raw(), None)


@contextmanager
def gathered(running: Running, count: int) -> Iterator[None]:
    """The engine begins when `count` of the requests sent in the block lie before it: however fast the machine is, they
    do not come one after the other."""
    gate = threading.Event()
    commands = running.service.thread._commands

    def wait() -> None:
        gate.wait(60)

    commands.put(wait)
    yield
    try:
        wait_until(lambda: commands.qsize() >= count)
    finally:
        gate.set()


def test_the_promise_holds_under_load() -> None:
    """64 mixed requests at 1, 8 and 32 at once, shuffled, between others that are given up, in a cache too small for
    them, their beginning in the prefix cache: texts and log-probabilities equal those of each request alone on a plain
    engine that has no prefix cache."""
    bodies = requests(64)
    wanted = [alone(body) for body in bodies]
    engine = tiny_engine(SMALL, batch_size=12, prefill_chunk=48)
    with serving(engine, drafters=("none", "ngram", "suffix", "junk", "lookahead")) as running:
        for concurrency in (1, 8, 32):
            order = list(range(len(bodies)))
            random.Random(concurrency).shuffle(order)
            assert (
                answered(running, bodies[0]) == wanted[0]
            )  # leaves its pages, so that whichever comes next finds them
            settled(running)
            found = engine.prefix_hits
            with ThreadPoolExecutor(concurrency) as pool:
                jobs = {}
                with gathered(running, min(concurrency, 24)):
                    for place, index in enumerate(order):
                        if place % 5 == 0:
                            pool.submit(abandoned, running, bodies[index] | {"max_tokens": 200})
                        jobs[index] = pool.submit(streamed if place % 2 else answered, running, bodies[index])
                got = [jobs[index].result() for index in range(len(bodies))]
            assert got == wanted, concurrency
            assert engine.prefix_hits - found >= 2 * SMALL.page_size, concurrency
            settled(running)
        assert engine.preemptions > 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.sampled_from([0, 1, 2, 0.5, -1, 1e-3, 100, 1e9, None])
TEXT = st.text(max_size=6)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool", "x"]), "content": TEXT})
SPECULATION = st.fixed_dictionaries(
    {},
    optional={
        "drafter": st.sampled_from(["ngram", "junk", "zzz"]),
        "max_draft_tokens": st.integers(-1, 9),
        "verify": st.sampled_from(["match", "rejection", "x"]),
    },
)
PLAUSIBLE = st.fixed_dictionaries(
    {"model": st.just(MODEL), "max_tokens": st.integers(0, 8)},
    optional={
        "prompt": TEXT | st.lists(st.integers(-2, 120), max_size=5) | st.lists(TEXT, max_size=3),
        "messages": st.lists(MESSAGE, max_size=3),
        "temperature": NUMBERS,
        "top_p": NUMBERS,
        "top_k": NUMBERS,
        "min_p": NUMBERS,
        "repetition_penalty": NUMBERS,
        "frequency_penalty": NUMBERS,
        "n": st.integers(-1, 3),
        "stop": TEXT | st.lists(TEXT, max_size=3),
        "logit_bias": st.dictionaries(st.integers(-1, 120).map(str), st.floats(-120, 120), max_size=3),
        "min_tokens": st.integers(-1, 9),
        "seed": st.integers(-(2**64), 2**65),
        "stream": st.booleans(),
        "logprobs": st.integers(-1, 30) | st.booleans(),
        "echo": st.booleans(),
        "ignore_eos": st.booleans(),
        "structured_outputs": st.fixed_dictionaries({"regex": st.text(alphabet="ab(|)*[]", max_size=6)}) | VALUES,
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
        "speculation": SPECULATION,
        "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": TEXT}),
    },
)
ANYTHING = st.dictionaries(st.sampled_from(["model", "prompt", "messages", "stream", "n", "zzz"]), VALUES, max_size=4)
PATHS = st.sampled_from(["completions", "completions", "chat/completions"])


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Running]:
    with serving() as running:
        yield running
        settled(running)  # no text, no page and no job was left behind
        assert not running.service.thread.faults


@settings(max_examples=100, deadline=None)
@given(path=PATHS, body=PLAUSIBLE | ANYTHING)
def test_no_body_breaks_the_server(fuzzed: Running, path: str, body: dict[str, Any]) -> None:
    """Whatever comes is answered or refused with 400 or 404 in OpenAI's form: never 500, never nothing."""
    answer = httpx2.post(
        f"{fuzzed.url}/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"}, timeout=20
    )
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text or "no token is left" in answer.text or "grammar" in answer.text
    else:
        assert answer.json()["choices"]


@settings(max_examples=40, deadline=None)
@given(
    raw=st.binary(max_size=60),
    path=st.sampled_from(["v1/completions", "tokenize", "detokenize", "v1/chat/completions"]),
)
def test_no_bytes_break_the_server(fuzzed: Running, raw: bytes, path: str) -> None:
    """Bytes that are no JSON are refused."""
    answer = httpx2.post(f"{fuzzed.url}/{path}", content=raw, headers={"Content-Type": "application/json"}, timeout=20)
    assert answer.status_code == 400
