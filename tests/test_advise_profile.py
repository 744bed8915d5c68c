"""Profiles: what is measured, how it is kept and found, and what is predicted from it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider import Engine
from outrider.advise.advice import by_profile
from outrider.advise.chart import Chart, Series, bar, page, svg
from outrider.advise.measure import Additions, Plan, Turn, measure
from outrider.advise.picture import break_evens, profile_page
from outrider.advise.predict import chain_cost, predict
from outrider.advise.probe import Followed, Moment, follow
from outrider.advise.prompts import Text
from outrider.advise.sweep import sweep
from outrider.cli import main
from outrider.drafters.costs import Costs
from outrider.engine.profile import Counts, Drafting, Forward, Profile, ProfileError, find, key_of, starting_costs
from outrider.runtime.load import Loaded
from rigs import Rig, files, loaded
from tiny import tiny_model

NATIVE = Rig(runner="native")
SMALL = Plan(
    rows=(1, 2, 4, 8),
    batches=(2,),
    rows_each=(1, 3),
    context=16,
    long=48,
    long_rows=(1, 4),
    rounds=2,
    tokens=6,
    prompts=(20,),
)
TEXTS = tuple(Text(workload, f"say {workload}", chat=False) for workload in ("chat", "code"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model(rig: Rig = NATIVE) -> Loaded:
    return loaded(files(), rig)


def made(**changes: Any) -> Profile:
    """A profile by hand: rows cost 10 %, guesses of `ngram` nothing, those of `eagle` 0.2 steps each."""
    texts = {"chat": Counts([4], 6, {0: 1, 2: 2}, [2, 2], [2, 1])}
    return replace(
        Profile(
            key={"machine": {"cpu": "abacus"}, "threads": 1, "formats": {}},
            name="tiny",
            made="2026-01-01T00:00:00+00:00",
            outrider="0",
            context=8,
            forwards=[Forward(1, rows, 8, 1 + 0.1 * (rows - 1)) for rows in (1, 2, 9)]
            + [Forward(4, rows, 8, 1.3 + 0.3 * (rows - 4)) for rows in (4, 8, 36)]
            + [Forward(1, 1, 108, 1.5)],
            draws={},
            draftings=[
                Drafting("none", 0, 0, 0, 2.0, 0.1),
                Drafting("ngram", 0, 0, 0, 2.0, 0.1, texts=texts),
                Drafting("eagle", 0.05, 0.1, 0.2, 3.0, 0.1, memory=5, texts=texts),
            ],
        ),
        **changes,
    )


def test_costs_lie_between_what_was_measured() -> None:
    profile = made()
    assert profile.seconds(2) == pytest.approx(1.1)
    assert profile.seconds(5) == pytest.approx(1.4)
    assert profile.seconds(12) == pytest.approx(2.1)  # on along the last two
    assert profile.seconds(6, batch=4) == pytest.approx(1.9)
    assert profile.seconds(1, context=58) == pytest.approx(1.25)  # half of the way to the longer context


def test_a_prediction_is_the_sum_of_its_steps() -> None:
    """6 tokens behind the first in 3 steps, one without and two with 2 guesses, behind a prompt of 4 tokens."""
    profile = made(forwards=[Forward(1, rows, 8, 1 + 0.1 * (rows - 1)) for rows in (1, 9)])
    counts = profile.draftings[1].counts()
    found = predict(profile, "eagle", counts)
    assert found.plain == pytest.approx(2.4 + 6)
    assert found.drafted == pytest.approx(3.4 + (1 + 0.05) + 2 * (1.2 + 0.1 + 0.4))
    assert found.decoding_speedup == pytest.approx(6 / 4.45)
    assert found.speedup == pytest.approx(found.plain / found.drafted)
    assert chain_cost(profile, "ngram", 4) == pytest.approx(1.4)
    with pytest.raises(ProfileError, match="'medusa'"):
        predict(profile, "medusa", counts)


def test_steps_without_being_asked_cost_what_plain_ones_do() -> None:
    """A method that rests looks at nothing: of three steps without guesses, the two that rested are plain ones."""
    profile = made()
    counts = Counts()
    for asked in (True, False, False):
        counts.saw(0, 0, 0, asked=asked)
    found = predict(profile, "eagle", counts)
    assert counts.rested == 2
    assert found.drafted - found.drafted_prompt == pytest.approx((1 + 0.05) + 2 * 1)


def turn(slow: float) -> Turn:
    """A text of plain steps of 10 and drafted ones of 16, all slowed down alike; its prompts took 100 and 130."""

    def followed(prompt: float, moments: list[Moment]) -> Followed:
        return Followed("chat", 8, [0, 0, 0, 0], prompt * slow, 0.0, moments)

    plain = [Moment(10 * slow, 9 * slow, 0, asked=False)] * 3
    drafted = [Moment(16 * slow, 12 * slow, 2, asked=True)] * 3
    return Turn({"none": followed(100, plain), "eagle": followed(130, drafted)})


def test_what_a_method_adds_is_measured_by_ratio() -> None:
    """A turn in which the machine was half as fast says the same of the method as the others do."""

    def forward(rows: int, context: int) -> float:
        return 9 + rows  # bare: a row takes 10, three rows 12

    for slow in (1.0, 2.0):
        read = Additions([turn(1.0), turn(slow), turn(1.0)], forward)
        assert read.none == 1  # the median turn's
        ratio = (10 + read.none) / 10  # a plain step of the profile over one within a text
        assert [seconds for _, seconds in read.steps("eagle")] == pytest.approx([16 * ratio - 12] * 6)
        start, each = read.prompts
        assert [s for _, s in read.prompt("eagle", lambda moment: 99)] == pytest.approx([1.3 * (start + 8 * each)] * 3)


def test_break_even_of_a_profile() -> None:
    """One guess at 10 % pays above 0.1; at 10 % and 0.3 of a step beside it above 0.4."""
    assert dict(break_evens(made(), "ngram"))[1] == pytest.approx(0.1, abs=1e-6)
    assert dict(break_evens(made(), "eagle"))[1] == pytest.approx(0.4, abs=1e-6)


def test_counts() -> None:
    """Acceptance by depth is among those that were reached, and two halves add up to the whole."""
    counts, other = Counts(), Counts()
    for drafted, depth, accepted in ((3, 3, 2), (3, 3, 0), (0, 0, 0), (2, 2, 2)):
        counts.saw(drafted, depth, accepted)
    assert (counts.tokens, counts.steps, counts.drafted) == (8, {3: 2, 0: 1, 2: 1}, 8)
    assert counts.acceptance() == [2 / 3, 1.0, 0.0]
    assert counts.tokens_per_step == 2
    assert counts.error == pytest.approx(0.5)  # 0, 0, 2, 2: deviation 1, four steps
    other.saw(1, 1, 1)
    counts.add(other)
    assert (counts.tokens, counts.tried, counts.right) == (10, [4, 3, 2], [3, 2, 0])


def test_a_profile_is_measured_kept_and_found(cache: Path) -> None:
    """Every shape, draw and method is there; another dtype or model has none; what is damaged is told."""
    target = model()
    engine = Engine.from_loaded(target, adapt=True)
    profile = measure(target, {"none": engine, "ngram": engine}, version="1", plan=replace(SMALL, texts=TEXTS))
    assert [(f.batch, f.rows // f.batch, f.context) for f in profile.forwards] == SMALL.shapes
    assert all(f.seconds > 0 for f in profile.forwards)
    assert [d.method for d in profile.draftings] == ["none", "ngram"]
    assert set(profile.draftings[0].counts().steps) == {0}
    assert set(profile.draftings[1].texts) == {"chat", "code"}
    target.runner.pages.check_integrity()
    assert target.runner.pages.free == target.runner.pages.count

    assert find(target) is None is starting_costs(target)
    place = profile.save()
    assert place.is_relative_to(cache)
    assert find(target) == profile
    assert find(model(replace(NATIVE, dtype="int8"))) is None
    assert find(loaded(tiny_model(seed=5), NATIVE)) is None
    costs = starting_costs(target)
    assert costs is not None
    assert [rows for rows, _ in costs] == [1, 2, 4, 8]
    assert costs[0][1] == 1
    begun = Engine.from_loaded(target, adapt=True)
    assert begun.use_profile()
    assert begun._costs.cost(8) == pytest.approx(max(costs[3][1], begun._costs.cost(6) * 1.002))
    assert begun._costs.assumed == Costs().assumed  # rejection must not depend on what was measured
    place.write_text("{")
    with pytest.raises(ProfileError, match="outrider profile"):
        find(target)
    assert starting_costs(target) is None
    place.write_text(json.dumps({**asdict(profile), "version": 99}))
    with pytest.raises(ProfileError, match="version 2"):
        find(target)


def test_the_key_tells_machines_settings_and_models_apart() -> None:
    keys = [
        key_of(model()),
        key_of(model(Rig())),
        key_of(model(replace(NATIVE, kv_dtype="bf16"))),
        key_of(model(replace(NATIVE, threads=2))),
    ]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)


def test_following_counts_what_the_engine_did() -> None:
    """The counts of a text are those of the same request's result."""
    engine = Engine.from_loaded(model(), drafter="ngram")
    text = Text("chat", "a b a b a b", chat=False)
    (found,) = follow(engine, "ngram", [text], max_tokens=30)
    from outrider import SamplingParams

    (result,) = engine.generate([engine.encode("a b a b a b")], SamplingParams(max_tokens=30))
    assert found.tokens == result.tokens
    assert found.counts.total_steps == len(result.steps) - 1
    assert found.counts.tokens == 1 * len(result.steps) - 1 + sum(step.accepted for step in result.steps)


