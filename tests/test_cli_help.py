"""Help and documentation: every command has examples and a place in docs/, and each example could be run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.cli import COMMANDS, app

PROJECT = Path(__file__).parent.parent
PAGES = sorted([PROJECT / "README.md", *PROJECT.glob("docs/*.md")])


@cache
def root() -> Any:
    return typer.main.get_command(app)


def commands(parent: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, those of groups too."""
    if not hasattr(parent, "list_commands"):
        return
    context = typer.Context(parent)
    for name in parent.list_commands(context):
        found = parent.get_command(context, name)
        yield (*path, name), found
        yield from commands(found, (*path, name))


def examples(text: str) -> list[str]:
    """Lines that begin with `outrider`, with the lines that they go on in."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line.strip() for line in joined.splitlines() if re.match(r"\s*(\.venv/bin/)?outrider [a-z]", line)]


def require_sound(example: str) -> None:
    """The example is parsed, and not run: its commands and options exist, its values are of their kinds."""
    words = shlex.split(example, comments=True)
    stop = next((i for i, word in enumerate(words) if word in ("|", "&", "&&", ">", "<", ";")), len(words))
    command, rest = root(), [word.rstrip(";") for word in words[1:stop]]
    path = ["outrider"]
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        context = typer.Context(command)
        path.append(rest.pop(0))
        command = command.get_command(context, path[-1])
        assert command is not None, example
    try:
        command.make_context(" ".join(path), rest).close()
    except typer.BadParameter as error:
        if "does not exist" not in error.message:  # the files of an example are the reader's own
            raise


ALL = dict(commands(root()))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_has_sound_examples(path: tuple[str, ...]) -> None:
    """Of a command its own, of a group's command at least the group's one of it."""
    text = ALL[path].get_help(typer.Context(ALL[path], info_name=" ".join(("outrider", *path))))
    text = re.sub(r"Usage:.*", "", text)
    found = [line for line in examples(text) if line.startswith(" ".join(("outrider", *path)))]
    if not found and len(path) > 1:
        group = ALL[path[:-1]]
        found = [line for line in examples(group.help or "") if line.startswith(" ".join(("outrider", *path)))]
    assert found, f"no example of {' '.join(path)}"
    for example in found:
        require_sound(example.split("  ")[0])


def test_every_command_has_a_page_with_sound_examples() -> None:
    """What README and docs/ tell to type could be typed; and no command is left out there."""
    told: set[str] = set()
    for page in PAGES:
        for block in re.findall(r"```(?:\w*)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for example in examples(block):
                try:
                    require_sound(example.split("   ")[0])
                except typer.TyperException as error:
                    raise AssertionError(f"{page.name}: {example}: {error.format_message()}") from error
                if page.parent.name == "docs":
                    told.add(shlex.split(example, comments=True)[1])
    assert set(COMMANDS) <= told
