"""The default drafter: the text's own past and a head, each where it pays, both in one tree where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters import auto as module
from outrider.drafters.auto import Auto, AutoOptions
from outrider.drafters.base import DrafterError, Observation, Options, Request, Stateless
from rigs import engine

PASSAGE = list(range(10, 50))


@dataclass
class Head(Stateless):
    """Guesses what it was told to, and remembers who asked."""

    guesses: Sequence[int] = (90, 91, 92)
    chances: Sequence[float] = (0.9, 0.8, 0.7)
    asked: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    laws: bool = False
    name = "head"

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        self.asked += [request.id for request in batch]
        law = np.zeros(97)
        law[list(self.guesses[:1])] = 1.0
        return [
            Tree.chain(r.shaping.tokens[-1], self.guesses[:1], {0: law})
            if r.rejection
            else Tree.chain(r.shaping.tokens[-1], self.guesses, chances=self.chances)
            for r in batch
        ]

    def forget(self, sequence: int) -> None:
        self.gone.append(sequence)


def auto(monkeypatch: pytest.MonkeyPatch, head: Head | None, **options: Any) -> Auto:
    monkeypatch.setattr(module, "_head", lambda options, context: head)
    settings = {"row_cost": 0.02, **options}
    drafter: Any = engine(drafter="auto", drafter_options=settings)._drafter("auto")
    return drafter  # type: ignore[no-any-return]


def request(tokens: Sequence[int], id: int = 0, **changes: Any) -> Request:
    return Request(id, Shaping(SamplingParams(), 0, list(tokens), 1), 32, **changes)


def test_without_a_head_it_is_the_suffix_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same trees, and nothing where nothing matches."""
    drafter = auto(monkeypatch, None)
    options = {"row_cost": 0.02, "max_draft_tokens": 32, "min_probability": 0.03}
    suffix = engine(drafter="suffix", drafter_options=options)._drafter("suffix")
    for overlap in (0, 1, 4, 20):
        asked = request([*PASSAGE, 60, 61, *PASSAGE[:overlap]], id=overlap)
        assert drafter.propose([asked]) == suffix.propose([asked])


def test_the_head_is_asked_where_the_text_says_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """New text goes to the head, a long match does not; in a batch each request is judged alone."""
    head = Head()
    drafter = auto(monkeypatch, head)
    batch = [request([*PASSAGE, 60], id=1), request([*PASSAGE, 60, *PASSAGE[:25]], id=2)]
    new, copied = drafter.propose(batch)
    assert head.asked == [1]
    assert new.tokens[1:] == (90, 91, 92)
    assert copied.tokens[1:6] == tuple(PASSAGE[25:30])


def test_both_share_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short match and the head disagree: both stand in the tree, and what they agree on stands once."""
    head = Head(guesses=(13, 91, 92))
    tree = auto(monkeypatch, head).propose([request([*PASSAGE, 60, 12])])[0].check(97)
    assert [tree.tokens[n] for n in tree.children()[0]] == [13]
    assert {tree.tokens[n] for n in tree.children()[1]} == {14, 91}
    assert tree.chances is not None
    assert 0.9 < tree.chances[1] < 1
    assert all(tree.chances[n] <= tree.chances[tree.parents[n]] for n in range(1, len(tree)))


def write(drafter: Auto, tokens: list[int], steps: int, says: Sequence[int] = (), id: int = 0) -> None:
    """So many steps in which the text goes on with new tokens, or with what `says` says."""
    for step in range(steps):
        drafter.propose([request(tokens, id)])
        tokens += says or [70 + step * 7 % 11 if step % 2 else 81 + step * 5 % 13]


def test_a_head_is_judged_by_what_came_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sure of itself and always wrong, it is dropped within some tens of steps, and tried again now and then."""
    head = Head(guesses=(90, 91, 92), chances=(0.95, 0.9, 0.9))
    drafter = auto(monkeypatch, head)
    tokens = [*PASSAGE, 60]
    write(drafter, tokens, 60)
    early = len(head.asked)
    assert early < 50
    write(drafter, tokens, 400)
    assert early < len(head.asked) < early + 60
    assert drafter._beliefs.chance(module._Claims(None, 0.95)) < 0.5


def test_a_head_that_is_right_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims little and is always right: it is asked in every step, and believed more than it claims."""
    head = Head(guesses=(90, 91, 92), chances=(0.6, 0.5, 0.4))
    monkeypatch.setattr(Auto, "_HEAD_COST", 0.1)
    drafter = auto(monkeypatch, head)
    monkeypatch.setattr(
        drafter._suffix, "candidates", lambda request: module.Guesses([request.shaping.tokens[-1]], [-1], [1.0])
    )
    write(drafter, [*PASSAGE, 60], 100, says=(90, 91, 92))
    assert len(head.asked) == 100
    assert drafter._beliefs.chance(module._Claims(None, 0.6)) > 0.9


def test_each_text_is_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is right in one text and wrong in the other, and soon asked for the first alone."""
    head = Head(guesses=(90,), chances=(0.7,))
    drafter = auto(monkeypatch, head)
    monkeypatch.setattr(
        drafter._suffix, "candidates", lambda request: module.Guesses([request.shaping.tokens[-1]], [-1], [1.0])
    )
    drafter._steps.texts = 2
    right, wrong = [*PASSAGE, 60], [*PASSAGE, 61]
    for _ in range(200):
        drafter.propose([request(right, 1), request(wrong, 2)])
        right += [90, 5]
        wrong += [5]
    assert head.asked[-40:].count(1) > 30
    assert head.asked[-40:].count(2) < 5


def test_prompts_are_read_while_there_is_hope(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the head from the first text on, and while it rests too; no more once it has failed again and again."""
    head, seen = Head(), list[int]()
    monkeypatch.setattr(Head, "observe", lambda self, step: seen.extend(one.request.id for one in step))
    drafter = auto(monkeypatch, head)

    def read(id: int) -> None:
        prompt: Any = Observation(request([1, 2, 3], id=id), None, 0, 0, 3, None)  # type: ignore[arg-type]
        drafter.observe([prompt])

    read(4)
    tokens = [*PASSAGE, 60]
    write(drafter, tokens, 120)
    assert not drafter._paces.usual.on
    read(5)
    write(drafter, tokens, 2000)
    read(6)
    assert seen == [4, 5]


def test_drawn_guesses_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under rejection the head's law must cover all children of its node: nothing is mixed in."""
    head = Head()
    (tree,) = auto(monkeypatch, head).propose([request([*PASSAGE, 60, 12], rejection=True)])
    assert tree.tokens[1:] == (90,)
    assert set(tree.laws) == {0}


def test_sequences_are_forgotten_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for a text that is gone."""
    head = Head()
    drafter = auto(monkeypatch, head)
    drafter.propose([request([*PASSAGE, 60], id=5)])
    drafter.forget(5)
    assert head.gone == [5]
    assert drafter.memory() == {"automata": 0}


class _Unfit(Stateless):
    Options = Options

    def __init__(self, options: Any, context: Any) -> None:
        raise DrafterError("eagle: no head for this target")


def test_only_a_head_that_was_named_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for, it may be missing; named, its absence is an error."""
    monkeypatch.setattr(module, "_head_class", lambda options: (_Unfit, Options()))
    assert engine(drafter="auto")._drafter("auto").wants == ()
    with pytest.raises(DrafterError, match="no head for this target"):
        engine(drafter="auto", drafter_options={"head": "somewhere"})
    assert AutoOptions().head == ""
