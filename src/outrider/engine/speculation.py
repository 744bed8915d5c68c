"""How one request is drafted for: never what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from outrider.core.params import ParameterError

__all__ = ["Speculation", "Verify"]

Verify = Literal["match", "rejection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Per-request choice; None leaves it to the engine."""

    drafter: str | None = None
    max_draft_tokens: int | None = None  # per step; never more than the drafter's own limit
    verify: Verify | None = None
    enabled: bool = True
    prediction: str | Sequence[int] | None = None  # the expected output (OpenAI's predicted outputs), for `prediction`

    def __post_init__(self) -> None:
        if self.verify is not None and self.verify not in get_args(Verify):
            raise ParameterError("verify", f"{self.verify!r} is neither 'match' nor 'rejection'")
        n = self.max_draft_tokens
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= 4096):
            raise ParameterError("max_draft_tokens", f"{n!r} is not a whole number in [0, 4,096]")
        if not isinstance(self.enabled, bool):
            raise ParameterError("enabled", f"{self.enabled!r} is neither true nor false")
        expected = self.prediction
        if expected is not None and not isinstance(expected, str):
            if not isinstance(expected, Sequence) or any(
                isinstance(t, bool) or not isinstance(t, int) for t in expected
            ):
                raise ParameterError("prediction", f"{expected!r} is neither a text nor a list of token ids")
            object.__setattr__(self, "prediction", tuple(expected))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Speculation:
        """From JSON; an unknown name is refused."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ParameterError(name, f"unknown speculation option; known are {', '.join(known)}")
        return cls(**values)
