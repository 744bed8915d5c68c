"""How a command ends when streams, disk, memory or a signal fail it: one line at most, and no half file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from outrider.cli import main
from outrider.cli.errors import CommandError
from outrider.cli.report_file import ReportFile
from serving import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that writes for long, and prompts for it."""
    place = tmp_path_factory.mktemp("endings")
    tiny.tiny_model(place / "long", vocabulary=300, context=1 << 16)
    (place / "p.jsonl").write_text('{"prompt": "ab ab ab"}\n' * 64)
    return place


def start(*arguments: str, **settings: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "outrider", *arguments], **{**pipes, **settings})


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        (["generate", "-"], 0, 2),
        (["generate"], 0, 2),
        (["chat"], 0, 0),  # as if Ctrl-D had been typed
        (["generate", "ab", "-n", "3"], 1, 0),
        (["generate", "ab", "-n", "3", "--json"], 1, 0),
        (["generate", "ab", "-n", "0"], 2, 2),
    ],
)
def test_a_standard_stream_that_is_closed(arguments: list[str], closed: int, code: int, folder: Path) -> None:
    """No stream is needed that is not used: no traceback, and no complaint on another stream."""
    model = ["--model", str(folder / "long")]
    with start(*arguments, *model, preexec_fn=lambda: os.close(closed)) as process:
        out, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == b""
    assert error.count(b"\n") == (code == 2 and closed != 2)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["drafters", "--json"], ["generate", "ab", "-n", "3"]])
def test_a_full_disk_behind_standard_output(arguments: list[str], unbuffered: str, folder: Path) -> None:
    """It is told in one line, whether the failure comes with the first character or when the buffer is written."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    model = ["--model", str(folder / "long")] if arguments[0] == "generate" else []
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full, start(*arguments, *model, stdout=full, env=environment) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.splitlines() == [b"outrider: standard output: No space left on device"]


def opened(pid: int, name: str) -> bool:
    """Whether the process holds a file of this name open or mapped."""
    return name in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("command", ["generate", "bench", "chat"])
def test_ctrl_c_while_it_works(command: str, folder: Path) -> None:
    """Silence, 130 (or death by the signal, which a shell calls 130), and no file."""
    report = folder / "report.json"
    arguments = {
        "generate": ["ab", "-n", "60000", "--ignore-eos", "--cache-tokens", "65536", "--drafter", "none"],
        "bench": ["--prompts", str(folder / "p.jsonl"), "-n", "2000", "--repeat", "100000", "--json", str(report)],
        "chat": [],
    }[command]
    with start(command, *arguments, "--model", str(folder / "long"), stdin=subprocess.PIPE) as process:
        wait_until(lambda: opened(process.pid, "model.safetensors"))  # and it is at work for long after
        process.send_signal(signal.SIGINT)
        error = process.stderr.read() if process.stderr else b""
        process.wait(60)
    assert process.returncode in (130, -signal.SIGINT)
    assert error == b""
    assert not report.exists()


def test_ctrl_c_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is quiet from its first import on."""
    import builtins

    from outrider.__main__ import run

    honest = builtins.__import__

    def interrupted(name: str, *arguments: Any, **settings: Any) -> Any:
        if name == "outrider.cli":
            raise KeyboardInterrupt
        return honest(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert run() == 130


def test_a_refused_benchmark_leaves_no_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is refused after the report's path was tried: the path is as it was, empty or with its old content."""
    report = folder / "refused.json"
    arguments = ["bench", "--prompts", str(folder / "p.jsonl"), "--json", str(report), "--model", str(folder / "none")]
    assert main(arguments) == 2
    assert not report.exists()
    report.write_text("old")
    assert main(arguments) == 2
    assert report.read_text() == "old"
    report.unlink()
    assert capsys.readouterr().err.count("\n") == 2
    assert {place.name for place in folder.iterdir()} == {"long", "p.jsonl"}


def test_a_report_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while the report is written costs the new report only; links stay links."""
    place, link = tmp_path / "report.json", tmp_path / "link.json"
    ReportFile(str(place)).write("one")
    link.symlink_to(place)
    ReportFile(str(link)).write("two")
    assert (place.read_text(), link.is_symlink()) == ("two", True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    file = ReportFile(str(place))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(CommandError, match=r"--json: .*report.json: No space left"):
            file.write("three")
    assert place.read_text() == "two"
    assert len(list(tmp_path.iterdir())) == 2
    for path in ("", str(tmp_path), str(tmp_path / "no" / "x.json")):
        with pytest.raises(CommandError, match="--json: "):
            ReportFile(path)


def test_too_little_memory_and_a_wrong_instruction_set_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a fault of the program: one line and exit code 2."""
    model = ["--model", str(folder / "long")]
    assert main(["generate", "ab", *model, "--runner", "reference", "--cache-tokens", str(2**31 - 1)]) == 2
    assert "try a smaller --cache-tokens" in capsys.readouterr().err
    with start("generate", "ab", *model, env={**os.environ, "OUTRIDER_ISA": "mmx"}) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.count(b"\n") == 1
    assert b"OUTRIDER_ISA=mmx" in error
    monkeypatch.setattr("outrider.cli.generate.read_prompt", lambda *_: {}["a fault of ours"])
    with pytest.raises(KeyError):
        main(["generate", "ab"])


@pytest.mark.parametrize("line", ['{"prompt": "a", "category": %s}' % ("9" * 5000), "[" * 100_000, '{"prompt": "a'])
def test_json_that_python_itself_refuses(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of too many digits and nesting too deep are named by file and line too."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    assert main(["bench", "--prompts", str(tmp_path / "p.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "p.jsonl:2: not JSON" in error


def test_a_stop_string_that_no_text_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a surrogate pair, as a byte that is not UTF-8 becomes on the command line."""
    assert main(["generate", "ab", "--stop", "\udcff"]) == 2
    assert "stop: '\\udcff' is not Unicode" in capsys.readouterr().err


def test_json_of_a_result_has_no_values_that_json_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log-probabilities of every token, the unlikeliest too, are numbers of strict JSON."""
    arguments = ["generate", "ab", "--model", str(folder / "long"), "-n", "3", "--json", "--logprobs", "300"]
    assert main([*arguments, "-t", "0.5"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    out = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert len(out["logprobs"][0]["top"]) == 300
