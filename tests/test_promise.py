"""The promise: tokens and log-probabilities equal plain decoding's, bit for bit, whatever speculation does.

Plain decoding here is: one sequence at a time, the whole prompt in one chunk, no drafter. Every other setting is
compared with it by `==`, and has to have had guesses refused, so that the comparison can fail.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from heads import head_folder, medusa_folder, ngrams_folder
from outrider import Result
from rigs import MIXES, Rig, accepted, engine, mix, prompts, rejected, said

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "drafter_options": {"min_ngram": 1, "max_draft_tokens": 5}},
    "draft_model, chain": {"drafter": "draft_model", "drafter_options": {"max_draft_tokens": 4}},
    "draft_model, tree": {"drafter": "draft_model", "drafter_options": {"max_draft_tokens": 9, "width": 3, "depth": 4}},
    "junk, chain": {"drafter": "junk", "drafter_options": {"chain": True, "max_draft_tokens": 6}},
    "junk, tree": {"drafter": "junk", "drafter_options": {"max_draft_tokens": 12}},
}
RIGS = [Rig(), Rig(runner="native", dtype="fp32"), Rig(runner="native", dtype="int8")]
SEEDS = (0, 1, 2)


@cache
def plain(rig: Rig, mix_name: str, seed: int, family: str = "llama") -> list[Result]:
    alone = engine(rig, family=family, batch_size=1)
    return alone.generate(prompts(4), mix(mix_name, seed))


@pytest.mark.parametrize("mix_name", MIXES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
def test_every_drafter_writes_what_plain_decoding_writes(rig: Rig, drafter: str, mix_name: str) -> None:
    """3 seeds x batches of 1 and 4 x prefill chunks of 1, 16 and whole prompts, for each drafter and shaping."""
    results: list[Result] = []
    for batch_size, chunk in ((1, 512), (1, 1), (4, 16), (4, 512), (4, 1), (1, 16)):
        speculative = engine(rig, batch_size=batch_size, prefill_chunk=chunk, **DRAFTERS[drafter])
        for seed in SEEDS:
            got = speculative.generate(prompts(4), mix(mix_name, seed))
            assert [said(r) for r in got] == [said(r) for r in plain(rig, mix_name, seed)], (batch_size, chunk, seed)
            results += got
        speculative.runner.pages.check_integrity()
        assert speculative.runner.pages.free == speculative.runner.pages.count
    if drafter != "none":
        assert rejected(results) > 0
        if "draft_model" in drafter or mix_name == "greedy":
            assert accepted(results) > 0


OTHERS: dict[str, dict[str, Any]] = {
    "auto": {"drafter": "auto", "drafter_options": {"head": str(head_folder()), "row_cost": 0.01}},
    "auto, no head": {"drafter": "auto", "drafter_options": {"head": "none", "row_cost": 0.01}},
    "eagle": {"drafter": "eagle", "drafter_options": {"head": str(head_folder()), "width": 3, "depth": 4}},
    "layer_skip": {"drafter": "layer_skip", "drafter_options": {"exit_layer": 1, "min_reach": 0.0}},
    "lookahead": {"drafter": "lookahead", "drafter_options": {"adaptive": False}},
    "medusa": {"drafter": "medusa", "drafter_options": {"head": str(medusa_folder()), "min_confidence": 0.001}},
    "ngram_model": {"drafter": "ngram_model", "drafter_options": {"table": str(ngrams_folder()), "row_cost": 0.01}},
    "suffix": {"drafter": "suffix", "drafter_options": {"row_cost": 0.01, "memory_mb": 1.0}},
}


@pytest.mark.parametrize("mix_name", ["greedy, penalised", "T 0.7, top-k, bias", "T 1.3, all of them"])
@pytest.mark.parametrize("drafter", OTHERS)
@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
def test_the_other_methods_write_it_too(rig: Rig, drafter: str, mix_name: str) -> None:
    """Every method of the folder that guesses by itself, in a batch and in chunks."""
    speculative = engine(rig, batch_size=3, prefill_chunk=16, **OTHERS[drafter])
    results: list[Result] = []
    for seed in SEEDS:
        got = speculative.generate(prompts(4), mix(mix_name, seed))
        assert [said(r) for r in got] == [said(r) for r in plain(rig, mix_name, seed)]
        assert [r.drafter_error for r in got] == [None] * 4
        results += got
    assert rejected(results) > 0
    speculative.runner.pages.check_integrity()
    assert speculative.runner.pages.free == speculative.runner.pages.count


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("drafter", ["draft_model, tree", "junk, tree"])
@pytest.mark.parametrize("rig", RIGS[:2], ids=lambda rig: rig.runner)
def test_other_families_keep_the_promise(rig: Rig, drafter: str, family: str) -> None:
    """Biases (Qwen2) and q/k norms (Qwen3) go through the same rows."""
    speculative = engine(rig, family=family, batch_size=3, prefill_chunk=7, **DRAFTERS[drafter])
    got = speculative.generate(prompts(4), mix("T 0.7", 3))
    assert [said(r) for r in got] == [said(r) for r in plain(rig, "T 0.7", 3, family)]
    assert rejected(got) > 0


@pytest.mark.parametrize("drafter", ["ngram", "draft_model, tree", "junk, tree"])
@pytest.mark.parametrize("rig", RIGS[:2], ids=lambda rig: rig.runner)
def test_preemption_cannot_be_seen(rig: Rig, drafter: str) -> None:
    """A cache too small for the batch preempts sequences; they are fed again and write the same text."""
    small = Rig(rig.runner, rig.dtype, page_size=4, cache_tokens=112)
    speculative = engine(small, batch_size=4, prefill_chunk=16, **DRAFTERS[drafter])
    got = speculative.generate(prompts(4), mix("T 1.3, min-p", 0))
    assert [said(r) for r in got] == [said(r) for r in plain(rig, "T 1.3, min-p", 0)]
    assert speculative.preemptions > 0
    speculative.runner.pages.check_integrity()
    assert speculative.runner.pages.free == speculative.runner.pages.count


@pytest.mark.parametrize("drafter", ["ngram", "draft_model, chain"])
def test_requests_of_every_kind_share_a_batch(drafter: str) -> None:
    """Different shapings, seeds, lengths and draft lengths in one step do not touch each other."""
    from outrider import Speculation

    names = list(MIXES)
    speculative = engine(batch_size=4, prefill_chunk=9, **DRAFTERS[drafter])
    ids = {
        speculative.add(
            prompt, mix(name, seed, max_tokens=24), Speculation(max_draft_tokens=i % 5, enabled=i % 6 != 5)
        ): (
            name,
            seed,
            i,
        )
        for seed in SEEDS
        for name in names
        for i, prompt in enumerate(prompts(4))
    }
    while speculative.busy:
        speculative.step()
    for id, (name, seed, i) in ids.items():
        assert said(speculative.result(id)) == said(plain(Rig(), name, seed)[i])


def test_a_cancelled_neighbour_leaves_no_trace() -> None:
    """Pages of a cancelled request are free at once, and the others' texts stay what they were."""
    speculative = engine(batch_size=4, prefill_chunk=16, **DRAFTERS["draft_model, tree"])
    ids = [speculative.add(prompt, mix("T 0.7", 1)) for prompt in prompts(4)]
    for _ in range(3):
        speculative.step()
    free = speculative.runner.pages.free
    speculative.cancel(ids[2])
    assert speculative.runner.pages.free > free
    while speculative.busy:
        speculative.step()
    results = [speculative.result(i) for i in ids]
    for i in (0, 1, 3):
        assert said(results[i]) == said(plain(Rig(), "T 0.7", 1)[i])
    assert results[2].finish_reason == "cancelled"
    assert speculative.runner.pages.free == speculative.runner.pages.count


def test_a_verification_that_accepts_one_wrong_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparison of this file fails when a refused guess is let through."""
    from outrider.core import verify
    from outrider.core.shaping import Draw

    honest = verify.match

    def lax(tree: Any, draw: Any) -> Any:
        verdict = honest(tree, draw)
        children = tree.children()[0]
        if not verdict.path and children:
            wrong = children[0]
            after = draw(wrong)
            return verify.Verdict((wrong,), after.token, (Draw(tree.tokens[wrong], 0.0), after))
        return verdict

    monkeypatch.setattr(verify, "match", lax)
    got = engine(**DRAFTERS["ngram"]).generate(prompts(4), mix("T 0.7", 0))
    assert [r.tokens for r in got] != [r.tokens for r in plain(Rig(), "T 0.7", 0)]
