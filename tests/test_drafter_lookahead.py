"""The lookahead drafter: its window earns its rows or goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider import Result
from rigs import accepted, engine, mix, prompts, rejected, said


def run(mixed: str = "greedy", prompt: list[int] | None = None, **options: Any) -> list[Result]:
    e = engine(drafter="lookahead", drafter_options=options)
    asked = prompts(4) if prompt is None else [prompt]
    return e.generate(asked, mix(mixed, 5, max_tokens=120, ignore_eos=True))


def guesses(results: list[Result]) -> int:
    return sum(step.drafted for r in results for step in r.steps)


def test_a_window_that_brings_nothing_goes() -> None:
    """At a high temperature the window's answers are never drawn: few guesses are left of it, and the text stands."""
    rng = np.random.default_rng(3)
    prompt = rng.permutation(np.arange(3, 97)).tolist()[:40]
    always, adaptive = (run("T 1.3, min-p", prompt, adaptive=choice) for choice in (False, True))
    assert [said(r) for r in adaptive] == [said(r) for r in always]
    assert rejected(always) > 0
    assert guesses(adaptive) < guesses(always) / 2


def test_a_window_that_earns_its_rows_stays() -> None:
    """Greedy texts of a tiny model run in circles: what was guessed is accepted."""
    got = run(adaptive=True)
    assert accepted(got) > 20
    assert [said(r) for r in got] == [said(r) for r in run(adaptive=False)]


def test_only_what_the_window_found_counts_for_it() -> None:
    """The n-grams of the text are in the pool without a window: nothing is credited to it for them."""
    drafter: Any = engine(drafter="lookahead", drafter_options={"ngram": 3})._drafter("lookahead")
    from outrider.core.shaping import Shaping
    from outrider.drafters.base import Request

    text = [5, 6, 7, 8, 5, 6, 7, 8, 5]
    drafter.propose([Request(0, Shaping(mix("greedy", 0), 0, text, 1), 20)])
    window = drafter._windows[0]
    assert window.hung > 0
    assert window.places
    assert not window.born
    window.born.add((8, 5, 6))
    text.append(6)
    drafter.propose([Request(0, Shaping(mix("greedy", 0), 0, text, 1), 20)])
    assert not window.born
