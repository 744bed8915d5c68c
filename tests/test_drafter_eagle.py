"""The EAGLE drafter: its head sees every committed token with the target's states, whatever happens to the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads import eagle3, head_folder
from outrider import Engine
from outrider.core.cache import Rows
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.base import DrafterError, Observation, Request
from outrider.models.shipped import find_shipped
from outrider.runtime.growth import Sprout
from rigs import MIXES, Rig, accepted, engine, files, loaded, mix, prompts, rejected, said

NATIVE = Rig(runner="native", cache_tokens=2048)


def eagle(rig: Rig = NATIVE, options: dict[str, Any] | None = None, **settings: Any) -> Engine:
    given = {"head": str(head_folder()), "max_draft_tokens": 10, "depth": 4, "width": 3, **(options or {})}
    return engine(rig, drafter="eagle", drafter_options=given, **settings)


class Spy:
    """Notes what a head is fed: position of each committed row -> its token and states."""

    def __init__(self, grower: Any) -> None:
        self._grower, self.pages, self.fed = grower, grower.pages, {}

    def grow(self, batch: list[Sprout], plan: Any) -> Any:
        for sprout in batch:
            assert sprout.states is not None
            for i, (token, state) in enumerate(zip(sprout.pending, sprout.states, strict=True)):
                self.fed[sprout.rows.length + i] = (token, state)
        return self._grower.grow(batch, plan)


@pytest.mark.parametrize("chunk", [5, 512])
def test_the_head_is_fed_every_token_with_the_states_before_it(chunk: int) -> None:
    """Prompt chunks, accepted guesses, closing tokens: row r holds token r + 1 and the target's states at r."""
    speculative = eagle(prefill_chunk=chunk, batch_size=1)
    drafter: Any = speculative._drafter("eagle")
    spy = drafter._head = Spy(drafter._head)
    (result,) = speculative.generate([prompts(4)[3]], mix("T 0.7", 3, max_tokens=30))
    text = result.prompt_tokens + result.tokens
    assert accepted([result]) > 0
    assert rejected([result]) > 0
    assert set(spy.fed) >= set(range(len(text) - 8))
    plain = loaded(files(), NATIVE).runner
    rows = Rows(plain.pages)
    rows.reserve(len(text))
    from outrider.runtime.runner import Feed

    states = plain.forward([Feed(rows, text)], drafter.wants).hidden(0)
    for row, (token, state) in spy.fed.items():
        assert token == text[row + 1]
        assert np.array_equal(state, states[row].reshape(-1))


@pytest.mark.parametrize("name", ["greedy", "greedy, penalised", "T 0.7", "T 1.3, all of them"])
def test_texts_are_those_of_plain_decoding(name: str) -> None:
    """Batches, chunks and preemption on the native runner; the head's cache is empty afterwards."""
    plain = engine(NATIVE).generate(prompts(4), mix(name, 4, max_tokens=30))
    for rig in (NATIVE, replace(NATIVE, page_size=4, cache_tokens=112)):
        speculative = eagle(rig, batch_size=4, prefill_chunk=16)
        got = speculative.generate(prompts(4), mix(name, 4, max_tokens=30))
        assert [said(r) for r in got] == [said(r) for r in plain]
        assert accepted(got) > 0
        pages = speculative._drafter("eagle")._head.pages  # type: ignore[attr-defined]
        pages.check_integrity()
        assert pages.free == pages.count


def test_rejection_writes_texts_and_carries_laws() -> None:
    speculative = eagle(verify="rejection")
    got = speculative.generate(prompts(3), mix("T 0.7", 4, max_tokens=30))
    assert accepted(got) > 0
    assert all(len(r.tokens) == r.usage.completion_tokens for r in got)


def test_a_full_cache_of_the_head_guesses_nothing_and_harms_nothing() -> None:
    speculative = eagle(Rig(runner="native", cache_tokens=512, page_size=16), batch_size=1)
    drafter: Any = speculative._drafter("eagle")
    held = [drafter._head.pages.take() for _ in range(drafter._head.pages.free)]
    plain = engine(NATIVE).generate(prompts(2), mix("greedy", 1, max_tokens=12))
    got = speculative.generate(prompts(2), mix("greedy", 1, max_tokens=12))
    assert [said(r) for r in got] == [said(r) for r in plain]
    assert sum(step.drafted for r in got for step in r.steps) == 0
    for page in held:
        drafter._head.pages.give(page)


