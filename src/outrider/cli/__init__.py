"""The `outrider` command: one file per subcommand, each imported only when it is called."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

__all__ = ["main"]

_WRITING = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG)  # of an OSError without a file: printing failed

# name -> what it does. Its module is `outrider.cli.NAME` with a typer `app`.
COMMANDS = {
    "demo": "See speculative decoding work, and that it changes nothing.",
    "generate": "Continue a prompt, or answer it with --chat.",
    "chat": "Talk with a model.",
    "serve": "Serve a model with OpenAI's API.",
    "audit": "Show, verify, export and report what a server's ledger says.",
    "bench": "Measure drafters against plain decoding, equality first.",
    "profile": "Measure what steps cost on this machine, and which acceptance pays for them.",
    "check": "Check a draft against its target: do they fit, and does it pay here?",
    "advise": "Say which drafting method to run, on this machine or on other hardware.",
    "models": "List the known models and where they lie.",
    "pull": "Fetch a model into the cache folder.",
    "export": "Write a model as a Hugging Face folder, for other engines.",
    "drafters": "List the drafting methods.",
    "train": "Train drafters on a target's own answers.",
}


class Commands(TyperGroup):
    """A group that knows its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(cmd_name, COMMANDS, n=1)
            ctx.fail(f"no command {cmd_name!r}; " + (f"did you mean {near[0]!r}?" if near else "see 'outrider --help'"))
        return typer.main.get_command(import_module(f"outrider.cli.{cmd_name}").app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


# Plain help: with rich's panels `outrider --help` takes twice as long (0.10 s against 0.05 s).
app = typer.Typer(cls=Commands, rich_markup_mode=None, add_completion=False)


def _version(wanted: bool) -> None:
    if wanted:
        from outrider import __version__

        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def outrider(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Speculative decoding with the same bits as plain decoding, sooner.

    \b
    outrider demo                                  see it work
    outrider generate "The sea is" --show-drafts   who wrote which word
    outrider chat                                  talk with smollm2-135m
    outrider COMMAND --help                        options and examples
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _is_refusal(error: ValueError) -> bool:
    """Whether the error is one of ours (or derived from one): input refused at the door, not a fault in the program."""
    return any(kind.__module__.partition(".")[0] == "outrider" for kind in type(error).__mro__)


def _one_line(error: BaseException, message: str) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "outrider"
    return f"{path}: " + " ".join(message.split())


def _open_streams() -> None:
    """A process may be started without standard streams: nothing is read then, and nothing heard."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _drop_output() -> None:
    """What is still buffered goes nowhere: or the interpreter would fail on it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for a failed check, 2 for input refused, 130 for Ctrl-C."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    command = typer.main.get_command(app)
    try:
        code = command.main(
            list(sys.argv[1:] if arguments is None else arguments), prog_name="outrider", standalone_mode=False
        )
        sys.stdout.flush()  # here a full disk can still be told; when the interpreter ends it cannot
    except typer.TyperException as error:
        message = error.format_message().rstrip(".").replace("Value error, ", "")  # how a choice's refusal begins
        print(_one_line(error, message[:1].lower() + message[1:]), file=sys.stderr)
        return 2
    except ValueError as error:
        if not _is_refusal(error):
            raise
        print(_one_line(error, str(error)), file=sys.stderr)
        return 2
    except BrokenPipeError:
        _drop_output()  # the reader has gone: nothing left to say
        return 1
    except OSError as error:
        where = error.filename
        if where is None and error.errno in _WRITING:
            where = "standard output"
            _drop_output()
        print(_one_line(error, f"{where}: {error.strerror}" if where else str(error)), file=sys.stderr)
        return 2
    except MemoryError as error:
        what = f"not enough memory ({error}); " if str(error) else "not enough memory; "
        print(_one_line(error, f"{what}try a smaller --cache-tokens"), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not str(error).startswith("OUTRIDER_ISA"):  # the native core names the variable that it refuses
            raise
        print(_one_line(error, str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0
