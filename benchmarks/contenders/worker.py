"""Each contender lives in a process of its own: thread pools do not meet, and one that crashes is only left out."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from contenders.base import Absent, Generation, Setup, Spec

__all__ = ["ENGINES", "Worker"]

ENGINES = {
    "outrider": "contenders.outrider_engine",
    "llama.cpp": "contenders.llama_cpp_python",
    "transformers": "contenders.huggingface",
    "openvino": "contenders.openvino_genai_pipeline",
}
PATIENCE = 600.0  # seconds for one call


class Worker:
    """A contender in its own process. Every call may raise Absent, with the reason."""

    def __init__(self, spec: Spec, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.spec = spec
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec, setup), name=str(spec), daemon=True)
        self._process.start()
        theirs.close()
        self.settings: dict[str, Any] = self._answer()

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        self._pipe.send(("generate", list(prompt), new_tokens))
        return Generation(*self._answer())

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        self._pipe.send(("step_times", list(context), list(rows), repeats))
        out: dict[int, list[float]] = self._answer()
        return out

    @property
    def process(self) -> int:
        """The id of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        self._pipe.close()  # its loop ends there
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise Absent(f"no answer within {PATIENCE:.0f} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise Absent(f"its process ended with code {self._process.exitcode}") from None
        if kind == "absent":
            raise Absent(value)
        return value


def _serve(pipe: Connection, spec: Spec, setup: Setup) -> None:
    try:
        contender = importlib.import_module(ENGINES[spec.engine]).create(spec, setup)
        pipe.send(("done", dict(contender.settings)))
    except Exception as error:  # whatever a foreign engine raises is its reason to be left out
        pipe.send(("absent", _reason(error)))
        return
    while True:
        try:
            call, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            value = getattr(contender, call)(*arguments)
            pipe.send(("done", tuple(value) if isinstance(value, Generation) else value))
        except Exception as error:
            pipe.send(("absent", _reason(error)))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