def test_a_sweep_sets_the_acceptance() -> None:
    """At 0 each step brings one token and at 1 all it can; the formula then is what was measured."""
    target = loaded(tiny_model(context=1024), NATIVE)
    cells = sweep(target, acceptances=(0.0, 1.0), lengths=(1, 3), length=16)
    assert [(c.acceptance, c.guesses) for c in cells] == [(0.0, 1), (1.0, 1), (0.0, 3), (1.0, 3)]
    for cell in cells:
        assert cell.steps >= 40
        assert cell.tokens == cell.steps * (1 + cell.guesses * cell.acceptance)
        assert cell.measured == pytest.approx(cell.formula)


def test_advice_from_a_profile() -> None:
    """Ranked by the profile's own costs and counts: look-up is cheaper than a head that is no better."""
    advice = by_profile(made(), "chat", local="tiny")
    assert [row.method for row in advice.rows] == ["ngram", "eagle", "none"]
    assert advice.best.usual == pytest.approx(predict(made(), "ngram", made().draftings[1].counts()).decoding_speedup)
    assert "outrider serve --model tiny --drafter ngram" in advice.commands["ngram"]["outrider"]
    assert by_profile(made(), "chat", batch=4).rows[0].method == "none"  # rows of a batch are dear in this profile


def test_an_engine_that_lacks_the_best_method_gets_the_next() -> None:
    """`auto` is ours alone: others get what comes behind it, and plain decoding where nothing does."""
    profile = made()
    profile.draftings[1] = replace(profile.draftings[1], method="auto")
    advice = by_profile(profile, "chat", local="tiny")
    assert [row.method for row in advice.rows] == ["auto", "eagle", "none"]
    assert advice.ready("outrider") == ("auto", "outrider serve --model tiny --drafter auto")
    assert advice.ready("vllm")[0] == "eagle"
    profile.draftings.pop(2)
    assert by_profile(profile, "chat").ready("llama.cpp") == ("none", "llama-server -m MODEL.gguf")


