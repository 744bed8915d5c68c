"""The command line with a model: tiny and random in every run, the real one where it is marked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from outrider.cli import main

RUNNERS = ("native", "reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model whose context is 256 tokens."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.tiny_model(folder, vocabulary=300, context=256)
    return folder


def generated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", "--json", "--logprobs", "0", *arguments]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_text_does_not_depend_on_the_drafter(
    runner: str, temperature: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The promise through the front door: same tokens, text and log-probabilities, although drafts were refused."""
    common = [
        "ab ab ab ab",
        "-m",
        str(model),
        "--runner",
        runner,
        "-t",
        temperature,
        "--seed",
        "3",
        "-n",
        "48",
        "--ignore-eos",
    ]
    plain = generated(capsys, *common, "--drafter", "none")
    refused = 0
    for drafter, options in (("ngram", ["min_ngram=1"]), ("junk", ["seed=1"])):
        arguments = [word for option in options for word in ("--drafter-option", option)]
        drafted = generated(capsys, *common, "--drafter", drafter, *arguments)
        for key in ("tokens", "text", "logprobs", "finish_reason", "prompt_tokens"):
            assert drafted[key] == plain[key]
        refused += drafted["usage"]["rejected_prediction_tokens"]
    assert refused > 0
    assert len(plain["tokens"]) == 48
    assert plain["accepted"] == [0] * 48


