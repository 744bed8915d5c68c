"""The interface of a drafter, and nothing of any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.models.config import DecoderConfig
from outrider.runtime.runner import Runner, Scores

__all__ = ["Context", "Drafter", "DrafterError", "Observation", "Options", "Request"]


class DrafterError(ValueError):
    """The drafter cannot serve this target or these options: names the culprit and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of each drafter's options; its fields become command-line and JSON options. Unknown names are refused."""

    max_draft_tokens: int = field(default=8, metadata={"help": "guesses per step at most"})


@dataclass(slots=True)
class Request:
    """One sequence that asks for a draft."""

    id: int  # of the sequence, never used again
    shaping: Shaping  # tokens (the last one is the root), parameters, seed
    budget: int  # guesses allowed in this step, 0 included
    rejection: bool = False  # laws are wanted and the noise must be the drafter's own


@dataclass(slots=True)
class Observation:
    """What a step said about one sequence that this drafter drafted for."""

    request: Request  # its shaping.tokens now end with the committed tokens
    tree: Tree
    path: tuple[int, ...]  # accepted nodes
    token: int  # the closing token: corrected or bonus
    scores: Scores  # the target's, still valid
    feed: int  # index in scores
    pending: int  # rows before the tree's first guess in scores.hidden(feed)


@dataclass(slots=True)
class Context:
    """What a drafter may use to set itself up."""

    config: DecoderConfig
    tokenizer: Any  # outrider.models.tokenizer.Tokenizer
    target: Runner
    load: Callable[..., Any]  # load(name_or_path, **settings) -> outrider.runtime.load.Loaded, for second models
    settings: Mapping[str, Any] = field(default_factory=dict)  # the engine's: dtype, threads, cache sizes


class Drafter(Protocol):
    """Guesses continuations. Knows nothing of devices, graphs or the server."""

    Options: ClassVar[type[Options]]
    wants: tuple[int, ...]  # target layers whose hidden states it needs, in `Scores.hidden`'s order

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        """One tree per request, its root the last token, at most `budget` guesses. `Tree.root` gives up this step."""
        ...

    def observe(self, step: Sequence[Observation]) -> None:
        """See what the target said, after the commit."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence is gone, or was preempted: drop everything kept for it."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose."""
        ...
