"""`outrider chat`: a conversation with a model."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import DraftOptions, EngineOptions, SamplingOptions, check_draft_model, flatten, open_engine
from outrider.cli.origins import OriginPainter, wants_colour
from outrider.cli.report import summary

if TYPE_CHECKING:
    from outrider import Engine, Result, SamplingParams

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_COMMANDS = "/exit ends, /reset starts anew, /stats sums up; Ctrl-C stops an answer, Ctrl-D ends"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions):
    """An answer may be longer than a continuation."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens per answer at most.")] = 512


@app.command()
@flatten
def chat(
    sampling: AnswerOptions,
    engine: EngineOptions,
    draft: DraftOptions,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark each token by who wrote it: drafter or model.")
    ] = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /exit ends, /reset starts anew, /stats sums up.

    \b
    outrider chat
    outrider chat --model smollm2-135m --system "You are terse." --temperature 0.7
    outrider chat --show-drafts --max-tokens 400
    """
    params = sampling.params()
    check_draft_model(draft)
    conversation = Conversation(open_engine(engine, draft), params, system, show_drafts)
    if sys.stdin.isatty():
        _line_editing()
        print(_dim(f"{conversation.engine.files.name}, drafter {draft.drafter}. {_COMMANDS}"), file=sys.stderr)
    while (line := _ask()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
            _note("the conversation starts anew")
        elif line == "/stats":
            _note(conversation.statistics())
        elif line.startswith("/"):
            _note(f"{line.split()[0]}: no such command; {_COMMANDS}")
        elif line:
            conversation.say(line)


class Conversation:
    """The messages so far and what each answer cost."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None, show_drafts: bool) -> None:
        self.engine, self._params, self._show_drafts = engine, params, show_drafts
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._results: list[Result] = []

    def reset(self) -> None:
        self._messages = list(self._opening)

    def say(self, text: str) -> None:
        """Ask, print the answer as it comes, and remember both. A turn that is refused is taken back."""
        self._messages.append({"role": "user", "content": text})
        try:
            stream = self.engine.stream(self._messages, self._params)
            self._print(stream)
        except ValueError as error:
            self._messages.pop()
            _note(f"{error}; /reset starts anew")
            return
        result = stream.result
        assert result is not None
        self._messages.append({"role": "assistant", "content": result.text})
        self._results.append(result)
        ends = {"cancelled": "stopped, ", "length": "cut at its limit, ", "stop": ""}
        _note(ends[result.finish_reason] + summary(result))

    def statistics(self) -> str:
        if not self._results:
            return "no answer yet"
        tokens = sum(len(result.tokens) for result in self._results)
        steps = sum(len(result.steps) for result in self._results)
        accepted = sum(step.accepted for result in self._results for step in result.steps)
        seconds = sum(result.seconds for result in self._results)
        answers = "1 answer" if len(self._results) == 1 else f"{len(self._results)} answers"
        return (
            f"{answers}, {tokens} tokens in {steps} forwards, {tokens / seconds:.1f} tokens/s, "
            f"acceptance length {1 + accepted / max(steps, 1):.2f}"
        )

    def _print(self, stream: Any) -> None:
        tokenizer = self.engine.tokenizer
        painter = OriginPainter(tokenizer.token_bytes, tokenizer.is_special, colour=wants_colour(sys.stdout))
        with _interruptible() as interrupted:
            for delta in stream:
                text = painter.paint(delta) if self._show_drafts else delta.text
                sys.stdout.write(text)
                sys.stdout.flush()
                if interrupted:
                    stream.close()  # gives the cache pages back; what was written stays in the conversation
                    break
        print()


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """While open, the first Ctrl-C only fills the list, so that no step of the engine is torn; a second one ends."""
    interrupted: list[bool] = []

    def note(number: int, frame: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _ask() -> str | None:
    """The next line, or None at the end of the input. Ctrl-C drops the line that was being typed."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():  # no one could end it with Ctrl-D
                raise
            print(file=sys.stderr)
            _note("/exit or Ctrl-D ends")
        except EOFError:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            _note(f"not valid UTF-8 at byte {error.start}; the line is dropped")


def _line_editing() -> None:
    """Arrow keys and history for `input`, where the system has readline."""
    from contextlib import suppress

    with suppress(ImportError):
        import readline  # noqa: F401


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if wants_colour(sys.stderr) else text


def _note(text: str) -> None:
    print(_dim(text), file=sys.stderr, flush=True)
