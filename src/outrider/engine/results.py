"""What the engine hands back: deltas while it runs, a result when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Delta", "FinishReason", "Origin", "Result", "Step", "TokenLogprobs", "Usage"]

# Who wrote a token: `drafted` = guessed and accepted; `corrected` = the target's own after a refused guess;
# `bonus` = the target's own after a draft that was accepted to its end; `plain` = no draft in that step.
Origin = Literal["drafted", "corrected", "bonus", "plain"]
# length: max_tokens or the context limit. error: in a delta only; `Engine.result` raises the error then.
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the target's unshaped logits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the target for one sequence."""

    drafted: int  # guesses in the tree
    depth: int  # longest path of the tree
    accepted: int  # guesses kept, before any cut by a stop
    drafter: str = "none"  # the method whose tree it was
    sources: tuple[str, ...] = ()  # who guessed each of the accepted: the method, one that it asked, or `grammar`
    asked: bool = False  # whether a drafter was asked: it may have had nothing that was worth checking


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int = 0  # drafted tokens that are part of the completion
    rejected_prediction_tokens: int = 0  # drafted tokens that are not
    cached_tokens: int = 0  # of the prompt, whose rows came from the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sequence. `text` may lag behind `tokens` (half a character, part of a stop string)."""

    id: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    step: Step | None = None  # None of a request that ended with an error
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first delta, if they were asked for


@dataclass(slots=True)
class Result:
    """A finished (or cancelled) sequence. All lists cut at the same index."""

    id: int
    prompt_tokens: list[int]
    tokens: list[int]
    origins: list[Origin]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or token id that ended it, if one did
    logprobs: list[TokenLogprobs] | None
    usage: Usage
    steps: list[Step]
    seed: int | None  # None where another server drew it, and did not say
    ttft: float  # seconds from admission to the first token
    seconds: float  # seconds from admission to the last token
    timings: dict[str, float] = field(default_factory=dict)  # seconds by phase: draft, forward, verify
    drafter_error: str | None = None  # why the drafter was given up, if it was; the text is the target's all the same
    drafter: str = "none"  # the method that guessed
    max_draft_tokens: int = 0  # guesses that a step might have
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # by token of the prompt; the first one has none

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per forward of the target: 1 + accepted / steps (vLLM's definition)."""
        return 1.0 + sum(s.accepted for s in self.steps) / len(self.steps) if self.steps else 1.0
