"""Changes of mode: told once, kept, counted, and no listener can take a text down."""

from __future__ import annotations

import json
import logging

import pytest

from outrider.engine.transitions import Figures, Transition, Transitions
from rigs import engine, mix, prompts, said


def test_a_change_is_told_kept_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """With its figures; a change to the mode that stands is none."""
    transitions, told = Transitions(clock=lambda: 12.5), list[Transition]()
    end = transitions.watch(told.append)
    transitions.begin("x", "speculative")
    figures = Figures(0.91234, 0.25, 91.0, 100.0)
    with caplog.at_level(logging.INFO, "outrider.engine"):
        transitions.change("x", "speculative", "pays again", 3, 1, figures)
        transitions.change("x", "plain", "does not pay", 7, 2, figures)
    end()
    transitions.change("x", "speculative", "pays again", 90, 2, Figures())
    assert told == [Transition(12.5, 7, "x", "speculative", "plain", "does not pay", 2, 0.91234, 0.25, 91.0, 100.0)]
    assert transitions.recent[0] == told[0]
    assert transitions.modes == {"x": "speculative"}
    assert transitions.counts == {("x", "plain", "does not pay"): 1, ("x", "speculative", "pays again"): 1}
    (record,) = caplog.records
    assert record.getMessage() == "drafter x: speculative -> plain"
    assert record.__dict__["fields"] == told[0].as_dict()
    assert json.loads(json.dumps(told[0].as_dict()))["speedup"] == 0.9123


def test_the_latest_are_kept() -> None:
    """A bounded list, the counts are of all."""
    transitions = Transitions()
    for step in range(5000):
        transitions.change("x", "speculative" if step % 2 else "plain", "load", step, 1, Figures())
    assert [t.step for t in transitions.recent] == list(range(5000 - 4096, 5000))
    assert len(transitions.recent) == 4096
    assert sum(transitions.counts.values()) == 5000


def test_a_listener_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter fails, a listener fails over that: the text is plain decoding's, and the next listener is told."""
    e, told = engine(drafter="ngram"), list[Transition]()

    def fails(transition: Transition) -> None:
        raise RuntimeError("no")

    e.watch(fails)
    e.watch(told.append)
    drafter = e._drafter("ngram")
    monkeypatch.setattr(type(drafter), "propose", lambda self, batch: 1 / 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        got = e.generate(prompts(2), mix("greedy", 1))
    assert [said(r) for r in got] == [said(r) for r in engine().generate(prompts(2), mix("greedy", 1))]
    assert [(t.drafter, t.after, t.reason) for t in told] == [("ngram", "plain", "drafter failed")]
    assert e.transitions == tuple(told)
    assert e.modes["ngram"] == "plain"
