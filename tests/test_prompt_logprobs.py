"""Log-probabilities of a prompt: those that the model has when it writes the same text, bit for bit."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from outrider import Engine, Result, SamplingParams, Speculation
from outrider.core.params import ParameterError
from rigs import Rig, engine, prompts
from serving import MODEL, serving, settled

RIGS = [Rig(), Rig("native", "int8", kv_dtype="bf16"), Rig("native", "fp32", page_size=8)]
WRITE = SamplingParams(temperature=0.8, seed=3, max_tokens=110, logprobs=2, ignore_eos=True)
JUDGE = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=2, ignore_eos=True)


def written(rig: Rig) -> tuple[list[int], Result]:
    """A text, and how its tokens were drawn one after the other."""
    (result,) = engine(rig).generate([prompts(1)[0]], WRITE)
    return result.prompt_tokens + result.tokens, result


@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
@pytest.mark.parametrize("chunk", [7, 512])
def test_a_prompt_is_judged_as_it_was_written(rig: Rig, chunk: int) -> None:
    """Alone and beside others, in any chunks, with a drafter: the first token has none, each other one that of the
    draw, and what is written behind the prompt is what is written without asking."""
    text, result = written(rig)
    assert result.logprobs is not None
    plain = engine(rig).generate([text], SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True))[0]
    judging = engine(rig, drafter="ngram", prefill_chunk=chunk)
    several: list[Any] = [prompts(3)[2], text, text[:40]]
    _, whole, part = judging.generate(several, JUDGE)
    for judged, tokens in ((whole, text), (part, text[:40])):
        assert judged.prompt_logprobs is not None
        assert judged.prompt_logprobs[0] is None
        assert [entry.token for entry in judged.prompt_logprobs[1:] if entry] == tokens[1:]
        start = len(result.prompt_tokens)
        assert judged.prompt_logprobs[start:] == result.logprobs[: len(tokens) - start]
    assert (whole.tokens, whole.logprobs) == (plain.tokens, plain.logprobs)


def test_a_preempted_prompt_is_judged_once() -> None:
    """It gives its pages back half-way: each token has one entry all the same, with the same bits."""
    rig = Rig("native", "fp32", page_size=8, cache_tokens=320)
    texts = [(phrase * 30)[:140] for phrase in prompts(3)]
    wanted = [engine(rig).generate([text], JUDGE)[0].prompt_logprobs for text in texts]
    small = engine(rig, prefill_chunk=24)
    ids = [small.add(text, JUDGE) for text in texts[:2]]
    small.step()
    young = small._active[ids[1]]
    while young.sequence.rows.length < 48:
        small.step()
    victim = small._scheduler.running.pop()
    assert victim is young.sequence
    victim.rows.release()
    small._scheduler.waiting.appendleft(victim)
    assert young.judged is not None
    assert 24 < len(young.judged) < 140
    ids.append(small.add(texts[2], JUDGE))
    while small.busy:
        small.step()
    assert [small.result(id).prompt_logprobs for id in ids] == wanted


def test_a_prompt_may_be_judged_alone() -> None:
    """With max_tokens 0 nothing is written; without prompt_logprobs there must be a token."""
    one: Engine = engine()
    (result,) = one.generate(
        [prompts(1)[0]], SamplingParams(max_tokens=0, prompt_logprobs=0), speculation=Speculation(enabled=False)
    )
    assert (result.tokens, result.text, result.finish_reason) == ([], "", "length")
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_tokens)
    assert one.runner.pages.free == one.runner.pages.count
    with pytest.raises(ParameterError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_an_echo_has_its_log_probabilities() -> None:
    """`echo` with `logprobs`: the prompt's entries stand before the text's, streamed or not, for each choice, and
    every entry's text begins where `text_offset` says; with max_tokens 0 they stand alone."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "abcd abcd ab", "echo": True, "logprobs": 2, "seed": 4, "n": 2}
    with serving() as running:
        url = f"{running.url}/v1/completions"
        bare = httpx2.post(url, json=body | {"echo": False, "max_tokens": 9}).json()["choices"]
        whole = httpx2.post(url, json=body | {"max_tokens": 9}).json()["choices"]
        for choice, without in zip(whole, bare, strict=True):
            said = choice["logprobs"]
            assert choice["text"] == body["prompt"] + without["text"]
            assert said["token_logprobs"][12:] == without["logprobs"]["token_logprobs"]
            assert (said["token_logprobs"][0], said["top_logprobs"][0]) == (None, None)
            assert all(value < 0 for value in said["token_logprobs"][1:])
            for token, offset in zip(said["tokens"][:12], said["text_offset"], strict=False):
                assert choice["text"][offset:].startswith(token)
        assert whole[0]["logprobs"]["token_logprobs"][:12] == whole[1]["logprobs"]["token_logprobs"][:12]
        judged = httpx2.post(url, json=body | {"max_tokens": 0, "n": 1}).json()["choices"][0]
        assert (judged["text"], judged["finish_reason"]) == (body["prompt"], "length")
        assert judged["logprobs"] == {key: value[:12] for key, value in whole[0]["logprobs"].items()}
        chunks = [
            chunk.choices[0]
            for chunk in running.client.completions.create(**body | {"n": 1, "max_tokens": 9}, stream=True)
        ]
        assert "".join(chunk.text for chunk in chunks) == whole[0]["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [x for c in chunks if c.logprobs for x in getattr(c.logprobs, name)] == whole[0]["logprobs"][name]
        refused = httpx2.post(url, json={"model": MODEL, "prompt": "ab", "max_tokens": 0, "echo": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        settled(running)
