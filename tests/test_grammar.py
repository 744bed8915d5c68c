"""Grammars: the text keeps its form, drafts are pruned and forced by it, and the promise holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider import Result, SamplingParams, Speculation, Tree
from outrider.core.params import Constraint, ParameterError
from outrider.engine.grammar import Grammars
from rigs import Rig, accepted, engine, files, prompts, rejected, said

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a much longer word", "another long word"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "kind", "flags"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "regex": Constraint("regex", "(the (quick|slow) brown fox ){2}[0-9]{1,3}!"),
    "choice": Constraint("choice", '["yes, of course", "no, never", "yes, but"]'),
    "lark": Constraint("grammar", 'start: "(" start ")" | /[a-c]{2}/'),
    "gbnf": Constraint("grammar", 'root ::= "key=" [a-f] [a-f] ";" root?'),
}
RIGS = [Rig(), Rig(runner="native", dtype="fp32")]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"drafter": "ngram", "drafter_options": {"min_ngram": 1}},
    "draft_model, tree": {"drafter": "draft_model", "drafter_options": {"max_draft_tokens": 9, "width": 3, "depth": 4}},
    "junk, tree": {"drafter": "junk", "drafter_options": {"max_draft_tokens": 12}},
    "junk, chain": {"drafter": "junk", "drafter_options": {"chain": True, "max_draft_tokens": 6}},
}


def params(form: str, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=120, logprobs=2, grammar=FORMS[form])


def fits(form: str, text: str) -> bool:
    if form == "json_schema":
        value = json.loads(text)
        return list(value) == ["name", "kind", "flags"] and value["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
    pattern = {
        "regex": FORMS["regex"].text,
        "choice": "yes, of course|no, never|yes, but",
        "lark": r"\(*[a-c]{2}\)*",
        "gbnf": "(key=[a-f][a-f];)+",
    }[form]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: rig.runner)
def test_the_promise_holds_under_a_grammar(rig: Rig, drafter: str, form: str) -> None:
    """Tokens and log-probabilities equal plain decoding's, greedy and drawn, in batches; guesses were kept."""
    alone = engine(rig, batch_size=1)
    speculative = engine(rig, batch_size=3, prefill_chunk=16, **DRAFTERS[drafter])
    results: list[Result] = []
    for temperature, seed in ((0.0, 0), (0.8, 1), (1.4, 2)):
        wanted = alone.generate(prompts(3), params(form, temperature, seed))
        got = speculative.generate(prompts(3), params(form, temperature, seed))
        assert [said(r) for r in got] == [said(r) for r in wanted]
        assert all(fits(form, r.text) for r in got if r.finish_reason == "stop")
        results += got
    assert any(r.finish_reason == "stop" for r in results)
    assert accepted(results) > 0
    speculative.runner.pages.check_integrity()
    assert speculative.runner.pages.free == speculative.runner.pages.count


