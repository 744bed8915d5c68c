"""Recipes: all settings of a training in one small TOML file, so that a drafter can be made again with one command.

    [answers]   train.answers.AnswerSettings
    [data]      train.settings.DataSettings
    [train]     train.settings.TrainSettings
    [eagle]     train.settings.EagleSettings          (or [medusa], [draft], [layer_skip],
                                                       [ngram_model])

What is left out has its default; an unknown name is refused when the recipe is read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from outrider.train.answers import AnswerSettings
from outrider.train.errors import TrainError
from outrider.train.settings import (
    DataSettings,
    DraftSettings,
    EagleSettings,
    LayerSkipSettings,
    MedusaSettings,
    NgramModelSettings,
    TrainSettings,
)

__all__ = ["Recipe"]

S = TypeVar("S")

SECTIONS: Final[Mapping[str, type[Any]]] = {
    "answers": AnswerSettings,
    "data": DataSettings,
    "draft": DraftSettings,
    "eagle": EagleSettings,
    "layer_skip": LayerSkipSettings,
    "medusa": MedusaSettings,
    "ngram_model": NgramModelSettings,
    "train": TrainSettings,
}


@dataclass(frozen=True)
class Recipe:
    """The sections of a recipe. One that was read has only settings that there are, of the right types."""

    sections: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path | None, changes: Sequence[str] = ()) -> Recipe:
        """The recipe in a file, if any, with changes such as `train.rate=5e-4`. Raises TrainError."""
        sections: dict[str, dict[str, Any]] = {}
        if path is not None:
            try:
                sections = tomllib.loads(path.read_text("utf-8"))
            except OSError as error:
                raise TrainError(f"{path}: {error.strerror or error}") from None
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise TrainError(f"{path}: not TOML ({error})") from None
        for change in changes:
            name, equals, text = change.partition("=")
            section, dot, key = name.strip().partition(".")
            if not equals or not dot:
                raise TrainError(f"{change!r} is not of the form section.name=value, as in train.rate=5e-4")
            sections.setdefault(section, {})[key] = _value(text.strip())
        for section, values in sections.items():
            if section not in SECTIONS or not isinstance(values, dict):
                raise TrainError(f"recipe: unknown section {section!r}; known are {', '.join(SECTIONS)}")
        made = cls(sections)
        for section in sections:
            made.settings(section, SECTIONS[section])
        return made

    def answers(self) -> AnswerSettings:
        return self.settings("answers", AnswerSettings)

    def data(self) -> DataSettings:
        return self.settings("data", DataSettings)

    def settings(self, section: str, kind: type[S]) -> S:
        """A section as its settings. Raises TrainError for an unknown name or a value of another type."""
        known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
        hints = get_type_hints(kind)
        made: dict[str, Any] = {}
        for name, value in self.sections.get(section, {}).items():
            if name not in known:
                raise TrainError(f"recipe: {section}.{name} is unknown; known are {', '.join(sorted(known))}")
            made[name] = _typed(value, hints[name], f"{section}.{name}")
        return kind(**made)

    def text(self, *settings: tuple[str, Any]) -> dict[str, Any]:
        """All settings in full, to be recorded beside what they made."""
        return {name: asdict(values) for name, values in settings}


def _typed(value: Any, hint: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, bool, str):
        if type(value) is not hint:
            raise TrainError(f"recipe: {where} is {value!r}, not of type {hint.__name__}")
        return value
    if not isinstance(value, list | tuple):
        raise TrainError(f"recipe: {where} is {value!r}, no list")
    inner = hint.__args__[0]
    return tuple(_typed(item, inner, where) for item in value)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
