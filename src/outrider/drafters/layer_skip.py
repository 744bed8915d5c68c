"""The target drafts for itself with some of its layers: an early exit, or a chosen set of layers left out.

The draft runs over the target's own weights and cache: it reads the rows that verification wrote, and what it writes
behind them is overwritten by the next verification. So it takes no memory, and each guess costs as much of a plain step
as its layers and the head do. (Zhang et al. 2024, Draft & Verify; Elhoushi et al. 2024, LayerSkip; Xia et al. 2025,
SWIFT.) On a small model the head alone is a fifth of a step: it pays where the layers that are left agree often.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from outrider.core.cache import CacheFullError
from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Options, Request, Stateless
from outrider.models.digest import sha256_of
from outrider.models.shipped import find_shipped
from outrider.runtime.growth import Plan, Sprout

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipOptions(Options):
    max_draft_tokens: int = field(default=4, metadata={"help": "guesses per step at most"})
    exit_layer: int = field(default=0, metadata={"help": "draft with the first so many layers; 0 = see skip"})
    skip: tuple[int, ...] = field(
        default=(), metadata={"help": "layers left out, a,b,c; none: those found for the model, else an exit halfway"}
    )
    file: str = field(default="", metadata={"help": "layer_skip.json of `outrider train layer-skip`"})
    min_reach: float = field(
        default=0.5, metadata={"help": "match only: the draft goes on while it is right with this chance"}
    )


class LayerSkip(Stateless):
    name = "layer_skip"
    summary = "the target itself with layers left out, over its own cache"
    needs = "nothing; better with a set of layers found by `outrider train layer-skip`"
    helps = "deep models without a draft or head, where half of the layers mostly agree with all"
    Options = LayerSkipOptions

    def __init__(self, options: LayerSkipOptions, context: Context) -> None:
        if not 0 <= options.min_reach < 1:
            raise DrafterError("layer_skip: min_reach is in [0, 1)")
        self.options = options
        self.layers = _layers(options, context)
        self._target = context.target
        self._plan = Plan(context.config.vocabulary, reach=options.min_reach, layers=self.layers)

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        trees = [Tree.root(request.shaping.tokens[-1]) for request in batch]
        sprouts = [(i, sprout) for i, request in enumerate(batch) if (sprout := self._sprout(request)) is not None]
        if sprouts:
            grown = self._target.grow([sprout for _, sprout in sprouts], self._plan)
            for (i, _), tree in zip(sprouts, grown, strict=True):
                trees[i] = tree
        return trees

    def _sprout(self, request: Request) -> Sprout | None:
        """What is grown for a request; None where nothing is wanted, or where there is no room."""
        guesses = min(request.budget, self.options.max_draft_tokens)
        rows = request.rows
        if guesses <= 0 or rows is None:
            return None
        pending = request.shaping.tokens[rows.length :]
        try:
            rows.reserve(len(pending) + self._plan.rows(guesses, guesses))
        except CacheFullError:
            return None
        return Sprout(rows, pending, request.shaping, guesses, guesses, request.rejection)


def _layers(options: LayerSkipOptions, context: Context) -> tuple[int, ...]:
    """The layers that draft. Raises DrafterError for a choice that leaves none, or that is made twice."""
    count = context.config.layers
    given = {"exit_layer": options.exit_layer, "skip": options.skip, "file": options.file}
    chosen = [name for name, value in given.items() if value]
    if len(chosen) > 1:
        raise DrafterError(f"layer_skip: {' and '.join(chosen)} both say which layers draft; leave one out")
    if options.exit_layer:
        if not 1 <= options.exit_layer <= count:
            raise DrafterError(f"layer_skip: exit_layer {options.exit_layer} is outside [1, {count}]")
        return tuple(range(options.exit_layer))
    if options.skip:
        return _without(options.skip, count, "skip")
    if options.file:
        return _read(Path(options.file), context, named=True)
    shipped = find_shipped("layer_skip", context.files.sha256())
    if shipped is not None:
        return _read(shipped / "layer_skip.json", context, named=False)
    return tuple(range(max(1, count // 2)))


def _read(path: Path, context: Context, *, named: bool) -> tuple[int, ...]:
    try:
        content = json.loads(path.read_text())
        skip = tuple(int(layer) for layer in content["skip"])
        made_for = content.get("target_sha256")
        context.opened[path.name] = partial(sha256_of, path)
    except OSError as error:
        raise DrafterError(f"layer_skip: {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DrafterError(f"layer_skip: {path} is no layer_skip.json: it needs 'skip', a list of layers") from None
    if named and made_for is not None and made_for != context.files.sha256():
        warnings.warn(
            f"{path}: found for the target with SHA-256 {made_for}, and this one has {context.files.sha256()}: its "
            "layers may agree less",
            RuntimeWarning,
            stacklevel=2,
        )
    return _without(skip, context.config.layers, str(path))


def _without(skip: Sequence[int], count: int, where: str) -> tuple[int, ...]:
    wrong = [layer for layer in skip if not 0 <= layer < count]
    if wrong:
        raise DrafterError(f"layer_skip: {where}: layer {wrong[0]} is outside [0, {count - 1}]")
    left = tuple(layer for layer in range(count) if layer not in set(skip))
    if not left:
        raise DrafterError(f"layer_skip: {where}: no layer is left to draft with")
    return left


DRAFTER = LayerSkip
