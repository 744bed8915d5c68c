"""The command line: what it refuses, how, and what it does not load."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outrider
from outrider.cli import main
from outrider.cli.origins import OriginPainter
from outrider.engine.results import Delta, Origin, Result, Step, TokenLogprobs, Usage

HEAVY = ("torch", "transformers", "rich", "numpy", "tokenizers", "huggingface_hub", "jinja2")


def run(
    *arguments: str, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )


def loaded_by(*arguments: str) -> set[str]:
    """Top-level modules that a command leaves in sys.modules."""
    code = (
        "import sys; from outrider.cli import main\n"
        f"code = main({list(arguments)!r})\n"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


# -- what is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Help and version come without numpy, rich, torch or any model code."""
    assert not loaded_by(*arguments) & set(HEAVY)


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import outrider` is light, and its public names still resolve."""
    code = "import sys, outrider; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & set(HEAVY)
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError, match="Motor"):
        outrider.Motor  # noqa: B018


def test_no_command_is_a_question_for_help() -> None:
    assert run().stdout == run("--help").stdout


# -- what is refused ------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000  # JSON that no stack holds
REFUSED = {
    "unknown command": (["genrate", "x"], "did you mean 'generate'"),
    "unknown option": (["generate", "x", "--tempo", "1"], "--tempo"),
    "too many arguments": (["generate", "x", "y"], "y"),
    "no number": (["generate", "x", "--temperature", "warm"], "--temperature"),
    "no whole number": (["generate", "x", "--max-tokens", "1.5"], "--max-tokens"),
    "negative temperature": (["generate", "x", "--temperature", "-1"], "temperature"),
    "temperature is no number": (["generate", "x", "--temperature", "nan"], "temperature"),
    "top-k": (["generate", "x", "--top-k", "-1"], "top_k"),
    "top-p": (["generate", "x", "--top-p", "0"], "top_p"),
    "min-p": (["generate", "x", "--min-p", "1.5"], "min_p"),
    "repetition penalty": (["generate", "x", "--repetition-penalty", "0"], "repetition_penalty"),
    "frequency penalty": (["generate", "x", "--frequency-penalty", "3"], "frequency_penalty"),
    "presence penalty": (["generate", "x", "--presence-penalty", "-3"], "presence_penalty"),
    "no tokens": (["generate", "x", "--max-tokens", "0"], "max_tokens"),
    "more least than most": (["generate", "x", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens"),
    "seed": (["generate", "x", "--seed", str(2**64)], "seed"),
    "logprobs": (["generate", "x", "--json", "--logprobs", "-1"], "logprobs"),
    "logprobs unseen": (["generate", "x", "--logprobs", "3"], "--json"),
    "empty stop": (["generate", "x", "--stop", ""], "stop"),
    "stop token": (["generate", "x", "--stop-token-id", "-4"], "stop_token_ids"),
    "bias without value": (["generate", "x", "--logit-bias", "17"], "--logit-bias: '17'"),
    "bias of a word": (["generate", "x", "--logit-bias", "cat=1"], "cat=1"),
    "bias too large": (["generate", "x", "--logit-bias", "17=1000"], "logit_bias"),
    "bias twice": (["generate", "x", "--logit-bias", "17=1", "--logit-bias", "17=2"], "'17' is given twice"),
    "system without chat": (["generate", "x", "--system", "y"], "add --chat"),
    "json and colours": (["generate", "x", "--json", "--show-drafts"], "--show-drafts"),
    "empty prompt": (["generate", ""], "the prompt is empty"),
    "empty standard input": (["generate", "-"], "standard input: the prompt is empty"),
    "no UTF-8 argument": (["generate", "caf\udce9"], "PROMPT: not valid UTF-8"),
    "two prompts": (["generate", "x", "--file", "README.md"], "--file"),
    "no such file": (["generate", "--file", "/no/such/file"], "/no/such/file"),
    "a folder as file": (["generate", "--file", "/"], "directory"),
    "verify": (["generate", "x", "--verify", "maybe"], "--verify"),
    "runner": (["generate", "x", "--runner", "steam"], "--runner"),
    "unknown drafter": (["generate", "x", "--drafter", "oracle"], "'oracle'"),
    "unknown drafter option": (["generate", "x", "--drafter-option", "speed=9"], "'speed'"),
    "drafter option without value": (["generate", "x", "--drafter-option", "speed"], "--drafter-option: 'speed'"),
    "drafter option of the wrong kind": (["generate", "x", "--drafter-option", "min_ngram=two"], "min_ngram"),
    "prediction without text": (["generate", "x", "--drafter", "prediction"], "add --prediction"),
    "prediction for another drafter": (["generate", "x", "-d", "suffix", "--prediction", "README.md"], "'suffix'"),
    "prediction without file": (["generate", "x", "--prediction", "/no/such"], "--prediction: /no/such"),
    "draft tokens": (["generate", "x", "--max-draft-tokens", "-1"], "max_draft_tokens"),
    "unknown model": (["generate", "x", "--model", "no-such-model"], "no-such-model"),
    "a text as model": (["generate", "x", "--model", __file__], "test_cli.py"),
    "unknown model to pull": (["pull", "no-such-model"], "no-such-model"),
    "pull what": (["pull"], "NAME"),
    "bench without prompts": (["bench"], "--prompts: missing"),
    "bench without file": (["bench", "--prompts", "/no/such.jsonl"], "/no/such.jsonl"),
    "bench batch": (["bench", "--prompts", "x", "--batch-size", "0"], "--batch-size"),
    "bench repeat": (["bench", "--prompts", "x", "--repeat", "0"], "--repeat"),
    "bench subcommand": (["bench", "kernel"], "kernel"),
    "bench suite": (["bench", "--suite", "poems"], "--suite: 'poems' is none of"),
    "bench suite with prompts": (["bench", "--suite", "copy", "--prompts", "x"], "leave out one of the two"),
    "bench temperature": (["bench", "--suite", "copy", "-t", "0,warm"], "--temperature: '0,warm'"),
    "bench cold": (["bench", "--suite", "copy", "-t", "-1"], "temperature"),
    "bench rule": (["bench", "--suite", "copy", "--verify", "match,luck"], "--verify: 'match,luck'"),
    "bench page to stdout": (["bench", "--suite", "copy", "--html", "-"], "--html"),
    "bench page to nowhere": (["bench", "--suite", "copy", "--html", "/no/such/x.html"], "--html: /no/such/x.html"),
    "bench rate without server": (["bench", "--suite", "copy", "--rate", "2"], "--rate: is for servers"),
    "bench drafter of a server": (
        ["bench", "--suite", "copy", "--url", "http://x", "-d", "ngram"],
        "--drafter: a server",
    ),
    "bench address": (["bench", "--suite", "copy", "--url", "x:80"], "--url: 'x:80' is no address"),
    "bench servers of one name": (
        ["bench", "--suite", "copy", "--url", "a=http://x", "--url", "a=http://y"],
        "two servers are called 'a'",
    ),
    "bench baseline": (["bench", "--suite", "copy", "--url", "a=http://x", "--baseline", "b"], "--baseline: 'b'"),
    "bench concurrency": (["bench", "--suite", "copy", "--url", "http://x", "--concurrency", "1,0"], "--concurrency"),
    "bench rate": (["bench", "--suite", "copy", "--url", "http://x", "--rate", "fast"], "--rate: 'fast'"),
    "bench objective": (["bench", "--suite", "copy", "--url", "http://x", "--slo", "ttft=2"], "--slo: 'ttft=2'"),
    "bench body": (["bench", "--suite", "copy", "--url", "http://x", "--extra-body", "{"], "--extra-body"),
    "bench body that is deep": (
        ["bench", "--suite", "copy", "--url", "http://x", "--extra-body", DEEP],
        "--extra-body",
    ),
    "advise memory": (["advise", "8B", "--hardware", "h100", "--memory", "nan"], "--memory: nan is no number of GB"),
    "advise more memory": (["advise", "8B", "--hardware", "h100", "--memory", "inf"], "--memory: inf"),
    "advise less memory": (["advise", "8B", "--hardware", "h100", "--memory=-1"], "--memory: -1"),
    "advise size": (["advise", "99999999999999999999B", "--hardware", "h100"], "its size such as 8B"),
    "bench body that streams": (
        ["bench", "--suite", "copy", "--url", "http://x", "--extra-body", '{"stream": false}'],
        "'stream' is set by the benchmark",
    ),
    "bench keys": (
        ["bench", "--suite", "copy", "--url", "http://x", "--api-key", "a", "--api-key", "b"],
        "--api-key: given twice",
    ),
    "bench of several temperatures": (
        ["bench", "--suite", "copy", "--url", "http://x", "-t", "0,1"],
        "--temperature: '0,1'",
    ),
    "bench compare nothing": (["bench", "compare", "/no/a.json", "/no/b.json"], "/no/a.json"),
    "chat temperature": (["chat", "--temperature", "-1"], "temperature"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_invalid_input_is_refused_in_one_line(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, nothing on standard output, one line on standard error that names the culprit."""
    arguments, culprit = REFUSED[kind]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert culprit in captured.err
    assert captured.err.startswith("outrider")
    assert len(captured.err) < 400


def test_a_refusal_of_the_real_command_is_the_same() -> None:
    """As a process: one line, exit code 2, no traceback; also for files with bad content."""
    done = run("generate", "x", "--top-p", "7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["outrider: top_p: 7.0 is outside (0, 1]"]


@pytest.mark.parametrize(
    ("content", "culprit"),
    [(b"caf\xe9", "not valid UTF-8 at byte 3"), (b"", "the prompt is empty")],
)
def test_a_bad_prompt_file_is_named(
    content: bytes, culprit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    assert main(["generate", "--file", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert culprit in error


def test_a_report_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    assert main(["bench", "--prompts", str(prompts), "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_fault_of_our_own_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError that is none of ours is a bug and keeps its traceback."""
    monkeypatch.setattr("outrider.cli.generate.read_prompt", lambda *_: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["generate", "x"])


# -- what is printed ------------------------------------------------------------------------------------------------

WORDS = {1: b"The", 2: b" sea", 3: b" is", 4: "\u00e9".encode()[:1], 5: "\u00e9".encode()[1:], 6: b"."}


def answer(tokens: list[int], **changes: Any) -> Result:
    origins: list[Origin] = ["plain", "drafted", "drafted", "corrected"]
    text = b"".join(WORDS[token] for token in tokens).decode()
    return replace(
        Result(
            id=0,
            prompt_tokens=[1],
            tokens=tokens,
            origins=origins[: len(tokens)],
            text=text,
            finish_reason="length",
            stop_reason=None,
            logprobs=[TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in tokens],
            usage=Usage(1, len(tokens), 2, 1),
            steps=[Step(0, 0, 0), Step(3, 3, 2)],
            seed=7,
            ttft=0.1,
            seconds=0.2,
        ),
        **changes,
    )


class FakeEngine:
    """Answers every prompt with `answer([1, 2, 3, 6])`, but for drafters that are told to lie."""

    def __init__(self, lies: dict[str, Result] | None = None) -> None:
        self.lies = lies or {}
        self.files = SimpleNamespace(name="fake", quantisation="Q8_0", sha256=lambda: "0" * 64)
        self.config = SimpleNamespace(context=100)
        self.runner = SimpleNamespace(pages=SimpleNamespace(count=2, page_size=50))
        self.tokenizer = SimpleNamespace(token_bytes=WORDS.__getitem__, is_special=lambda token: token == 0)
        self.prompts: list[Any] = []
        self.configured: dict[str, Any] = {}

    def configure(self, name: str, options: Any) -> None:
        self.configured[name] = options

    def memory(self) -> dict[str, int]:
        return {"target weights": 1000, "ngram: tables": 20}

    def encode(self, prompt: Any) -> list[int]:
        return [1] * (500 if prompt == "long" else 3)

    def generate(self, prompts: list[Any], params: Any, *, speculation: Any = None) -> list[Result]:
        self.prompts += prompts
        each = speculation if isinstance(speculation, list) else [speculation] * len(prompts)
        names = [one.drafter if one else None for one in each]
        return [self.lies.get(name, answer([1, 2, 3, 6])) for name in names]

    def stream(self, prompt: Any, params: Any, *, speculation: Any = None) -> Any:
        self.prompts.append(prompt)
        result = answer([1, 2, 3, 6])

        class Stream:
            def __iter__(self) -> Any:
                yield Delta(0, (1,), ("plain",), "The")
                yield Delta(0, (2, 3, 6), ("drafted", "drafted", "corrected"), " sea is.", (), "length")

        stream = Stream()
        stream.result = result  # type: ignore[attr-defined]
        return stream


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    for command in ("generate", "chat", "bench"):
        monkeypatch.setattr(f"outrider.cli.{command}.open_engine", lambda *_, **__: engine)
    return engine


def test_generate_prints_the_text_and_nothing_else(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Say"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("The sea is.\n", "")
    assert fake.prompts == ["Say"]


def test_chat_and_system_become_messages(fake: FakeEngine) -> None:
    assert main(["generate", "Say", "--chat", "--system", "Be brief."]) == 0
    assert fake.prompts == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say"}]]


def test_generate_reads_standard_input(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["generate", "-"], ["generate"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("caf\u00e9\n".encode())))
        assert main(arguments) == 0
    assert fake.prompts == ["caf\u00e9\n"] * 2


def test_generate_json_tells_everything(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Say", "--json", "--logprobs", "1"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["text"] == "The sea is."
    assert out["tokens"] == [1, 2, 3, 6]
    assert out["origins"] == ["plain", "drafted", "drafted", "corrected"]
    assert out["accepted"] == [0, 2]
    assert out["finish_reason"] == "length"
    assert out["seed"] == 7
    assert out["mean_acceptance_length"] == 2.0
    assert out["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 1,
        "cached_tokens": 0,
    }
    assert out["logprobs"][0] == {"token": 1, "logprob": -0.5, "top": [[1, -0.5]]}
    assert out["timings"]["tokens_per_second"] == pytest.approx(20.0)


def test_show_drafts_marks_who_wrote_what(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets where there is no terminal, colours where they are forced; a legend below."""
    assert main(["generate", "Say", "--show-drafts"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The[ sea][ is]{.}\n")
    assert all(word in out for word in ("drafted", "corrected", "bonus", "plain"))


def painter(*, colour: bool) -> OriginPainter:
    return OriginPainter(WORDS.__getitem__, lambda token: token == 0, colour=colour)


def test_a_text_that_lags_behind_its_tokens_keeps_its_origins() -> None:
    """Half a character and the start of a stop string come with a later delta and keep the mark of their token."""
    marks = painter(colour=False)
    assert marks.paint(Delta(0, (1, 4), ("plain", "drafted"), "Th")) == "Th"
    assert marks.paint(Delta(0, (5, 0), ("bonus", "corrected"), "e\u00e9")) == "e<\u00e9>"
    assert marks.paint(Delta(0, (6,), ("drafted",), "")) == ""
    assert marks.paint(Delta(0, (), (), ".")) == "[.]"


def test_colours_are_closed() -> None:
    text = painter(colour=True).paint(Delta(0, (1, 2), ("drafted", "plain"), "The sea"))
    assert text == "\x1b[32mThe\x1b[0m sea"


def test_chat_goes_on_turn_by_turn(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers join the conversation, /reset drops it, /stats sums up, unknown commands are named."""
    lines = "one\ntwo\n/stats\n/what\n/reset\nthree\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", "--system", "s"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The sea is.\n" * 3
    assert "acceptance length 2.00" in captured.err
    assert "2 answers, 8 tokens in 4 forwards" in captured.err
    assert "/what: no such command" in captured.err
    assert len(fake.prompts) == 3
    assert fake.prompts[2] is not fake.prompts[1]
    assert [m["content"] for m in fake.prompts[2]] == ["s", "three", "The sea is."]


# -- bench ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "category": "x"}\n{"turns": ["b"], "category": "y"}\n')
    return path


def test_bench_writes_the_contract(
    fake: FakeEngine, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["bench", "--prompts", str(prompts), "--drafter", "ngram,junk", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report.keys() >= {"runs", "machine", "versions", "git", "argv"}
    assert [run["drafter"] for run in report["runs"]] == ["none", "ngram", "junk"]
    assert all((run["prompts"], run["identical"]) == (2, 2) for run in report["runs"])
    assert report["runs"][1]["by_category"].keys() == {"x", "y"}
    assert report["versions"]["outrider"] == outrider.__version__
    table = capsys.readouterr().out
    assert "2/2" in table
    assert "ngram" in table


def test_bench_json_to_standard_output_is_json_alone(
    fake: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--prompts", str(prompts), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["runs"]) == 2
    assert "identical" in captured.err


def test_bench_with_an_engine_that_lies_ends_with_1(
    fake: FakeEngine, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The difference is printed with its place and both sides, the report is written, and the exit code is 1."""
    fake.lies["auto"] = answer([1, 2, 4, 5], text="The sea\u00e9")
    out = tmp_path / "out.json"
    assert main(["bench", "--prompts", str(prompts), "--json", str(out)]) == 1
    error = capsys.readouterr().err
    assert "DIFFERENT: auto, prompt 0 (line 1), position 2, tokens: 4 instead of 3" in error
    assert json.loads(out.read_text())["runs"][1]["identical"] == 0


def test_rejection_sampling_may_write_another_text(
    fake: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At T > 0 it keeps the distribution only, which is said and is no failure; at T = 0 the text must be the same."""
    fake.lies["auto"] = answer([1, 2, 4, 5], text="The sea\u00e9")
    common = ["bench", "--prompts", str(prompts), "--verify", "rejection"]
    assert main([*common, "--temperature", "0.8"]) == 0
    assert "keeps the distribution" in capsys.readouterr().err
    assert main(common) == 1


def test_bench_measures_rules_and_temperatures_in_one_run(
    fake: FakeEngine, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain decoding at each temperature, rejection above 0 only, and a table that sets both rules side by side."""
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["bench", "--prompts", str(prompts), "-d", "ngram", "-t", "0,0.8", "--verify", "match,rejection"]
    assert main([*arguments, "--json", str(out), "--html", str(html)]) == 0
    report = json.loads(out.read_text())
    assert [(run["drafter"], run["temperature"], run["verify"]) for run in report["runs"]] == [
        ("none", 0.0, "match"),
        ("ngram", 0.0, "match"),
        ("none", 0.8, "match"),
        ("ngram", 0.8, "match"),
        ("ngram", 0.8, "rejection"),
    ]
    assert report["runs"][1]["memory_bytes"] == 20
    assert "match against rejection" in capsys.readouterr().out
    assert "How it was measured" in html.read_text()


def test_bench_measures_a_real_server_by_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain and drafted requests to our own server: the same texts, acceptance from the answers, and a report."""
    from serving import serving

    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "ab ab ab"}\n{"prompt": "cd cd cd"}\n')
    with serving() as running:
        code = main(
            [
                *("bench", "--prompts", str(prompts), "--max-tokens", "24", "--concurrency", "1,2", "--require-equal"),
                *("--url", f"plain={running.url}", "--url", f"drafted={running.url}/v1", "--json", str(out)),
                *("--extra-body", 'plain={"speculation": {"enabled": false}}', "--slo", "e2e=60s"),
            ]
        )
    assert code == 0, capsys.readouterr().err
    runs = json.loads(out.read_text())["runs"]
    assert [(run["server"], run["load"]["level"], run["requests"], run["failed"]) for run in runs] == [
        ("plain", 1, 2, 0),
        ("drafted", 1, 2, 0),
        ("plain", 2, 8, 0),
        ("drafted", 2, 8, 0),
    ]
    assert all((run["compared"], run["identical"], run["unstable"]) == (2, 2, []) for run in runs)
    assert runs[0]["acceptance"] is None
    assert runs[1]["acceptance"]["source"] == "the answers"
    assert runs[1]["model"] == "tiny"
    assert "drafted's texts are those of plain, all 2" in capsys.readouterr().out


def test_bench_names_the_prompt_that_is_too_long(
    fake: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text('{"prompt": "a"}\n\n{"prompt": "long"}\n')
    assert main(["bench", "--prompts", str(prompts)]) == 2
    assert "line 3 has 500 tokens" in capsys.readouterr().err


def test_bench_needs_a_prediction_for_the_drafter_of_that_name(
    fake: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by its line where it is missing, and run where every line has one."""
    prompts.write_text('{"prompt": "a", "prediction": "The"}\n{"prompt": "b"}\n')
    arguments = ["bench", "--prompts", str(prompts), "--drafter", "prediction"]
    assert main(arguments) == 2
    assert "line 2 has no 'prediction'" in capsys.readouterr().err
    assert main([*arguments, "--limit", "1"]) == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("seed=1", "'seed' could be any of 2 drafters'; write METHOD.seed"),
        ("suffix.row_cost=1", "'suffix.row_cost' is for 'suffix', which is not among --drafter"),
        ("junk.speed=1", "junk: unknown option 'speed'"),
        ("junk.seed=x", "junk: seed: 'x' is not a whole number"),
    ],
)
def test_bench_refuses_options_that_are_nobodys(
    fake: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    """By name, before anything runs."""
    arguments = ["bench", "--prompts", str(prompts), "--drafter", "ngram,junk", "--drafter-option", option]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_bench_gives_each_drafter_its_options(fake: FakeEngine, prompts: Path) -> None:
    """METHOD.KEY=VALUE goes to that method; a plain key to the only one."""
    common = ["bench", "--prompts", str(prompts), "--drafter"]
    options = ["--drafter-option", "junk.seed=3", "--drafter-option", "ngram.min_ngram=2"]
    assert main([*common, "ngram,junk", *options]) == 0
    assert fake.configured == {"junk": {"seed": "3"}, "ngram": {"min_ngram": "2"}}
    assert main([*common, "junk", "--drafter-option", "seed=4"]) == 0
    assert fake.configured["junk"] == {"seed": "4"}


# -- how it ends ----------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    """A closed pipe behind the command: no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "drafters", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) != 0
    process.stderr.close()


def test_ctrl_c_ends_it_quietly_with_130() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", "generate", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("x" * 200_000)  # more than a pipe holds: when this is through, it is reading
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (130, "", "")
