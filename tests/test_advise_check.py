"""`outrider check` on drafts of every kind: good, harmful, of another family, padded, and made for another target.

The verdicts rest on a profile by hand, in which a row costs 2 % of a step and a guess as much again: they hang on what
the drafts guess, and on no clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads import eagle3, medusa
from outrider.advise.check import CheckReport, ReportError
from outrider.advise.compatibility import compare
from outrider.cli import main
from outrider.engine.profile import Drafting, Forward, Profile
from outrider.models.load import ModelFiles, open_model
from outrider.models.registry import resolve
from outrider.models.shipped import find_shipped
from rigs import draft_files, files
from test_drafter_retokenised import renumbered
from tiny import tensor, write_hf

Check = Callable[..., tuple[int, dict[str, Any]]]


def shuffled(target: ModelFiles) -> ModelFiles:
    """The same model with the rows of each matrix in another order: it says something else."""
    rng = np.random.default_rng(3)
    return replace(
        target,
        tensors={
            name: tensor(name, part.float32()[rng.permutation(part.shape[0])]) if len(part.shape) == 2 else part
            for name, part in target.tensors.items()
        },
    )


def padded(target: ModelFiles, rows: int = 112) -> ModelFiles:
    """The same model with rows for tokens that do not exist."""

    def pad(name: str) -> Any:
        values = target.tensors[name].float32()
        return tensor(name, np.concatenate((values, np.zeros((rows - len(values), values.shape[1]), np.float32))))

    wide = {name: pad(name) for name in ("embed", "head") if name in target.tensors}
    return replace(target, config=replace(target.config, vocabulary=rows), tensors={**target.tensors, **wide})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and its drafts on disk."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {
        "target": files(),
        "twin": files(),
        "shuffled": shuffled(files()),
        "foreign": renumbered(files()),
        "padded": padded(files()),
        "tuned": draft_files(),
    }
    for name, model in kinds.items():
        write_hf(folder / name, model)
    return folder


@pytest.fixture
def check(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))

    def run(draft: Path | str, *arguments: str, target: str = "target") -> tuple[int, dict[str, Any]]:
        found = compare(open_model(models / target), str(draft))
        monkeypatch.setattr("outrider.engine.profile.find", lambda loaded: by_hand(found.method, found.sha256))
        common = ["--threads", "1", "--max-tokens", "24", "--limit", "4", "--dtype", "fp32"]
        code = main(["check", str(models / target), "--draft", str(draft), "--json", *common, *arguments])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else {"error": captured.err}

    return run


def by_hand(method: str, sha256: str) -> Profile:
    return Profile(
        key={},
        name="tiny",
        made="2026-01-01T00:00:00+00:00",
        outrider="0",
        context=8,
        forwards=[Forward(1, rows, 8, 1 + 0.02 * (rows - 1)) for rows in (1, 64)],
        draws={},
        draftings=[Drafting("none", 0, 0, 0, 0, 0), Drafting(method, 0, 0, 0.02, 0, 0, draft_sha256=sha256)],
    )


def level(report: dict[str, Any], what: str) -> str:
    return next(finding["level"] for finding in report["draft"]["findings"] if finding["what"] == what)


def test_a_draft_that_is_right_is_good(check: Check, models: Path) -> None:
    """The target's twin: all guesses hold, and its size is told."""
    code, report = check(models / "twin")
    assert (code, report["verdict"]) == (0, "good")
    assert report["probe"]["acceptance_by_depth"][0] == 1
    assert report["probe"]["speedup"] > 3
    assert level(report, "tokenizer") == "ok"
    assert level(report, "size") == "warning"  # as large as the target


def test_shuffled_weights_are_harmful(check: Check, models: Path) -> None:
    """Every file fits, and no guess is right: only the probe can tell."""
    code, report = check(models / "shuffled")
    assert (code, report["verdict"]) == (2, "harmful")
    assert level(report, "tokenizer") == level(report, "vocabulary") == "ok"
    assert report["probe"]["speedup"] < 1
    assert "slower than plain decoding" in report["reason"]


def test_another_family_is_refused_or_costs(check: Check, models: Path) -> None:
    """Another tokenizer is refused with its first differing tokens, and probed by its text where that is wanted."""
    code, report = check(models / "foreign")
    assert (code, report["verdict"], report["probe"]) == (2, "refused", None)
    assert "tokens differ" in report["reason"]
    assert "--retokenise" in report["reason"]
    code, report = check(models / "foreign", "--retokenise")
    assert report["verdict"] != "refused"
    assert level(report, "tokenizer") == "warning"
    assert report["probe"]["tokens_per_step"] > 1


