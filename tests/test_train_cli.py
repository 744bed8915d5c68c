"""The command `outrider train`, from prompts to a head, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cli import main
from outrider.models.heads import Eagle, read_head
from outrider.models.load import open_model
from outrider.train.prompts import Prompt, write_prompts
from tiny import tiny_model, write_hf

RECIPE = """
[answers]
max_tokens = 20
greedy = 0.8
[data]
held = 0.3
kind = "BF16"
[eagle]
draft_vocabulary = 90
layers = [0, 1]
depth = 2
[train]
epochs = 1.0
rows = 400
check = 5
"""


def test_from_prompts_to_a_head_with_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts in, a head out: answers, states and lessons in between; the second time asks for --resume."""
    pytest.importorskip("torch")
    write_hf(tmp_path / "model", tiny_model(seed=5))
    write_prompts(tmp_path / "p.jsonl", [Prompt(f"say {i} and {i * i}", "raw") for i in range(30)])
    (tmp_path / "recipe.toml").write_text(RECIPE)
    command = ["train", "eagle", "--target", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.jsonl")]
    command += ["--recipe", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "head"), "--runner", "reference"]
    assert main(command) == 0
    assert "tokens per step" not in capsys.readouterr().err
    target = open_model(tmp_path / "model")
    head = read_head(tmp_path / "head", target.config)
    assert isinstance(head, Eagle)
    assert head.config.wants == (0, 1)
    assert head.config.target_sha256 == target.sha256()
    card = (tmp_path / "head" / "README.md").read_text()
    assert "outrider train eagle" in card
    assert str(tmp_path) not in card
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["prompts", "--from", "factbook", "--out", "x"], "--folder"),
        (["prompts", "--from", "jsonl", "--out", "x"], "--file"),
        (["answers", "--target", "none-such", "--prompts", "x", "--out", "y", "--part", "2/2"], "--part"),
        (["eagle", "--target", "none-such", "--out", "y"], "none-such"),
        (["medusa", "--target", "none-such", "--out", "y", "--set", "medusa.heads"], "section.name=value"),
        (["draft", "--target", "none-such", "--out", "y", "--recipe", "/none/such.toml"], "such.toml"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    options: list[str], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, the culprit in it, exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert word in error
    assert "\n" not in error
