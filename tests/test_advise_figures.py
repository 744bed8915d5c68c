"""The stated model: published points are met, and advice follows load, memory and kind of work."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import outrider.advise
from outrider.advise.advice import Load, LoadError, by_figures
from outrider.advise.commands import Names, commands
from outrider.advise.methods import Draft, Reproduced, published, speedup
from outrider.advise.prompts import WORKLOADS, built_in
from outrider.advise.roofline import HardwareError, Roofline, hardware, hardware_named, stacks
from outrider.advise.shape import ShapeError, known, named
from outrider.cli import main

METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle")
H100 = Roofline(hardware_named("h100"), stacks()["vllm"])


@pytest.mark.parametrize("point", list(published()), ids=lambda point: point.title)
def test_a_published_speed_up_is_met_within_a_quarter(point: Reproduced) -> None:
    """Given the tokens per step that its source states; each source is named."""
    assert point.source
    assert abs(point.error) <= 0.25, f"{point.predicted:.2f} for {point.speedup:.2f}"


def test_the_points_are_of_all_kinds() -> None:
    """Both Spec-Bench devices, the H100 point at K = 2, load, a loss; and half of them fitted nothing."""
    titles = " | ".join(point.title for point in published())
    for wanted in ("H100, vLLM, K = 2", "Draft model", "EAGLE-2, Vicuna-7B, RTX 3090", "A100", "batch 64"):
        assert wanted in titles
    assert any(point.speedup < 1 and point.predicted < 1 for point in published())
    assert sum(not point.fitted for point in published()) >= 8


def test_load_takes_the_gain_away() -> None:
    """What a fixed chain gains falls with the batch and turns into a loss, on a device whose arithmetic is slow."""
    machine = Roofline(hardware_named("rtx-3090"), stacks()["vllm"])
    draft = Draft("ngram", 8, 0)
    gains = [speedup(machine, named("llama-3.1-8b"), draft, 2.5, batch=b) for b in (1, 8, 32, 128)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2
    assert gains[-1] < 1


def test_parameters_are_those_of_the_models() -> None:
    for name, billions in (("llama-3.1-8b", 8.03), ("llama-3.3-70b", 70.55), ("qwen3-32b", 32.76), ("vicuna-7b", 6.74)):
        assert known()[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)
    for size, count in (("8B", 8e9), ("1.5b", 1.5e9), ("135M", 135e6), ("70B", 70e9)):
        assert named(size).parameters == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_advised_and_has_prompts(workload: str) -> None:
    advice = by_figures(H100, named("llama-3.1-8b"), Load(), workload)
    assert {row.method for row in advice.rows} == {"none", *METHODS}
    assert all(row.low <= row.usual <= row.high for row in advice.rows)
    assert len(built_in(workload)) >= 2


def test_the_kind_of_work_decides() -> None:
    """Summaries repeat their source: look-up is ahead of a head. Chat does not, and a head is ahead of look-up."""

    def place(workload: str, method: str) -> int:
        rows = by_figures(H100, named("llama-3.1-8b"), Load(), workload).rows
        return [row.method for row in rows].index(method)

    assert place("summarise", "suffix") < place("summarise", "eagle")
    assert place("chat", "eagle") < place("chat", "suffix")


def test_a_load_of_hundreds_is_better_served_plainly() -> None:
    """At a batch of 512 free writing gains nothing by look-up, and says so."""
    rows = {row.method: row for row in by_figures(H100, named("llama-3.1-8b"), Load(batch=512), "creative").rows}
    assert rows["ngram"].usual < 1
    assert rows["ngram"].use == "harmful here"
    assert rows["ngram"].harmful_batch == 512


def test_memory_that_is_missing_is_told() -> None:
    """Heads that do not fit are not advised; a model that does not fit is told first."""
    tight = by_figures(H100, named("llama-3.1-8b"), Load(), "chat", memory_gb=19.3)
    assert {row.method for row in tight.rows if not row.fits} == {"draft_model", "medusa"}
    assert tight.best.fits
    none = by_figures(H100, named("llama-3.3-70b"), Load(), "chat")
    assert none.best.method == "none"
    assert "does not fit" in none.best.use
    assert any("and a cache of" in reason and "missing" in reason for reason in none.reasons)
    assert not any("expected to gain" in reason for reason in none.reasons)
    assert (none.commands, none.measure) == ({}, [])  # nothing to start, nothing to measure
    assert set(tight.commands) == {"none", "ngram", "suffix", "eagle"}
    assert by_figures(replace(H100, devices=4), named("llama-3.3-70b"), Load(), "chat").best.method == "eagle"


def test_measured_acceptance_takes_the_place_of_the_published_one() -> None:
    weak = by_figures(H100, named("llama-3.1-8b"), Load(), "chat", acceptance={"eagle": 0.1})
    assert next(row for row in weak.rows if row.method == "eagle").usual < 1.05


def test_a_rate_becomes_a_batch() -> None:
    """Little's law: 4 requests per second of about 1.9 s each; more than the device can do is refused."""
    advice = by_figures(H100, named("llama-3.1-8b"), Load(rate=4), "chat")
    assert 5 <= advice.batch <= 12
    with pytest.raises(LoadError, match="requests per second"):
        by_figures(H100, named("llama-3.1-8b"), Load(rate=5000), "chat")