def test_a_padded_vocabulary_is_fine(check: Check, models: Path) -> None:
    code, report = check(models / "padded")
    assert (code, report["verdict"]) == (0, "good")
    assert level(report, "vocabulary") == "ok"
    assert any("padding" in finding["told"] for finding in report["draft"]["findings"])


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_a_head_made_for_another_target_drifts(make: Any, check: Check, models: Path, tmp_path: Path) -> None:
    """The head says whose it is. Made for this target, it has no drift; for another, it has."""
    target = open_model(models / "target")
    for sha256, expected in ((target.sha256(), "ok"), ("0" * 64, "drift")):
        folder = tmp_path / expected
        make(folder, target, target_sha256=sha256)
        code, report = check(folder)
        assert report["draft"]["method"] in ("eagle", "medusa")
        assert level(report, "target") == expected
        assert code >= (expected == "drift")


def test_drift_is_found_against_an_earlier_report(check: Check, models: Path, tmp_path: Path) -> None:
    """The target was tuned while its draft stayed: its hash and the acceptance tell. Unchanged, nothing is found."""
    report = tmp_path / "report.json"
    code, first = check(models / "twin", "--out", str(report))
    assert code == 0
    assert CheckReport.read(report).verdict == "good"
    code, same = check(models / "twin", "--against", str(report))
    assert code == 0
    assert (same["drift"]["changed"], same["drift"]["fell"], same["drift"]["comparable"]) == ([], False, True)
    code, tuned = check(models / "twin", "--against", str(report), target="tuned")
    assert code >= 1
    assert tuned["drift"]["changed"] == ["target"]
    assert tuned["drift"]["fell"]
    assert tuned["drift"]["tokens_now"] < first["probe"]["tokens_per_step"]


def test_a_verdict_is_printed_for_people(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured where there is no profile; whatever the clock says, there is a verdict and its code."""
    arguments = ["--threads", "1", "--max-tokens", "16", "--limit", "2"]
    code = main(["check", str(models / "target"), "--draft", str(models / "twin"), *arguments])
    shown = capsys.readouterr().out
    verdict = shown.splitlines()[-1].partition(":")[0]
    assert {"good": 0, "weak": 1, "harmful": 2}[verdict] == code
    assert "measured on the probe's texts" in shown


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--draft", "/no/such/draft"], "/no/such/draft"),
        (["--draft", "eagle"], "nothing of the kind 'eagle'"),
        (["--draft", "eagel"], "did you mean 'eagle'?"),
        (["--draft", "TWIN", "--max-tokens", "1"], "--max-tokens"),
        (["--draft", "TWIN", "--against", __file__], "no report"),
        (["--draft", "TWIN", "--prompts", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--draft", "TWIN", "--out", "/no/such/r.json"], "--out: /no/such"),
    ],
)
def test_bad_input_prints_no_verdict(
    arguments: list[str], culprit: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 as for a harmful draft, but nothing on standard output and one line on standard error."""
    arguments = [argument.replace("TWIN", str(models / "twin")) for argument in arguments]
    assert main(["check", str(models / "target"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert culprit in captured.err
    assert captured.err.count("\n") == 1


def test_a_head_for_other_shapes_is_refused(models: Path, tmp_path: Path) -> None:
    """Another width: the loader's own words, by name."""
    from outrider.models.errors import ModelError
    from tiny import tiny_model

    eagle3(tmp_path / "head", tiny_model(hidden=32, heads=2, kv_heads=1))
    with pytest.raises(ModelError, match="head"):
        compare(open_model(models / "target"), str(tmp_path / "head"))


def test_a_report_of_another_version_is_told(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for damaged in ("[" * 100_000, f'{{"version": {"9" * 5000}}}'):
        file.write_text(damaged)
        with pytest.raises(ReportError, match="a damaged one"):
            CheckReport.read(file)
    file.write_text('{"version": 0}')
    with pytest.raises(ReportError, match="version 1"):
        CheckReport.read(file)


@pytest.mark.model
def test_the_shipped_head_fits_its_target_and_guesses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real model and the head that comes along: made for this target, and worth its steps by the profile above."""
    target = open_model(resolve("smollm2-135m"))
    head = find_shipped("eagle", target.sha256())
    assert head is not None
    sha256 = compare(target, str(head)).sha256
    monkeypatch.setattr("outrider.engine.profile.find", lambda loaded: by_hand("eagle", sha256))
    arguments = ["--draft", "eagle", "--limit", "2", "--max-tokens", "24", "--json"]
    code = main(["check", "smollm2-135m", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["verdict"]) == (0, "good")
    assert level(report, "target") == level(report, "size") == "ok"
    assert report["probe"]["tokens_per_step"] > 1.3