def test_forced_tokens_are_free_guesses() -> None:
    """A drafter gets what the grammar leaves no choice about, whatever it guesses; plain decoding does not."""
    drafted = engine(drafter="suffix").generate([prompts(1)[0]], params("regex", 0.0, 0))[0]
    plain = engine().generate([prompts(1)[0]], params("regex", 0.0, 0))[0]
    assert said(drafted) == said(plain)
    assert drafted.usage.accepted_prediction_tokens > 20
    assert len(drafted.steps) < len(plain.steps) / 2
    assert plain.usage.accepted_prediction_tokens == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_forced_tokens_are_guesses_also_while_the_drafter_rests(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafting does not pay, what the grammar forces still does: nothing is asked, and the text is the same."""
    resting = engine(**DRAFTERS[drafter])
    monkeypatch.setattr(resting._controller, "wants", lambda name, text: False)
    got = resting.generate(prompts(2), params("regex", 0.7, 3))
    plain = engine().generate(prompts(2), params("regex", 0.7, 3))
    assert [said(r) for r in got] == [said(r) for r in plain]
    for result, alone in zip(got, plain, strict=True):
        assert len(result.steps) < len(alone.steps) / 2
        drafts = [step for step in result.steps if step.drafted]
        assert {(step.drafter, step.asked) for step in drafts} == {("grammar", False)}
        assert all(step.drafted == step.accepted == step.sources.count("grammar") for step in drafts)


def test_rejection_keeps_the_form_and_the_law() -> None:
    """400 draws of a choice under rejection sampling with a draft model fall as the target's own draws do."""
    counts = []
    for speculation in (Speculation(enabled=False), Speculation(verify="rejection")):
        drafting = engine(Rig("native", "fp32"), drafter="draft_model", batch_size=16)
        many = [replace(params("choice", 1.0, seed), logprobs=None) for seed in range(400)]
        texts = [r.text for r in drafting.generate([prompts(1)[0]] * 400, many, speculation=speculation)]
        assert set(texts) <= {"yes, of course", "no, never", "yes, but"}
        counts.append(np.array([texts.count(word) for word in ("yes, of course", "no, never", "yes, but")]))
    spread = np.sqrt(counts[0] + counts[1] + 1)
    assert (np.abs(counts[0] - counts[1]) < 4 * spread).all(), counts  # a false alarm in 5,000 runs


def test_preemption_does_not_lose_the_place() -> None:
    """A sequence that was put back is fed again from its first token, and its grammar stands where it stood."""
    rig = Rig("native", "fp32", page_size=4, cache_tokens=112)
    squeezed = engine(rig, batch_size=4, drafter="junk")
    many = [replace(params("json_schema", 0.9, seed), max_tokens=60) for seed in range(4)]
    got = squeezed.generate(prompts(4), many)
    wanted = [engine(Rig("native", "fp32")).generate([p], m)[0] for p, m in zip(prompts(4), many, strict=True)]
    assert [said(r) for r in got] == [said(r) for r in wanted]
    assert squeezed.preemptions > 0
    assert rejected(got) > 0


def test_guesses_that_cannot_be_are_taken_out() -> None:
    """`fit` keeps allowed paths, drops others with all behind them, and adds what is forced within budget and depth."""
    grammars = Grammars(files().tokenizer, 97)
    encode = files().tokenizer.encode
    text = encode("x")
    grammar = grammars.start(Constraint("choice", '["abcde", "abxyz"]'), text, 1)
    a, b, c, d, x, y, z = (encode(letter)[0] for letter in "abcdxyz")
    root = text[-1]
    tree = Tree((root, a, z, b, b, x, y, d), (-1, 0, 0, 1, 2, 3, 5, 3))
    fitted = grammar.fit(tree, budget=20, depth=20, rejection=False)
    assert fitted.tokens == (root, a, b, x, y, z)
    assert fitted.parents == (-1, 0, 1, 2, 3, 4)
    assert grammar.fit(Tree.root(root), budget=1, depth=9, rejection=False).tokens == (root, a)
    assert grammar.fit(Tree.root(root), budget=9, depth=1, rejection=False).tokens == (root, a)
    law = np.full(97, 1 / 97)
    drawn = Tree((root, z, a, b), (-1, 0, 0, 1), {0: law})
    assert grammar.fit(drawn, budget=2, depth=9, rejection=True).tokens == (root, z, a)  # z has a part in its law
    text += [a, b]
    mask = grammar.mask([c])
    assert mask is not None
    assert [t for t in range(97) if mask[t // 32] >> (t % 32) & 1] == [d]
    assert grammar.mask([z]) is None


@pytest.mark.parametrize(
    ("constraint", "culprit"),
    [
        (Constraint("regex", "(a"), "unclosed"),
        (Constraint("json_schema", '{"type": "nothing"}'), "nothing"),
        (Constraint("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Constraint("json_schema", "{"), "grammar"),
        (Constraint("grammar", "start: nowhere"), "nowhere"),
        (Constraint("grammar", 'root ::= "a'), "GBNF"),
        (Constraint("regex", "a" * 2_000_000), "2,000,000"),
    ],
    ids=str,
)
def test_a_grammar_that_is_not_sound_is_refused(constraint: Constraint, culprit: str) -> None:
    """At the door, with the reason, and nothing is admitted."""
    refusing = engine()
    with pytest.raises(ParameterError, match=culprit) as refused:
        refusing.add("ab", SamplingParams(grammar=constraint))
    assert refused.value.parameter == "grammar"
    assert "\n" not in str(refused.value)
    assert not refusing.busy


def test_a_grammar_goes_without_what_would_break_it() -> None:
    """`ignore_eos` has no end to ignore; an unknown kind is refused."""
    with pytest.raises(ParameterError, match="ignore_eos"):
        SamplingParams(grammar=FORMS["regex"], ignore_eos=True)
    with pytest.raises(ParameterError, match="json_schema"):
        SamplingParams.from_dict({"grammar": {"kind": "yaml", "text": "a"}})
