"""Opens a target with one draft - a model or a head, given by name or folder - for the commands that judge drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.errors import CommandError
from outrider.core.names import near

if TYPE_CHECKING:
    from outrider import Engine
    from outrider.advise.compatibility import Compatibility
    from outrider.advise.prompts import Text
    from outrider.models.load import ModelFiles

__all__ = ["drafting_engine", "opened", "shipped", "texts_of"]


def opened(model: str) -> ModelFiles:
    """The target's files. Raises ModelError."""
    from outrider.models.load import open_model
    from outrider.models.registry import resolve

    return open_model(resolve(model))


def shipped(target: ModelFiles, name: str) -> str:
    """The folder of what comes with the package for this target under a kind's name; any other name as it is."""
    from outrider.models.shipped import find_shipped

    kinds = {"draft_model": "draft", "eagle": "eagle", "medusa": "medusa"}
    meant = near(name, kinds)
    if name not in kinds and meant and not Path(name).exists():
        raise CommandError(f"--draft: {name!r} is no file here{meant}")
    if name not in kinds or Path(name).exists():
        return name
    found = find_shipped(kinds[name], target.sha256())
    if found is None:
        raise CommandError(f"--draft: nothing of the kind {name!r} comes with the package for {target.name}")
    return str(found)


def drafting_engine(
    model: str,
    draft: Compatibility | None,
    *,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """An engine over the target whose drafter of the draft's kind runs that draft. Raises ModelError, DrafterError."""
    from outrider import Engine

    second = draft.path if draft is not None and draft.method == "draft_model" else None
    # the same prompts are read by several methods, and each shall feed them
    engine = Engine(model, draft_model=second, enable_prefix_caching=False, **settings)
    if draft is not None:
        head = {"head": draft.path} if draft.method in ("eagle", "medusa") else {}
        if head or options:
            engine.configure(draft.method, {**head, **(options or {})})
    return engine


def texts_of(prompts: Path | None, limit: int | None, *, chat: bool) -> Sequence[Text]:
    """The texts of a prompt file, or the built-in ones. Raises PromptFileError."""
    from outrider.advise.prompts import Text, built_in

    if prompts is None:
        return built_in()[:limit]
    from outrider.bench.prompts import read_prompts

    return [
        Text(prompt.category or "given", prompt.content, chat=False)
        for prompt in read_prompts(prompts, limit, chat=chat)
    ]
