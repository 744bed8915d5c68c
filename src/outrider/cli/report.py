"""A result as JSON and as one line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outrider.engine.results import Result

__all__ = ["result_json", "summary", "tokens_per_second"]


def tokens_per_second(result: Result) -> float:
    """Tokens written per second, from admission to the last one."""
    return len(result.tokens) / result.seconds if result.seconds > 0 else 0.0


def summary(result: Result) -> str:
    """How much, how fast, and what speculation did."""
    parts = [f"{len(result.tokens)} tokens", f"{tokens_per_second(result):.1f} tokens/s"]
    if any(step.drafted for step in result.steps):
        parts.append(f"acceptance length {result.mean_acceptance_length:.2f}")
    return ", ".join([*parts, f"first token after {1000 * result.ttft:.0f} ms"])


def result_json(result: Result, **context: Any) -> dict[str, Any]:
    """Everything about a result, for `--json`. Times in milliseconds; `accepted` has one entry per step."""
    return {
        **context,
        "text": result.text,
        "tokens": result.tokens,
        "origins": result.origins,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "accepted": [step.accepted for step in result.steps],
        "steps": [asdict(step) for step in result.steps],
        "mean_acceptance_length": result.mean_acceptance_length,
        "drafter_error": result.drafter_error,
        "logprobs": None if result.logprobs is None else [asdict(entry) for entry in result.logprobs],
        "timings": {
            "ttft_ms": 1000 * result.ttft,
            "total_ms": 1000 * result.seconds,
            "tokens_per_second": tokens_per_second(result),
            "phases_ms": {phase: 1000 * seconds for phase, seconds in result.timings.items()},
        },
    }
