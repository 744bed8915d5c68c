"""Opens the head that a drafter runs: the folder that was named, or the one that comes with the package."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TypeVar

from outrider.drafters.base import Context, DrafterError
from outrider.models.digest import sha256_of_weights
from outrider.models.errors import ModelError
from outrider.models.heads import Eagle, Medusa, read_head
from outrider.models.shipped import find_shipped

__all__ = ["open_head", "warn_of_another_target"]

Head = TypeVar("Head", Eagle, Medusa)
_KINDS = {  # drafter, what its folder holds, what to do where there is none
    Eagle: ("eagle", "an EAGLE head", "no head comes with the package for {}: train one"),
    Medusa: ("medusa", "Medusa heads", "no heads come with the package for {}: train them"),
}


def open_head(kind: type[Head], folder: str, context: Context) -> Head:
    """The head in `folder`; in the one shipped for this target where that is empty.

    Raises DrafterError where none is shipped, where the folder cannot be read, and for a head of the other kind.
    """
    name, _, missing = _KINDS[kind]
    path = Path(folder) if folder else find_shipped(name, context.files.sha256())
    if path is None:
        raise DrafterError(
            f"{name}: {missing.format(context.files.name)} (`outrider train {name}`) "
            "and pass --drafter-option head=FOLDER"
        )
    try:
        head = read_head(path, context.config)
    except ModelError as error:
        raise DrafterError(f"{name}: {error}") from None
    if not isinstance(head, kind):
        other, what, _ = _KINDS[type(head)]
        raise DrafterError(f"{name}: {path} holds {what}: use --drafter {other}")
    context.opened[path.resolve().name] = partial(sha256_of_weights, path)
    return head


def warn_of_another_target(head: Eagle | Medusa, context: Context) -> None:
    """Warn, with both hashes, where the head says that it was trained for another target."""
    if head.config.target_sha256 is None:  # the target is hashed only where there is something to compare with
        return
    warning = head.warning(context.files.sha256())
    if warning is not None:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