def test_charts_stand_alone() -> None:
    """No script and no address in a page but SVG's namespace; names are escaped; each series has its line."""
    chart = Chart("t", "x", "y", [Series("<a>", [(0, 1), (2, 3)]), Series("b", [(0, 1), (2, 2)], 1, dots=True)], 1.0)
    drawn = svg(chart)
    assert drawn.count("<polyline") == 1
    assert drawn.count("<circle") == 2
    assert "&lt;a&gt;" in drawn
    whole = page("P", "i", [("h", drawn)]) + profile_page(made())
    assert "<script" not in whole
    assert whole.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "prefers-color-scheme: dark" in whole
    assert bar(1, 2, 4) == "██"


def test_profile_and_advise_as_a_user_runs_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a profile advice is refused with the way out; with one it ranks what was measured."""
    folder = tmp_path / "tiny"
    tiny_model(folder, vocabulary=300, context=2048)
    common = [str(folder), "--threads", "1"]
    assert main(["advise", *common]) == 2
    assert f"outrider profile {folder} --threads 1" in capsys.readouterr().err
    page_file = tmp_path / "p.html"
    assert main(["profile", *common, "--rounds", "2", "--tokens", "4", "--out", str(page_file)]) == 0
    shown = capsys.readouterr()
    assert "pays above" in shown.out
    assert "left out: eagle" in shown.err
    assert "<svg" in page_file.read_text()
    assert main(["advise", *common, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in advice["rows"]} == {"none", "ngram", "suffix", "auto"}
    assert advice["basis"].startswith("profile measured here")


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["no-such-model"], "no-such-model"),
        (["x", "--rounds", "1"], "--rounds"),
        (["x", "--out", "p.pdf"], "p.pdf"),
        (["x", "--out", "/no/such/p.html"], "--out: /no/such"),
    ],
)
def test_profile_refuses_in_one_line(arguments: list[str], culprit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert culprit in error
    assert error.count("\n") == 1
