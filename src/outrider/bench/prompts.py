"""Prompt files of benchmarks: one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Content", "Prompt", "PromptFileError", "cut", "digest", "read_prompts"]

Content = str | list[dict[str, str]]  # raw text, or chat messages


class PromptFileError(ValueError):
    """A prompt file that cannot be used: names the file, the line and the way out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and where it stands. `content` is raw text, or chat messages for the model's template."""

    line: int  # from 1
    content: Content
    category: str | None = None
    prediction: str | None = None  # the expected output, for the drafter of that name

    @property
    def group(self) -> str:
        """What it is counted under."""
        return self.category or "uncategorised"


def read_prompts(path: Path, limit: int | None = None, *, chat: bool = False) -> list[Prompt]:
    """The first `limit` prompts of a JSON Lines file.

    A line has `prompt` (raw text; one user message if `chat`), `turns` (the first one becomes a user message) or
    `messages` (role and content), and maybe `category` and `prediction` (the expected output). Other keys and blank
    lines are passed over.

    Raises PromptFileError for anything else.
    """
    if limit is not None and limit < 1:
        raise PromptFileError(f"--limit: {limit} is not at least 1")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise PromptFileError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None
    prompts: list[Prompt] = []
    # JSON Lines end with \n alone: str.splitlines would also cut at the line separators that JSON strings may hold
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_prompt(line, number, f"{path}:{number}", chat))
    if not prompts:
        raise PromptFileError(f"{path}: there is no prompt in it; give one JSON object with 'prompt' per line")
    return prompts


def cut(prompts: Sequence[Prompt], limit: int | None, per_category: int | None) -> list[Prompt]:
    """At most `per_category` prompts of each category, and of those the first `limit`. Raises PromptFileError."""
    for option, value in (("--limit", limit), ("--per-category", per_category)):
        if value is not None and value < 1:
            raise PromptFileError(f"{option}: {value} is not at least 1")
    taken: dict[str | None, int] = {}
    out = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if per_category is None or taken[prompt.category] <= per_category:
            out.append(prompt)
    return out[:limit]


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over contents and categories: equal for equal prompts, whatever file they came from."""
    whole = json.dumps([[prompt.content, prompt.category] for prompt in prompts], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def _prompt(line: str, number: int, where: str, chat: bool) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of too many digits
        raise PromptFileError(f"{where}: not JSON ({error}); give one JSON object per line") from None
    if not isinstance(entry, dict):
        raise PromptFileError(
            f"{where}: not an object; give one JSON object with 'prompt', 'turns' or 'messages' per line"
        )
    given = [key for key in ("prompt", "turns", "messages") if key in entry]
    if len(given) != 1:
        found = " and ".join(repr(key) for key in given) or "none of them"
        raise PromptFileError(f"{where}: one of 'prompt', 'turns' and 'messages' is needed, there is {found}")
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise PromptFileError(f"{where}: 'category' is {category!r}, not text")
    prediction = entry.get("prediction")
    if prediction is not None:
        prediction = _text(prediction, f"{where}: 'prediction'")
    return Prompt(number, _content(given[0], entry[given[0]], where, chat), category, prediction)


def _content(key: str, value: Any, where: str, chat: bool) -> Content:
    if key == "messages":
        return _messages(value, where)
    if key == "turns":
        if not isinstance(value, list) or not value:
            raise PromptFileError(f"{where}: 'turns' is not a list with at least one text")
        value = value[0]
    text = _text(value, f"{where}: {key!r}")
    return [{"role": "user", "content": text}] if chat or key == "turns" else text


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PromptFileError(f"{where}: 'messages' is not a list with at least one message")
    out: list[dict[str, str]] = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptFileError(f"{where}: message {index} has no 'role'")
        content = _text(message.get("content"), f"{where}: message {index}'s 'content'")
        out.append({"role": message["role"], "content": content})
    return out


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise PromptFileError(f"{what} is not a non-empty text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptFileError(f"{what} has half a surrogate pair; write the character out")
    return value
