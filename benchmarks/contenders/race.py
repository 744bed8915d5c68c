"""Who measures what, in which order: contenders take turns on each prompt, so that drift favours none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from contenders.base import Absent, Generation

__all__ = ["Plan", "Race", "Runner", "Task", "race"]


class Runner(Protocol):
    """What the race asks of a contender."""

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation: ...

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]: ...


@dataclass(frozen=True, slots=True)
class Task:
    category: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. An empty part is left out."""

    tasks: Sequence[Task]
    new_tokens: int
    repeats: int
    prefills: Sequence[Sequence[int]] = ()  # prompts of one length that differ from their first token on
    step_context: Sequence[int] = ()
    step_rows: Sequence[int] = ()
    step_rounds: int = 4
    step_repeats: int = 5  # within a round
    pause: float = 0.02  # seconds, in which the threads of the last contender fall asleep


@dataclass(slots=True)
class Race:
    """Everything measured, by contender. `out` says who dropped out, and why."""

    generations: dict[str, dict[int, list[Generation]]] = field(default_factory=dict)  # task number -> repeats
    prefills: dict[str, list[float]] = field(default_factory=dict)  # seconds to the first token
    steps: dict[str, dict[int, list[float]]] = field(default_factory=dict)  # rows -> milliseconds
    no_steps: dict[str, str] = field(default_factory=dict)  # contenders that cannot be asked for a step, and why
    out: dict[str, str] = field(default_factory=dict)


def race(runners: Mapping[str, Runner], plan: Plan, progress: Callable[[str], None] = lambda _: None) -> Race:
    """Warm up every contender, then measure. One that fails is dropped with everything that was measured of it."""
    done = Race()
    names = list(runners)

    def turn(number: int, call: Callable[[str], None]) -> None:
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            if name in done.out:
                continue
            time.sleep(plan.pause)
            try:
                call(name)
            except Absent as reason:
                done.out[name] = str(reason)
                for measured in (done.generations, done.prefills, done.steps, done.no_steps):
                    measured.pop(name, None)

    def generate(task: int) -> Callable[[str], None]:
        def call(name: str) -> None:
            made = runners[name].generate(plan.tasks[task].prompt, plan.new_tokens)
            if len(made.tokens) != plan.new_tokens:
                raise Absent(f"wrote {len(made.tokens)} tokens where {plan.new_tokens} were asked for")
            done.generations.setdefault(name, {}).setdefault(task, []).append(made)

        return call

    def prefill(prompt: Sequence[int]) -> Callable[[str], None]:
        def call(name: str) -> None:
            done.prefills.setdefault(name, []).append(runners[name].generate(prompt, 2).ttft)

        return call

    def step(name: str) -> None:
        if name in done.no_steps:
            return
        try:
            times = runners[name].step_times(plan.step_context, plan.step_rows, plan.step_repeats)
        except Absent as reason:
            done.no_steps[name] = str(reason)
            return
        for rows, values in times.items():
            done.steps.setdefault(name, {}).setdefault(rows, []).extend(values)

    if not names:
        return done
    progress("warm-up")
    turn(0, lambda name: _warm(runners[name], plan))
    for number, prompt in enumerate(plan.prefills):
        progress(f"prefill {number + 1} of {len(plan.prefills)}")
        turn(number, prefill(prompt))
    if plan.step_rows:
        for number in range(plan.step_rounds):
            progress(f"steps by rows, round {number + 1} of {plan.step_rounds}")
            turn(number, step)
    for repeat in range(plan.repeats):
        for task in range(len(plan.tasks)):
            progress(f"round {repeat + 1} of {plan.repeats}, prompt {task + 1} of {len(plan.tasks)}")
            turn(repeat + task, generate(task))
    return done


def _warm(runner: Runner, plan: Plan) -> None:
    """A short answer to the first prompt, and one to the longest."""
    prompts = [task.prompt for task in plan.tasks] or list(plan.prefills) or [plan.step_context]
    runner.generate(prompts[0], 16)
    runner.generate(max(prompts, key=len), 4)
