"""Which pool of upstreams the next request goes to: the one that speculates, as long as that pays.

The rule is the engine's own (`drafters/pace.py`): what drafts brought, in accepted tokens, against what
they took, in units of plain decoding. Here both are seen from outside: the time per token of whole requests, which
is compared only with plain requests of the same load, and the acceptance that the upstreams tell.

    speculative:  ... requests of the load's number | plain, as many: the live baseline | ...
    plain:        ... requests of the load's number | a trial, as many | its results are waited for | ...

As many requests as run at once go to the other pool together, so that it is judged under the load that it would have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.drafters.pace import Paces
from outrider.engine.speed import Speed
from outrider.engine.transitions import Figures, Mode, Reason, Transitions
from outrider.scale.counters import Guesses
from outrider.scale.upstream import Pool

__all__ = ["DRAFTER", "Fallback", "Measured"]

DRAFTER = "upstream"  # what the pool's own way of drafting is called here


@dataclass(frozen=True, slots=True)
class Measured:
    """What one finished request took. `load`: requests that ran beside it at its upstream, itself among them."""

    pool: Pool
    load: float
    tokens: int
    seconds: float
    streamed: bool
    gain: float | None  # accepted guesses per draft


@dataclass(slots=True)
class _Round:
    """Requests that are judged together."""

    gains: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    forwards: float = 0.0


class Fallback:
    """Belongs to the event loop. `available` says whether an upstream of a pool is up now."""

    _FOLLOW = 0.2  # how fast a time per token follows the last request's
    _SHARE = 4  # forwards of a request that count as one step: what delays one delays all
    _MOST_STEPS = 16  # that a request counts for
    _BASELINE = 48  # rounds between two looks at plain decoding
    _GAIN = 1.0  # accepted guesses per draft, where nobody tells: only the speed-up then counts
    _OVERDUE = 8  # rounds after which the results of a trial are no longer waited for

    def __init__(self, transitions: Transitions, available: Callable[[Pool], bool]) -> None:
        self.speed = Speed()
        self._transitions, self._available = transitions, available
        self._paces = Paces()
        self._plain: dict[tuple[int, bool], float] = {}  # seconds per token, by class of load and whether streamed
        self._window: Pool | None = None  # where the next requests go, whatever else holds
        self._left = 0  # of them
        self._position = 0  # of a request in its round
        self._rounds = 0  # since the last look at plain decoding, or the last trial
        self._awaited = 0  # results of a trial that are still to come
        self._round = _Round()
        self._guesses: deque[Guesses] = deque(maxlen=60)  # read lately
        self._requests = 0
        self._loaded = False
        self._load = 1

    def begin(self, mode: Mode) -> None:
        """How the first request is written."""
        self._transitions.begin(DRAFTER, mode)

    @property
    def mode(self) -> Mode:
        return self._transitions.modes.get(DRAFTER, "speculative")

    def pool(self, load: int) -> Pool:
        """Where a request goes that comes while `load` requests run, itself among them."""
        self._requests += 1
        self._load = load
        if not self._available("speculative"):
            if self._available("plain"):
                self._change("plain", "drafter failed")
            return "plain"
        if not self._available("plain"):
            return "speculative"
        if self._paces.step(load):
            self._loaded = True
        pace = self._paces.of(0)
        self._change("speculative" if pace.on else "plain", self._reason(on=pace.on))
        if self._window is not None:
            return self._windowed(self._window)
        own: Pool = "speculative" if pace.on else "plain"
        self._position += 1
        if self._position < load:
            return own
        self._position = 0
        self._rounds += 1
        if pace.on:
            known = (_class(load), True) in self._plain or (_class(load), False) in self._plain
            return self._open("plain", load) if self._rounds > (self._BASELINE if known else 1) else own
        if self._awaited and self._rounds <= self._OVERDUE:
            return own
        return self._open("speculative", load) if pace.wanted() else own

    def saw(self, measured: Measured) -> None:
        """A request is done."""
        key = _class(measured.load), measured.streamed
        took = measured.seconds / measured.tokens
        if measured.pool == "plain":
            before = self._plain.get(key, took)
            self._plain[key] = before + self._FOLLOW * (took - before)
        plain = self._plain.get(key)
        share = measured.seconds / measured.load
        speed = self.speed._replace(tokens=self.speed.tokens + measured.tokens, seconds=self.speed.seconds + share)
        if measured.pool == "speculative":
            self._awaited = max(0, self._awaited - 1)
            if plain is not None:
                speed = speed._replace(
                    compared_seconds=speed.compared_seconds + share,
                    compared_tokens=speed.compared_tokens + measured.tokens,
                    plain_seconds=speed.plain_seconds + plain * measured.tokens / measured.load,
                )
                if abs(key[0] - _class(self._load)) <= 1:  # of another load, it says nothing of this one
                    self._judge(measured, plain / took)
        self.speed = speed

    def guessed(self, guesses: Guesses) -> None:
        """What the upstreams' counters grew by."""
        self._guesses.append(guesses)

    # -- the rule ----------------------------------------------------------------------------------------------------

    def _open(self, pool: Pool, load: int) -> Pool:
        """The next `load` requests go to the other pool."""
        self._window, self._left, self._rounds = pool, load, 0
        if pool == "speculative":
            self._awaited = load
            self._round = _Round()
        return self._windowed(pool)

    def _windowed(self, pool: Pool) -> Pool:
        self._left -= 1
        if not self._left:
            self._window = None
        return pool

    def _judge(self, measured: Measured, speedup: float) -> None:
        gain = measured.gain if measured.gain is not None else self._usual_gain()
        there = self._round
        there.gains.append(gain)
        there.costs.append((1 + gain) / speedup - 1)
        there.forwards += measured.tokens / (1 + gain)
        on = self._paces.of(0).on
        if self._awaited if not on else len(there.gains) < self._load:
            return  # its round is not complete
        count = len(there.gains)
        steps = min(max(1, round(there.forwards / count / self._SHARE)), self._MOST_STEPS)
        for _ in range(steps):
            self._paces.saw(0, sum(there.gains) / count, sum(there.costs) / count)
        self._round = _Round()
        pace = self._paces.of(0)
        self._change("speculative" if pace.on else "plain", self._reason(on=pace.on))

    def _usual_gain(self) -> float:
        drafts = sum(guesses.drafts for guesses in self._guesses)
        return sum(guesses.accepted for guesses in self._guesses) / drafts if drafts else self._GAIN

    def _reason(self, *, on: bool) -> Reason:
        if self._loaded:
            return "load"
        return "pays again" if on else "does not pay"

    def _change(self, mode: Mode, reason: Reason) -> None:
        self._loaded = False
        if mode == self.mode:
            return
        self._rounds = self._position = 0
        self._window = None
        self._round = _Round()
        drafted = sum(guesses.drafted for guesses in self._guesses)
        accepted = sum(guesses.accepted for guesses in self._guesses)
        plain = self._plain_rate()
        speedup = None if plain is None else self._paces.usual.speedup
        figures = Figures(
            speedup=speedup,
            acceptance=accepted / drafted if drafted else None,
            speculative_tokens_per_second=plain and speedup and plain * speedup,
            plain_tokens_per_second=plain,
        )
        self._transitions.change(DRAFTER, mode, reason, self._requests, self._load, figures)

    def _plain_rate(self) -> float | None:
        """Tokens per second of all requests that run together at the present load, decoded plainly."""
        for streamed in (True, False):
            took = self._plain.get((_class(self._load), streamed))
            if took:
                return self._load / took
        return None


def _class(load: float) -> int:
    """Power of two next to it."""
    return max(0, round(math.log2(max(load, 1.0))))
