"""The interface of a drafter, and nothing of any method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.cache import Rows
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.costs import Costs
from outrider.models.config import DecoderConfig
from outrider.runtime.runner import Runner, Scores

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles

__all__ = [
    "Context",
    "Drafter",
    "DrafterError",
    "Follower",
    "Observation",
    "Options",
    "PricedOptions",
    "Request",
    "Stateless",
]


class DrafterError(ValueError):
    """The drafter cannot serve this target or these options: names the culprit and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of each drafter's options; its fields become command-line and JSON options. Unknown names are refused."""

    max_draft_tokens: int = field(default=8, metadata={"help": "guesses per step at most"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOptions(Options):
    """Of a drafter that weighs each guess against what its row costs."""

    row_cost: float = field(
        default=-1.0, metadata={"help": "what a guess costs, as a share of a plain step; negative: measured"}
    )

    def costs(self, context: Context) -> Costs:
        """The costs that decide: the engine's, unless a price is given."""
        return context.costs if self.row_cost < 0 else Costs(self.row_cost)


@dataclass(slots=True)
class Request:
    """One sequence that asks for a draft."""

    id: int  # of the sequence, never used again
    shaping: Shaping  # tokens (the last one is the root), parameters, seed
    budget: int  # guesses allowed in this step, 0 included
    rejection: bool = False  # laws are wanted and the noise must be the drafter's own
    prediction: Sequence[int] = ()  # the output that the caller expects
    rows: Rows | None = None  # of the sequence in the target's cache, for drafters that read them


@dataclass(slots=True)
class Observation:
    """What a step said about one sequence that this drafter drafts for.

    A prefill chunk that does not reach the last token has no tree and no verdict: only hidden states.
    """

    request: Request  # its shaping.tokens already end with the committed tokens
    scores: Scores  # the target's, still valid
    feed: int  # index in scores
    start: int  # absolute position of the first pending row
    pending: int  # committed rows of this feed
    tree: Tree | None
    path: tuple[int, ...] = ()  # accepted nodes
    token: int = -1  # the closing token: corrected, bonus or plain
    columns: tuple[int, ...] = ()  # where the drafter's wanted layers lie among all that this forward kept

    def hidden(self, rows: Sequence[int] | None = None) -> NDArray[np.float32]:
        """States of the layers in `wants`: the `pending` committed rows, then the tree's nodes 1, 2 ... [n, W, D]

        `rows`, ascending, picks some of them. A copy, which outlives the scores.
        """
        states = self.scores.hidden(self.feed)
        if rows is not None and rows and rows[-1] - rows[0] == len(rows) - 1:  # in order: cut, not picked
            states, rows = states[rows[0] : rows[-1] + 1], None
        chosen = states.copy() if rows is None else states[rows]
        return chosen if self.columns == tuple(range(chosen.shape[1])) else chosen[:, self.columns]


@dataclass(slots=True)
class Context:
    """What a drafter may use to set itself up."""

    config: DecoderConfig
    tokenizer: Any  # outrider.models.tokenizer.Tokenizer
    target: Runner
    files: ModelFiles  # of the target, in the format of its file
    # a second model by name or path, with the engine's settings: outrider.runtime.load.Loaded
    load: Callable[[str], Any]
    forecast: Callable[[str], dict[str, int]]  # the bytes that `load` will take, by purpose; loads nothing
    draft_model: str | None = None  # what the caller named
    batch_size: int = 1
    # what the drafter was loaded from besides the target, as the drafter tells it: name -> its SHA-256, when asked
    opened: dict[str, Callable[[], str]] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)  # of the target's forwards, by rows
    prefix_caching: bool = False  # whether texts that begin alike share rows, in caches of the drafter's own too
    prefill_chunk: int = 512  # rows of prompts that a step feeds

    def states_bytes(self, layers: int) -> int:
        """What the target keeps of its states for a drafter that wants so many layers: those of a step's rows."""
        return 4 * self.prefill_chunk * layers * self.config.hidden


class Drafter(Protocol):
    """Guesses continuations. Knows nothing of devices, graphs or the server.

    One with `wants` sees the states of every row of a text, so its texts take no rows from the prefix cache, unless it
    is a `Follower`. Made by `Class(options, context)`; raises DrafterError if it cannot serve this target.
    """

    name: ClassVar[str]  # the file's name
    summary: ClassVar[str]  # one line for the table: the idea
    needs: ClassVar[str]  # what must be there
    helps: ClassVar[str]  # when it pays
    Options: ClassVar[type[Options]]
    wants: tuple[
        int, ...
    ]  # target layers whose hidden states it needs, in the order in which `Observation.hidden` has them

    def __init__(self, options: Any, context: Context) -> None: ...

    @classmethod
    def forecast(cls, options: Any, context: Context) -> dict[str, int]:
        """What `memory` will say once the drafter is made, within 5 %, from shapes alone: no weights are packed."""
        ...

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        """One tree per request, its root the last token, at most `budget` guesses. `Tree.root` gives up this step."""
        ...

    def observe(self, step: Sequence[Observation]) -> None:
        """See what the target said, after the commit. Left out for a text that will not be asked for soon."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence is gone, or was preempted: drop everything kept for it."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose."""
        ...


class Follower:
    """A drafter with `wants` that need not see the states of rows which its own cache holds, or which it never reads.

    As it stands here: only those of the rows that are fed last are needed.
    """

    def follows(self, request: Request, length: int) -> int:
        """Of how many of the text's first `length` tokens it needs no states. Changes nothing."""
        return length

    def skip(self, request: Request, length: int) -> None:
        """The text's first `length` rows came from the prefix cache, as `follows` allowed; the next ones are fed."""


class Stateless:
    """A drafter that keeps nothing and watches nothing: the empty halves of the interface."""

    wants: tuple[int, ...] = ()

    def observe(self, step: Sequence[Observation]) -> None: ...

    def forget(self, sequence: int) -> None: ...

    @classmethod
    def forecast(cls, options: Any, context: Context) -> dict[str, int]:
        return {}

    def memory(self) -> dict[str, int]:
        return {}
