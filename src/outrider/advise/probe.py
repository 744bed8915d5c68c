"""Lets a method guess on texts and counts what came of it; each step's seconds stand beside, for those who want them.

Texts run one after the other at temperature 0. Plain decoding would write the same: only the guesses count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.advise.prompts import Text
from outrider.core.params import SamplingParams
from outrider.engine.profile import Counts
from outrider.engine.speculation import Speculation

if TYPE_CHECKING:
    from outrider.engine.engine import Engine, Prompt

__all__ = ["Followed", "Moment", "follow", "tokens_of"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one text."""

    seconds: float  # of all of it
    forward: float  # of the target's forward in it
    guesses: int  # that were checked
    asked: bool  # whether the method was asked for guesses


@dataclass(slots=True)
class Followed:
    """One text under one method."""

    workload: str
    prompt_tokens: int
    tokens: list[int]
    prompt_seconds: float  # until the first token
    prompt_forward: float
    moments: list[Moment] = field(default_factory=list)  # of the steps behind it
    counts: Counts = field(default_factory=Counts)
    error: str | None = None  # why the drafter was given up, if it was


def follow(
    engine: Engine,
    method: str,
    texts: Sequence[Text],
    *,
    max_tokens: int,
    limit: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> list[Followed]:
    """Write an answer to each text with the method's guesses, at most `limit` a step, one text at a time."""
    out = []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for text in texts:
        out.append(_one(engine, text, params, Speculation(drafter=method, max_draft_tokens=limit), clock))
        progress()
    return out


def _one(
    engine: Engine, text: Text, params: SamplingParams, speculation: Speculation, clock: Callable[[], float]
) -> Followed:
    prompt = tokens_of(engine, text)
    request = engine.add(prompt, params, speculation)
    found = Followed(text.workload, len(prompt), [], 0.0, 0.0)
    found.counts.prompt_tokens.append(len(prompt))
    while request in engine.running or engine.waiting:
        began, before = clock(), engine.seconds["forward"]
        deltas = engine.step()
        seconds, forward = clock() - began, engine.seconds["forward"] - before
        step = deltas[0].step if deltas else None
        if not found.tokens:
            found.prompt_seconds += seconds
            found.prompt_forward += forward
        elif step is not None:
            found.moments.append(Moment(seconds, forward, step.drafted, step.asked))
            found.counts.saw(step.drafted, step.depth, step.accepted, asked=step.asked)
        for delta in deltas:
            found.tokens += delta.tokens
    found.error = engine.result(request).drafter_error
    return found


def tokens_of(engine: Engine, text: Text) -> list[int]:
    """The prompt's token ids, in the model's chat template where it has one and the text wants it."""
    prompt: Prompt = text.prompt
    if isinstance(prompt, str) and text.chat and engine.tokenizer.template is not None:
        prompt = [{"role": "user", "content": prompt}]
    return engine.encode(prompt)
