"""What steps cost on a machine, measured once by `outrider profile` and kept in the user's cache folder.

A profile counts for one machine, one model, one set of formats and one number of threads: anything else has another key
and another file. `find` reads it, `starting_costs` is the little of it that a controller can begin with instead of the
usual costs; what a text is never depends on either.

Letters: B sequences of a batch, R rows of a forward, all sequences together.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from outrider.models.cache_folder import cache_folder
from outrider.runtime.machine import machine
from outrider.runtime.native import NativeRunner

if TYPE_CHECKING:
    from outrider.engine.engine import Loaded

__all__ = ["VERSION", "Counts", "Drafting", "Forward", "Profile", "ProfileError", "find", "key_of", "starting_costs"]

VERSION = 2


class ProfileError(ValueError):
    """A profile that cannot be read: names the file and the way out."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A measured forward of the target: `rows` of all sequences together, behind `context` cached ones of each."""

    batch: int
    rows: int
    context: int
    seconds: float


@dataclass(slots=True)
class Counts:
    """What a method's guesses came to on some texts. Nothing here was timed."""

    prompt_tokens: list[int] = field(default_factory=list)  # of each text
    tokens: int = 0  # written behind the first of each text
    steps: dict[int, int] = field(default_factory=dict)  # guesses checked in a step -> such steps, 0 included
    tried: list[int] = field(default_factory=list)  # by depth: drafts that guessed so deep
    right: list[int] = field(default_factory=list)  # and those that were right so far
    rested: int = 0  # of the steps without guesses, those for which the method was not even asked

    def saw(self, drafted: int, depth: int, accepted: int, *, asked: bool = True) -> None:
        """A step behind the first token of a text."""
        self.tokens += 1 + accepted
        self.rested += not asked
        self.steps[drafted] = self.steps.get(drafted, 0) + 1
        self.tried += [0] * (depth - len(self.tried))
        self.right += [0] * (depth - len(self.right))
        for level in range(depth):
            self.tried[level] += 1
            self.right[level] += accepted > level

    def add(self, other: Counts) -> None:
        """Take in the counts of other texts."""
        self.prompt_tokens += other.prompt_tokens
        self.tokens += other.tokens
        self.rested += other.rested
        for drafted, count in other.steps.items():
            self.steps[drafted] = self.steps.get(drafted, 0) + count
        for mine, theirs in ((self.tried, other.tried), (self.right, other.right)):
            mine += [0] * (len(theirs) - len(mine))
            for level, count in enumerate(theirs):
                mine[level] += count

    @property
    def total_steps(self) -> int:
        return sum(self.steps.values())

    @property
    def tokens_per_step(self) -> float:
        """Tokens per forward of the target, behind the first one of each text."""
        return self.tokens / self.total_steps if self.steps else 1.0

    @property
    def error(self) -> float:
        """Standard error of `tokens_per_step`."""
        steps = self.total_steps
        if steps < 2:
            return 0.0
        mean = sum(self.right) / steps
        # the mean square of a count is the sum of (2 d - 1) P(count >= d)
        square = sum((2 * level + 1) * right for level, right in enumerate(self.right)) / steps
        return math.sqrt(max(0.0, square - mean * mean) / steps)

    @property
    def drafted(self) -> int:
        """Guesses that were checked."""
        return sum(guesses * count for guesses, count in self.steps.items())

    def acceptance(self) -> list[float]:
        """By depth, the share of guesses that were right among those whose ancestors were."""
        reached = [self.tried[0] if self.tried else 0, *self.right]
        return [
            right / max(1, min(before, tried))
            for right, before, tried in zip(self.right, reached, self.tried, strict=False)
        ]


@dataclass(slots=True)
class Drafting:
    """What a method adds to the forwards of a step, and what its guesses came to, on the built-in texts.

    Seconds of a step with g > 0 guesses: the forward's + `some` + g * `guess`; of one for which it was asked and had
    none that was worth checking: the forward's + `none`. Of a prompt of n tokens, up to its first token and what the
    method reads of it: `prompt` + n * `prompt_token`. Method `none` is plain decoding. All seconds are such that the
    ratio to plain decoding is the one that was measured, in turns with it.
    """

    method: str
    none: float
    some: float
    guess: float
    prompt: float
    prompt_token: float
    lengths: dict[int, float] = field(default_factory=dict)  # most guesses of a step -> seconds beside its forward
    memory: int = 0  # bytes
    draft_sha256: str | None = None
    texts: dict[str, Counts] = field(default_factory=dict)  # by workload

    def extra(self, guesses: int) -> float:
        """Seconds beside the forward of a step that checks so many guesses."""
        return self.some + self.guess * guesses if guesses else self.none

    def extra_of_chain(self, guesses: int) -> float:
        """Seconds beside the forward of a step that makes at most so many guesses, and checks them all."""
        if not self.lengths or not guesses:
            return self.extra(guesses)
        return max(0.0, _between(sorted(self.lengths.items()), guesses))

    def counts(self, workload: str | None = None) -> Counts:
        """Of one workload, or of all."""
        out = Counts()
        for name, counts in self.texts.items():
            if workload in (None, name):
                out.add(counts)
        return out