def test_commands_are_shell_and_json() -> None:
    """Every command splits as a shell would, vLLM's configuration is JSON, and what is missing is said."""
    names = Names("target.gguf", "org/model", "org/draft", "org/eagle3", "org/medusa")
    for method in ("none", *METHODS):
        made = commands(method, 4, names)
        assert set(made) == {"outrider", "vllm", "sglang", "tensorrt-llm", "llama.cpp"}
        for command in made.values():
            assert command.startswith("#") or shlex.split(command)
        if method != "none":
            words = shlex.split(made["vllm"])
            config = json.loads(words[words.index("--speculative-config") + 1])
            assert config["num_speculative_tokens"] == 4
    assert "--speculative-num-draft-tokens 5" in commands("eagle", 4, names)["sglang"]  # the target's own counts there
    assert commands("medusa", 4, names)["sglang"].startswith("#")
    assert "--spec-ngram-simple-size-m 4" in commands("ngram", 4, names)["llama.cpp"]  # n-max is of draft models
    for method in METHODS:
        made = commands(method, 4, names)["tensorrt-llm"]
        assert ("disable_overlap_scheduler: true" in made) == (method in ("ngram", "suffix", "draft_model"))


def test_vllm_commands_are_read_by_our_own_server() -> None:
    """`--speculative-config` of look-up, suffix, draft models and heads is what `outrider serve` takes too."""
    from outrider.cli.options import DraftOptions
    from outrider.cli.speculative_config import merged

    names = Names(None, "m", "d", "e", "h")
    for method in METHODS:
        words = shlex.split(commands(method, 4, names)["vllm"])
        assert merged(DraftOptions(), words[words.index("--speculative-config") + 1]).drafter == method


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[" * 100_000, "it is not JSON"),
        ('{"method": "eagle", "model": null}', "model None is not a name or path"),
        ('{"method": "medusa", "model": 5}', "model 5 is not a name or path"),
        ('{"method": "ngram", "prompt_lookup_min": true}', "prompt_lookup_min True is not a whole number"),
        ('{"method": "ngram", "prompt_lookup_max": "5"}', "prompt_lookup_max '5' is not a whole number"),
    ],
)
def test_a_configuration_of_another_kind_is_refused(text: str, named: str) -> None:
    from outrider.cli.errors import CommandError
    from outrider.cli.options import DraftOptions
    from outrider.cli.speculative_config import merged

    with pytest.raises(CommandError, match=f"^--speculative-config: {named}"):
        merged(DraftOptions(), text)


def test_all_data_has_its_source() -> None:
    folder = Path(outrider.advise.__file__).parent
    for file in ("hardware.json", "acceptance.json", "published.json"):
        assert len(re.findall(r'"source":', (folder / file).read_text())) >= 6
    assert all(device.source and device.bandwidth > 0 for device in hardware().values())


def test_advise_prints_the_matrix_reasons_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "llama-3.1-8b", "--hardware", "h100", "--workload", "code"]) == 0
    shown = capsys.readouterr().out
    for word in (*METHODS, "none", "speed-up", "pays above", "Measure:", "llama-server", "nothing was measured"):
        assert word in shown
    assert main(["advise", "8B", "--hardware", "l40s", "--rate", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["commands"]) == {"none", *METHODS}
    assert found["rows"][0]["draft"]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["llama-3.1-8b", "--hardware", "h1000"], "h1000"),
        (["llama-3.1-8b"], "--hardware"),
        ([], "MODEL"),
        (["llama-9.1-8b", "--hardware", "h100"], "llama-9.1-8b"),
        (["no/such/folder", "--hardware", "h100"], "no/such/folder"),
        (["8B", "--hardware", "h100", "--software", "abacus"], "abacus"),
        (["8B", "--hardware", "h100", "--weights", "int3"], "int3"),
        (["8B", "--hardware", "h100", "--batch", "0"], "--batch: 0"),
        (["8B", "--hardware", "h100", "--output-tokens", "-3"], "--output-tokens: -3"),
        (["8B", "--hardware", "h10"], "did you mean 'h100'?"),
        (["lama-3.1-8b", "--hardware", "h100"], "did you mean 'llama-3.1-8b'?"),
        (["8B", "--hardware", "h100", "--software", "vlm"], "did you mean 'vllm'?"),
        (["8B", "--hardware", "h100", "--rate", "1e6"], "requests per second"),
        (["8B", "--hardware", "h100", "--devices", "0"], "--devices"),
        (["8B", "--hardware", "h100", "--workload", "poetry"], "poetry"),
    ],
)
def test_refused_in_one_line(arguments: list[str], culprit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert culprit in error
    assert error.count("\n") == 1


def test_errors_name_what_there_is() -> None:
    with pytest.raises(HardwareError, match="rtx-4090"):
        hardware_named("rtx")
    with pytest.raises(ShapeError, match="such as 8B"):
        named("gpt-9")
