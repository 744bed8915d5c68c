"""Replay: acceptance is what was set, exactly at its ends and by the law of large numbers between them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from outrider import Result, Speculation
from outrider.drafters.base import DrafterError
from rigs import accepted, engine, mix, prompts, rejected, said

LENGTH = 40


def run(plain: list[Result], acceptance: str, seed: int = 0) -> list[Result]:
    options = {"max_draft_tokens": 4, "acceptance": acceptance, "seed": seed}
    replay = engine(drafter="replay", drafter_options=options, batch_size=4)
    each = [Speculation(prediction=r.tokens, drafter="replay") for r in plain]
    return replay.generate(prompts(4), mix("T 0.7", 8, max_tokens=LENGTH), speculation=each)


@pytest.fixture(scope="module")
def plain() -> list[Result]:
    return engine(batch_size=4).generate(prompts(4), mix("T 0.7", 8, max_tokens=LENGTH))


def test_the_ends_are_exact(plain: list[Result]) -> None:
    """At 1 every guess is right and each step brings all it can, at 0 none is; the text is the same at both."""
    all_right, all_wrong = run(plain, "1"), run(plain, "0")
    assert [said(r) for r in all_right] == [said(r) for r in all_wrong] == [said(r) for r in plain]
    assert rejected(all_right) == 0 < accepted(all_right)
    assert accepted(all_wrong) == 0 < rejected(all_wrong)
    # the first token has no draft, then 5 tokens per step; the last step takes what is left
    assert [len(r.steps) for r in all_right] == [1 + math.ceil((len(r.tokens) - 1) / 5) for r in plain]


def test_acceptance_is_what_was_set(plain: list[Result]) -> None:
    """Of the guesses that were tested, 60 % come true. 400 tests or more: 4 standard errors are below 0.1."""
    tests = hits = 0
    for seed in range(6):
        for result in run(plain, "0.6", seed):
            for step in result.steps:
                hits += step.accepted
                tests += step.accepted + (step.accepted < step.depth)
    assert tests > 400
    assert hits / tests == pytest.approx(0.6, abs=0.1)


def test_acceptance_by_depth(plain: list[Result]) -> None:
    """The first guess is always right and the second never: each full step brings two tokens."""
    for result in run(plain, "1,0"):
        assert {step.accepted for step in result.steps[1:-1]} == {1}


def test_the_same_seed_replays_the_same_steps(plain: list[Result]) -> None:
    first, again, other = (run(plain, "0.5", seed) for seed in (3, 3, 4))
    assert [r.steps for r in first] == [r.steps for r in again]
    assert [r.steps for r in first] != [r.steps for r in other]


def test_the_truth_from_a_file(plain: list[Result], tmp_path: Path) -> None:
    """Results of `outrider generate --json`, one per line, are found by their prompts; other prompts get no guess."""
    file = tmp_path / "truth.jsonl"
    file.write_text("\n".join(json.dumps({"prompt_tokens": r.prompt_tokens, "tokens": r.tokens}) for r in plain[:3]))
    replay = engine(drafter="replay", drafter_options={"truth": str(file), "acceptance": "1"}, batch_size=4)
    results = replay.generate(prompts(4), mix("T 0.7", 8, max_tokens=LENGTH))
    assert [said(r) for r in results] == [said(r) for r in plain]
    assert accepted(results[:3]) > 0 == rejected(results)
    assert accepted(results[3:]) == 0


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"acceptance": "1.5"}, "1.5"),
        ({"acceptance": "half"}, "half"),
        ({"acceptance": ""}, "acceptance"),
        ({"truth": "/no/such/file"}, "/no/such/file"),
        ({"truth": __file__}, "not JSON"),
    ],
)
def test_refused_by_name(options: dict[str, str], culprit: str) -> None:
    with pytest.raises(DrafterError, match=culprit):
        engine(drafter="replay", drafter_options=options)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"prompt_tokens": [], "tokens": []}\n' + "[" * 100_000, "9" * 5000])
def test_a_truth_that_no_stack_holds_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "truth.json"
    file.write_text(text)
    with pytest.raises(DrafterError, match=r"truth\.json is not JSON"):
        engine(drafter="replay", drafter_options={"truth": str(file)})


def test_a_truth_without_tokens_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "truth.json"
    file.write_text('{"text": "x"}')
    with pytest.raises(DrafterError, match="outrider generate --json"):
        engine(drafter="replay", drafter_options={"truth": str(file)})
