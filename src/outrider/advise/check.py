"""Whether a draft is good for a target: what the files say, how often it is right, and what that is worth here.

The probe drafts without control: every step guesses, however little it brings, for the draft is judged and not the
controller that would send it to rest. The expected speed-up comes from the profile of this machine where one knows
this draft, and from the probe's own clock beside plain decoding where not.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from outrider.advise.compatibility import Compatibility
from outrider.advise.predict import predict
from outrider.advise.probe import Followed, follow
from outrider.advise.prompts import Text
from outrider.engine.profile import Counts, Profile

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.models.load import ModelFiles

__all__ = ["VERSION", "CheckReport", "Drift", "Probe", "ReportError", "Verdict", "judge", "probe", "refusal"]

VERSION = 1
Verdict = Literal["good", "weak", "harmful", "refused"]
_GOOD = 1.10  # expected speed-up from which a draft is good; below 1 it is harmful
_FELL = 0.10  # of tokens per step: a smaller fall is no drift
_SURE = 2.0  # standard errors that a fall must exceed


class ReportError(ValueError):
    """A report that cannot be read: names the file and the way out."""


@dataclass(slots=True)
class Probe:
    """What the draft's guesses came to."""

    prompts_sha256: str  # of the texts and how much was written: only equal ones can be compared
    counts: Counts
    speedup: float
    basis: str  # what the speed-up rests on
    draft_share: float  # of a step's time, beside the target's forward
    memory: int  # bytes that the draft holds


@dataclass(slots=True)
class Drift:
    """Now against an earlier report."""

    against: str  # when that was made
    changed: list[str]  # of target, draft, tokenizer: whose hash is another
    tokens_then: float
    tokens_now: float
    comparable: bool  # whether the texts are the same
    fell: bool  # by more than chance explains

    @property
    def found(self) -> bool:
        return bool(self.changed) or self.fell


@dataclass(slots=True)
class CheckReport:
    """All of it, as `--out` writes it."""

    made: str
    outrider: str
    target: str
    target_sha256: str
    draft: Compatibility
    verdict: Verdict
    reason: str
    probe: Probe | None = None
    drift: Drift | None = None
    version: int = VERSION

    @property
    def exit_code(self) -> int:
        """0 good, 1 weak or drifting, 2 harmful or refused."""
        if self.verdict in ("harmful", "refused"):
            return 2
        drifting = self.drift is not None and self.drift.found
        recorded = any(finding.level == "drift" for finding in self.draft.findings)
        return 1 if self.verdict == "weak" or drifting or recorded else 0

    def as_json(self) -> dict[str, Any]:
        out = asdict(self)
        if self.probe is not None:
            out["probe"] |= {
                "tokens_per_step": self.probe.counts.tokens_per_step,
                "acceptance_by_depth": self.probe.counts.acceptance(),
            }
        return out | {"exit_code": self.exit_code}

    @classmethod
    def read(cls, path: Path) -> CheckReport:
        """Raises ReportError for what `outrider check --out` did not write, or another version did."""
        try:
            stored = json.loads(path.read_text("utf-8"))
            if not isinstance(stored, dict) or stored.get("version") != VERSION:
                raise ReportError(f"{path} is no report of `outrider check --out`, version {VERSION}")
            return TypeAdapter(cls).validate_python(stored)
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror or error}") from None
        except ReportError:
            raise
        except (ValueError, RecursionError):
            raise ReportError(f"{path} is no report of `outrider check --out`, or a damaged one") from None


def refusal(target: ModelFiles, draft: Compatibility, version: str) -> CheckReport:
    """The report on a draft that cannot run with this target."""
    reason = draft.refused
    assert reason is not None, "nothing was refused"
    return CheckReport(_now(), version, target.name, target.sha256(), draft, "refused", reason.told)