def test_a_prediction_is_followed_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The right text is drafted and accepted; a wrong one changes nothing either."""
    tiny.tiny_model(tmp_path / "ascii")  # writes whole characters only, so that its text says its tokens
    common = ["ab ab", "-m", str(tmp_path / "ascii"), "-n", "40", "--ignore-eos"]
    plain = generated(capsys, *common, "--drafter", "none")
    expected = tmp_path / "expected.txt"
    for text in (plain["text"], "quite another text"):
        expected.write_text(text, encoding="utf-8")
        drafted = generated(capsys, *common, "--prediction", str(expected))
        assert drafted["drafter"] == "prediction"
        for key in ("tokens", "logprobs", "text"):
            assert drafted[key] == plain[key]
        assert (drafted["mean_acceptance_length"] > 2) == (text == plain["text"])


def test_stream_and_json_say_the_same(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed text is the `text` of --json; marks of --show-drafts add nothing but marks."""
    common = ["ab ab", "-m", str(model), "--seed", "5", "-t", "1", "-n", "40", "--logit-bias", "0=-100"]
    text = generated(capsys, *common)["text"]
    assert main(["generate", *common]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == text.removesuffix("\n")


def test_chat_puts_the_prompt_into_the_template(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = generated(capsys, "system: s\nuser: u\nassistant:", "-m", str(model), "-n", "4")
    chat = generated(capsys, "u", "--chat", "--system", "s", "-m", str(model), "-n", "4")
    assert chat["prompt_tokens"] == raw["prompt_tokens"]
    assert chat["tokens"] == raw["tokens"]


REFUSED = {
    "stop token outside": (["generate", "x", "--stop-token-id", "300"], "stop_token_ids"),
    "bias outside": (["generate", "x", "--logit-bias", "9999=1"], "logit_bias"),
    "prompt as long as the context": (["generate", "x" * 256], "context"),
    "prompt larger than the cache": (["generate", "x" * 200, "--cache-tokens", "64"], "cache"),
    "dtype": (["generate", "x", "--dtype", "int3"], "int3"),
    "head dtype": (["generate", "x", "--head-dtype", "nine"], "head_dtype"),
    "kv dtype": (["generate", "x", "--kv-dtype", "int4"], "kv_dtype"),
    "no threads": (["generate", "x", "--threads", "0"], "threads"),
    "threads for the reference": (["generate", "x", "--runner", "reference", "--threads", "2"], "threads"),
    "page size": (["generate", "x", "--page-size", "0"], "page_size"),
    "prefill chunk": (["generate", "x", "--prefill-chunk", "0"], "prefill_chunk"),
    "cache": (["generate", "x", "--cache-tokens", "0"], "cache_tokens"),
    "no draft model": (["generate", "x", "--drafter", "draft_model"], "draft_model"),
    "unknown draft model": (["generate", "x", "--drafter", "draft_model", "--draft-model", "/no/such"], "/no/such"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_the_model_is_refused(kind: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that names the culprit, also for what only the model can tell."""
    arguments, culprit = REFUSED[kind]
    assert main([*arguments, "--model", str(model)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert culprit in captured.err


def test_a_damaged_model_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_gguf(tmp_path / "whole.gguf", tiny.tiny_model(vocabulary=300))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-1000])
    (tmp_path / "folder").mkdir()
    for damaged in (cut, tmp_path / "folder"):
        assert main(["generate", "x", "--model", str(damaged)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert damaged.name in error


def test_a_draft_of_another_tokenizer_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tiny.tiny_model(other, vocabulary=97)
    arguments = ["generate", "x", "--model", str(model), "--drafter", "draft_model", "--draft-model", str(other)]
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_chat_refuses_a_turn_that_does_not_fit_and_goes_on(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\nhello\n"))
    assert main(["chat", "--model", str(model), "-n", "4", "--ignore-eos"]) == 0
    error = capsys.readouterr().err
    assert "/reset starts anew" in error
    assert "4 tokens" in error


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    """The answer is cut and noted as stopped, the conversation goes on, and the program ends with 0."""
    tiny.tiny_model(tmp_path / "long", vocabulary=300, context=1 << 16)
    arguments = ["--model", str(tmp_path / "long"), "-n", "60000", "--ignore-eos", "--cache-tokens", "65536"]
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", "chat", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)  # it is answering
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(b"/stats\n/exit\n", timeout=60)
    assert process.returncode == 0
    assert b"stopped, " in error
    assert b"1 answer, " in error


@pytest.mark.parametrize("batch_size", ["1", "4"])
def test_bench_finds_no_difference(
    batch_size: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real engine under the real harness: every prompt identical, and the exit code 0."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    lines = [{"prompt": f"{word} {word} {word}", "category": word} for word in ("ab", "cd", "ef")]
    lines.append({"turns": ["gh gh gh"]})
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["bench", "-m", str(model), "--prompts", str(prompts), "--drafter", "ngram,junk", "-n", "24"]
    measured = [
        "-t",
        "0.7",
        "--batch-size",
        batch_size,
        "--no-adapt",
        "--json",
        str(out),
    ]  # junk would rest by the clock
    assert main([*arguments, *measured]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [(run["drafter"], run["prompts"], run["identical"]) for run in runs] == [
        ("none", 4, 4),
        ("ngram", 4, 4),
        ("junk", 4, 4),
    ]
    assert runs[2]["acceptance_by_position"]
    assert all(run["tokens_per_second"] > 0 for run in runs)
    assert "4/4" in capsys.readouterr().out


def test_generate_loads_no_torch(model: Path) -> None:
    """The whole of `outrider generate` runs without torch, transformers, rich or the hub's client."""
    code = (
        "import sys; from outrider.cli import main\n"
        f"code = main(['generate', 'ab ab', '-n', '4', '--model', {str(model)!r}])\n"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "rich", "huggingface_hub", "scipy"}


@pytest.mark.model
def test_the_demo_of_the_real_model_is_identical() -> None:
    """`outrider demo` as a process: both answers identical, drafts accepted, exit code 0."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "demo", "--max-tokens", "96"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("identical: yes") == 2
    assert "[" in done.stdout


def test_drafters_tell_their_memory_beside_a_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes by purpose, or why a method cannot run there; nothing of it is loaded."""
    assert main(["drafters", "--model", str(model), "--draft-model", str(model), "--json"]) == 0
    memory = {entry["name"]: entry["memory"] for entry in json.loads(capsys.readouterr().out)}
    assert memory["suffix"] == {}
    assert memory["draft_model"]["draft weights"] > 0
    assert memory["eagle"].startswith("no head comes with the package")
    assert main(["drafters", "--model", str(model)]) == 0
    assert "not here: no draft named" in " ".join(capsys.readouterr().out.split())
    assert main(["drafters", "--draft-model", "x"]) == 2
    assert "--draft-model: memory is told beside a model; add --model" in capsys.readouterr().err


def test_verbose_tells_a_drafters_memory_before_it_is_loaded(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error; the text alone is on standard output."""
    common = ["generate", "ab", "-m", str(model), "-n", "2", "--ignore-eos"]
    assert main([*common, "--drafter", "draft_model", "--draft-model", str(model), "-v"]) == 0
    told = capsys.readouterr().err
    assert told.startswith("drafter draft_model: ")
    assert "MB (draft weights" in told
    assert main([*common, "--drafter", "suffix", "-v"]) == 0
    assert capsys.readouterr().err == "drafter suffix: 0 MB\n"