@dataclass(slots=True)
class Profile:
    """Costs of one model on one machine. Seconds throughout."""

    key: dict[str, Any]  # machine, model, formats, threads: see `key_of`
    name: str  # of the model
    made: str  # date and time, ISO 8601
    outrider: str  # version
    context: int  # cached rows of each sequence in most forwards
    forwards: list[Forward]
    draws: dict[str, float]  # of one token, by parameters
    draftings: list[Drafting]
    sweep: list[dict[str, float]] = field(default_factory=list)  # see advise.sweep
    version: int = VERSION

    def seconds(self, rows: int, batch: int = 1, context: int | None = None) -> float:
        """Of a forward, linear between what was measured; from the measured batch size nearest to `batch`."""
        base = [f for f in self.forwards if f.context == self.context]
        nearest = min({f.batch for f in base}, key=lambda b: (abs(b - batch), b))
        curve = sorted((f.rows, f.seconds) for f in base if f.batch == nearest)
        return _between(curve, rows) + (0 if context is None else (context - self.context) * self._slope(rows))

    def drafting(self, method: str) -> Drafting | None:
        return next((d for d in self.draftings if d.method == method), None)

    def save(self, path: Path | None = None) -> Path:
        """Write it where `find` looks, or to `path`; whole or not at all. Raises OSError."""
        path = path or _place(self.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        part.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Raises ProfileError for a file that is none, or of another version."""
        try:
            stored = json.loads(path.read_text("utf-8"))
            version = stored.get("version") if isinstance(stored, dict) else None
            if version != VERSION:
                raise ProfileError(f"{path} is no profile of version {VERSION}: run `outrider profile` again")
            return TypeAdapter(cls).validate_python(stored)
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror or error}") from None
        except ProfileError:
            raise
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"{path} is no profile, or a damaged one: run `outrider profile` again") from error

    def _slope(self, rows: int) -> float:
        """Seconds that each cached row more costs a forward of so many rows, of one sequence."""
        by_rows: dict[int, list[Forward]] = {}
        for f in self.forwards:
            if f.batch == 1:
                by_rows.setdefault(f.rows, []).append(f)
        slopes = []
        for count, found in sorted(by_rows.items()):
            low, high = min(found, key=lambda f: f.context), max(found, key=lambda f: f.context)
            if high.context > low.context:
                slopes.append((count, max(0.0, (high.seconds - low.seconds) / (high.context - low.context))))
        return max(0.0, _between(slopes, rows)) if slopes else 0.0


def key_of(loaded: Loaded) -> dict[str, Any]:
    """What decides what steps cost: anything that differs here needs a profile of its own."""
    here = machine()
    key: dict[str, Any] = {
        "machine": {name: here[name] for name in ("cpu", "architecture", "cores", "instructions")},
        "model_sha256": loaded.files.sha256(),
    }
    runner = loaded.runner
    if isinstance(runner, NativeRunner):
        formats = {name.rpartition(".")[2]: runner.formats[name] for name in sorted(runner.formats)}
        return {**key, "runner": "native", "formats": formats, "kv": runner.kv_dtype, "threads": runner.threads}
    return {**key, "runner": "reference", "formats": {}, "kv": "fp32", "threads": 1}


def find(loaded: Loaded) -> Profile | None:
    """The profile of this model, as it is loaded, on this machine; None if there is none. Raises ProfileError."""
    path = _place(key_of(loaded))
    return Profile.read(path) if path.exists() else None


def starting_costs(loaded: Loaded) -> list[tuple[int, float]] | None:
    """For a controller to begin with: (rows, cost of a forward of so many rows in forwards of one row), rows ascending.

    From the profile of this model on this machine; None where there is none, or where it is damaged: a controller then
    begins with the usual costs, and measures its own in any case.
    """
    try:
        profile = find(loaded)
    except ProfileError:
        return None
    if profile is None:
        return None
    one = profile.seconds(1)
    rows = sorted({f.rows for f in profile.forwards if f.batch == 1 and f.context == profile.context})
    return [(r, profile.seconds(r) / one) for r in rows]


def _place(key: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "profiles" / f"{name}.json"


def _between(curve: Sequence[tuple[int, float]], x: int) -> float:
    """Linear between two points, and on along the last two beyond them."""
    if len(curve) == 1:
        return curve[0][1]
    high = min(max(1, bisect_left([point[0] for point in curve], x)), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[high - 1], curve[high]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
