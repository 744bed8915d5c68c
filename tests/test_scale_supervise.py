"""vLLM's servers as children: their commands, their restarts, their end; a small program stands in for vLLM."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.scale import supervise
from outrider.scale.supervise import Child, FlagError, Supervisor, vllm_command
from upstreams import run

STAND_IN = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).open("a").write(f"{os.getpid()} {child.pid}\\n")
print("ready to write", flush=True)
time.sleep(600)
"""


def test_a_command_has_our_address_and_vllms_own_flags() -> None:
    made = vllm_command(["vllm"], "m", 81, ["--dtype", "float32"], '{"method": "ngram"}')
    assert made == (
        *("vllm", "serve", "m", "--host", "127.0.0.1", "--port", "81"),
        *("--speculative-config", '{"method": "ngram"}', "--dtype", "float32"),
    )
    assert "--speculative-config" not in vllm_command(["vllm"], "m", 81, [], None)
    for flag in ("--port", "--speculative-config={}", "--api-key"):
        with pytest.raises(FlagError, match=flag.partition("=")[0]):
            vllm_command(["vllm"], "m", 81, [flag], None)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be asked does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_that_dies_is_started_again_and_none_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With everything that it started itself; what it said last is in the log."""
    monkeypatch.setattr(supervise, "_PAUSES", (0.0,))
    pids = tmp_path / "pids"

    def started() -> list[list[int]]:
        lines = pids.read_text().splitlines() if pids.exists() else []
        return [[int(pid) for pid in line.split()] for line in lines if len(line.split()) == 2]

    async def test() -> None:
        child = Child((sys.executable, "-c", STAND_IN, str(pids)), 81, "plain")
        supervisor = Supervisor([child])
        await supervisor.start()
        await until(lambda: len(started()) == 1)
        assert supervisor.pid(child) == started()[0][0]
        os.kill(started()[0][0], 9)
        await until(lambda: len(started()) == 2)
        assert not any(alive(pid) for pid in started()[0])
        await supervisor.stop()
        await until(lambda: not any(alive(pid) for pid in started()[1]))
        assert supervisor.restarts == 1

    with caplog.at_level(logging.ERROR, logger="outrider.scale"):
        run(test)
    assert any("exit code -9" in message for message in caplog.messages)


def test_a_program_that_is_not_there_is_an_error_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again: it may be on its way."""

    async def test() -> None:
        monkeypatch.setattr(supervise, "_PAUSES", (0.0,))
        supervisor = Supervisor([Child(("/nowhere/vllm",), 81, "plain")])
        await supervisor.start()
        await until(lambda: supervisor.restarts >= 2)
        await supervisor.stop()

    with caplog.at_level(logging.ERROR, logger="outrider.scale"):
        run(test)
    assert "cannot start /nowhere/vllm" in caplog.text


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--vllm", "no-such-vllm"], "--vllm"),
        (["--replicas", "0"], "--replicas"),
        (["--vllm", sys.executable], "--speculative-config"),
        (["--vllm", sys.executable, "--speculative-config", "{"], "not JSON"),
        (["--vllm", sys.executable, "--speculative-config", "{}", "--", "--port", "1"], "--port"),
        (["--vllm", sys.executable, "--hardware", "abacus"], "abacus"),
    ],
)
def test_what_cannot_be_started_is_refused(options: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "qwen3-8b", "--backend", "vllm", "--port", "0", *options]) == 2
    assert fault in capsys.readouterr().err


def test_flags_for_vllm_need_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--upstream", "http://a:1", "--port", "0", "--", "--dtype", "float32"]) == 2
    assert "--backend vllm" in capsys.readouterr().err
    assert main(["serve", "m", "--port", "0", "--", "--dtype"]) == 2
    assert "--backend vllm" in capsys.readouterr().err
