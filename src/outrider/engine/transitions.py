"""The changes between drafting and plain decoding, with the figures that they rest on, and who is told of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Figures", "Listener", "Mode", "Reason", "Transition", "Transitions"]

# `plain` includes the trials of a drafter that does not pay at present: only their outcome changes the mode.
Mode = Literal["speculative", "plain"]
Reason = Literal[
    "pays again",
    "does not pay",
    "acceptance under the floor",
    "acceptance over the floor",
    "load",  # another number of texts runs, at which drafting was found to pay, or not to
    "drafter failed",
]
log = logging.getLogger("outrider.engine")


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured lately of one drafter; None where nothing was."""

    speedup: float | None = None  # tokens per second with drafting over those of plain decoding
    acceptance: float | None = None  # accepted guesses per checked one
    speculative_tokens_per_second: float | None = None  # of all running texts together
    plain_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """One drafter's texts go on in another mode. Nobody can see it in a text."""

    time: float  # Unix seconds
    step: int  # forwards of the engine before it
    drafter: str
    before: Mode
    after: Mode
    reason: Reason
    requests: int  # texts of the drafter in the step that decided it
    speedup: float | None = None
    acceptance: float | None = None
    speculative_tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, figures rounded to four digits behind the point."""
        return {
            name: round(value, 4) if isinstance(value, float) and name != "time" else value
            for name, value in asdict(self).items()
        }


Listener = Callable[[Transition], None]


class Transitions:
    """Keeps the latest transitions and tells the listeners, on the thread that steps the engine.

    What is read from it (`recent`, `modes`, `counts`) is replaced and never changed: safe to read from any thread.
    """

    _KEPT = 4096  # the ledger has them all

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners: tuple[Listener, ...] = ()
        self.recent: tuple[Transition, ...] = ()  # oldest first
        self.modes: Mapping[str, Mode] = {}  # by drafter
        self.counts: Mapping[tuple[str, Mode, Reason], int] = {}  # by drafter, new mode and reason

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of each transition; call what is returned to end it. One that fails is logged, no more."""
        self._listeners = (*self._listeners, listener)

        def end() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return end

    def begin(self, drafter: str, mode: Mode) -> None:
        """A drafter is asked for the first time: no transition."""
        self.modes = {**self.modes, drafter: mode}

    def change(self, drafter: str, after: Mode, reason: Reason, step: int, requests: int, figures: Figures) -> None:
        """Nothing happens where the drafter is in that mode already."""
        before = self.modes.get(drafter, "speculative")
        if before == after:
            return
        transition = Transition(self._clock(), step, drafter, before, after, reason, requests, **asdict(figures))
        self.modes = {**self.modes, drafter: after}
        key = drafter, after, reason
        self.counts = {**self.counts, key: self.counts.get(key, 0) + 1}
        self.recent = (*self.recent, transition)[-self._KEPT :]
        log.info("drafter %s: %s -> %s", drafter, before, after, extra={"fields": transition.as_dict()})
        for listener in self._listeners:
            try:
                listener(transition)
            except Exception:  # whoever watches must not take the texts down
                log.exception("a listener of mode changes failed")
