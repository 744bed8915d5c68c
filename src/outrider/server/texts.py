"""The texts of one request, as whoever counts, records and ends them sees them: written here or by another server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from outrider.engine.results import Delta, Result
    from outrider.server.engine_thread import Work

__all__ = ["Texts", "Watcher"]


class Texts(Protocol):
    """Belongs to the event loop. Times are of `time.perf_counter`."""

    works: Sequence[Work]
    submitted: float
    last: list[float]  # when each text grew last
    begun: list[bool]  # whether it has a token
    results: list[Result | None]
    was_cut: bool

    @property
    def open(self) -> int:
        """Texts that have not ended."""
        ...

    @property
    def failed(self) -> bool:
        """Whether an error ended them."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Of all texts together."""
        ...

    @property
    def origin(self) -> Mapping[str, Any]:
        """For the log and the ledger: who wrote them, where that is another server."""
        ...

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call when all results that will come are there."""

    def cut(self) -> None:
        """End them now; what they have so far is their result."""

    def close(self) -> None:
        """Nobody reads on."""


class Watcher(Protocol):
    """Who counts: called in the event loop, with the time of `time.perf_counter` at which the step ended."""

    def delta(self, job: Texts, index: int, delta: Delta, now: float) -> None: ...

    def ended(self, job: Texts, index: int, result: Result, now: float) -> None: ...