def test_a_repeated_proposal_is_the_same() -> None:
    """A step that failed is run again: the head may be asked twice for one text, and says the same."""
    speculative = eagle(batch_size=1)
    stream = speculative.stream(prompts(3)[2], mix("greedy", 1, max_tokens=20))
    for _ in range(4):
        next(stream)
    active = next(iter(speculative._active.values()))
    active.request.budget = 8
    drafter = speculative._drafter("eagle")
    first, second = (drafter.propose([active.request])[0] for _ in range(2))
    assert first == second
    assert first.guesses > 0
    stream.close()


def test_a_text_whose_beginning_was_never_seen_is_drafted_for(tmp_path: Path) -> None:
    """Rows from a shared prefix come without states: the head begins behind them, and distances are all it knows."""
    speculative = eagle(batch_size=1)
    drafter: Any = speculative._drafter("eagle")
    tokens = prompts(4)[3]
    states = np.random.default_rng(0).standard_normal((len(tokens) - 1, 3 * files().config.hidden), np.float32)
    trees = []
    for cut in (0, 6):
        from outrider.drafters.eagle import _Text

        shaping = Shaping(replace(MIXES["greedy"], seed=1), 1, tokens, 4)
        drafter._texts[7] = _Text(Rows(drafter._head.pages), cut, cut, [states[cut:]], len(tokens) - 1)
        trees += drafter.propose([Request(7, shaping, 8)])
        drafter.forget(7)
    assert all(tree.guesses > 0 for tree in trees)
    assert trees[0] != trees[1]


@dataclass
class Seen:
    """A target that has said nothing but states."""

    states: Any  # [n, W, D]

    def hidden(self, feed: int) -> Any:
        return self.states


def test_steps_that_nobody_looked_at_are_left_out() -> None:
    """The prompt stays, fed before or not, what follows stands right behind it, and nobody shares that."""
    drafter: Any = eagle(batch_size=1)._drafter("eagle")
    spy = drafter._head = Spy(drafter._head)
    rng = np.random.default_rng(0)
    states = rng.standard_normal((120, len(drafter.wants), files().config.hidden), np.float32)
    tokens = [int(token) for token in rng.integers(5, 90, 121)]

    def look(start: int, end: int) -> Request:
        request = Request(3, Shaping(MIXES["greedy"], 1, tokens[: end + 1], 60), 8)
        scores: Any = Seen(states[start:end])
        root = Tree.root(tokens[end])
        drafter.observe([Observation(request, scores, 0, start, end - start, root, columns=(0, 1, 2))])
        return request

    look(0, 40)
    look(60, 61)
    assert drafter.propose([look(61, 62)])[0].guesses > 0
    drafter.propose([look(90, 110)])
    seen = [*range(40), 60, 61, *range(90, 110)]
    assert [spy.fed[row][0] for row in range(len(seen))] == [tokens[row + 1] for row in seen]
    assert all(np.array_equal(spy.fed[row][1], states[at].reshape(-1)) for row, at in enumerate(seen))
    assert drafter._texts[3].rows.length == len(seen)
    drafter.forget(3)
    pages = drafter._head.pages
    assert pages.free == pages.count
    whole = Request(4, Shaping(MIXES["greedy"], 1, tokens, 60), 8)
    assert len(drafter._known(whole, 120)) == 40 // pages.page_size > 0


def test_a_head_of_another_target_warns_with_both_hashes(tmp_path: Path) -> None:
    eagle3(tmp_path, files(), target_sha256="ab" * 32)
    with pytest.warns(RuntimeWarning, match=f"{'ab' * 32}.*{files().sha256()}"):
        eagle(options={"head": str(tmp_path)})


def test_heads_are_found_by_the_target_that_they_were_made_for(tmp_path: Path) -> None:
    eagle3(tmp_path / "one", files(), target_sha256="ab" * 32)
    assert find_shipped("eagle", "ab" * 32, tmp_path) == tmp_path / "one"
    assert find_shipped("eagle", "cd" * 32, tmp_path) is None
    assert find_shipped("medusa", "ab" * 32, tmp_path) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": ""}, "no head comes with the package"),
        ({"head": "/nowhere"}, "is no folder"),
        ({"width": 0}, "width and depth"),
        ({"min_reach": 1.0}, "min_confidence and min_reach"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        eagle(options=options)


@pytest.mark.parametrize("rig", [NATIVE, Rig()])
def test_memory_is_told_before(rig: Rig) -> None:
    speculative = eagle(rig)
    told, held = speculative.forecast("eagle"), speculative._drafter("eagle").memory()
    for purpose in ("head weights", "head cache"):
        assert told[purpose] == pytest.approx(held[purpose], rel=0.05)