def probe(
    engine: Engine,
    method: str,
    texts: Sequence[Text],
    *,
    max_tokens: int,
    profile: Profile | None = None,
    draft_sha256: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> Probe:
    """Let the draft guess on the texts, and say what it is worth.

    The engine does not adapt. Plain decoding of the same texts runs beside where no profile knows the draft.
    """
    known = profile.drafting(method) if profile is not None else None
    if known is not None and known.draft_sha256 != draft_sha256:
        known = None
    drafted: list[Followed] = []
    plain: list[Followed] = []
    follow(engine, method, texts[:1], max_tokens=min(8, max_tokens))  # loads and wakes what is needed
    for text in texts:
        drafted += follow(engine, method, [text], max_tokens=max_tokens, clock=clock)
        if known is None:
            plain += follow(engine, "none", [text], max_tokens=max_tokens, clock=clock)
        progress()
    broken = next((f.error for f in drafted if f.error), None)
    if broken is not None:
        raise ReportError(f"the draft failed: {broken}")
    counts = Counts()
    for followed in drafted:
        counts.add(followed.counts)
    moments = [moment for followed in drafted for moment in followed.moments[1:]]
    seconds = sum(moment.seconds for moment in moments)
    share = 1 - sum(moment.forward for moment in moments) / seconds if seconds else 0.0
    if known is not None and profile is not None:
        speedup = predict(profile, method, counts).decoding_speedup
        basis = f"this machine's profile of {profile.made[:10]}"
    else:
        speedup = _measured(drafted, plain)
        basis = "measured on the probe's texts, beside plain decoding"
    memory = sum(size for purpose, size in engine.memory().items() if purpose.startswith(f"{method}: "))
    return Probe(_texts_sha256(texts, max_tokens), counts, speedup, basis, share, memory)


def judge(
    target: ModelFiles, draft: Compatibility, found: Probe, version: str, *, against: CheckReport | None = None
) -> CheckReport:
    """The verdict, and what has changed since an earlier report."""
    verdict: Verdict = "good" if found.speedup >= _GOOD else "weak" if found.speedup >= 1 else "harmful"
    told = {
        "good": "worth running",
        "weak": f"hardly worth running, for good begins at {_GOOD:.2f}x",
        "harmful": "slower than plain decoding",
    }[verdict]
    reason = (
        f"{told}: {found.speedup:.2f}x expected, {found.counts.tokens_per_step:.2f} tokens per step, "
        f"{found.draft_share:.0%} of a step spent beside the target's forward"
    )
    drift = None if against is None else _drift(target, draft, found, against)
    return CheckReport(_now(), version, target.name, target.sha256(), draft, verdict, reason, found, drift)


def _drift(target: ModelFiles, draft: Compatibility, now: Probe, then: CheckReport) -> Drift:
    if then.probe is None:
        raise ReportError("the earlier report refused its draft: there is no acceptance to compare with")
    pairs = {
        "target": (target.sha256(), then.target_sha256),
        "draft": (draft.sha256, then.draft.sha256),
        "tokenizer": (draft.tokenizer, then.draft.tokenizer),
    }
    old, new = then.probe.counts, now.counts
    fall = old.tokens_per_step - new.tokens_per_step
    chance = math.hypot(old.error, new.error)
    return Drift(
        against=then.made,
        changed=[name for name, (ours, theirs) in pairs.items() if ours != theirs],
        tokens_then=old.tokens_per_step,
        tokens_now=new.tokens_per_step,
        comparable=now.prompts_sha256 == then.probe.prompts_sha256,
        fell=fall > _FELL * old.tokens_per_step and fall > _SURE * chance,
    )


def _measured(drafted: Sequence[Followed], plain: Sequence[Followed]) -> float:
    """Median over the texts of plain decoding's seconds per token over the draft's, prompts left out."""
    ratios = []
    for with_draft, without in zip(drafted, plain, strict=True):
        tokens = len(without.tokens) - 1
        if tokens > 0 and with_draft.tokens == without.tokens:
            ratios.append(sum(m.seconds for m in without.moments) / sum(m.seconds for m in with_draft.moments))
    if not ratios:
        raise ReportError("no text had two tokens or more: give longer ones, or more --max-tokens")
    return median(ratios)


def _texts_sha256(texts: Sequence[Text], max_tokens: int) -> str:
    stored = json.dumps([[text.workload, text.prompt, text.chat] for text in texts] + [max_tokens])
    return hashlib.sha256(stored.encode()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
