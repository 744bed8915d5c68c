"""Medusa heads: the right state goes in, the right tokens come out, natively as in numpy, exact under both rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads import medusa, medusa_folder
from outrider import Engine
from outrider.core.shaping import Shaping
from outrider.drafters.base import DrafterError, Observation, Request
from outrider.kernels.reference_heads import medusa_logits
from outrider.runtime.medusa import MedusaHeads
from rigs import Rig, accepted, engine, files, loaded, mix, prompts, rejected, said

RIGS = [Rig(), Rig(runner="native", dtype="fp32"), Rig(runner="native", dtype="int8")]


def drafted(rig: Rig = RIGS[0], folder: Path | None = None, **settings: Any) -> Engine:
    options = {"head": str(folder or medusa_folder()), "min_confidence": 0.001}
    return engine(rig, drafter="medusa", drafter_options=options, **settings)


@pytest.mark.parametrize("mixed", ["greedy", "T 0.7, top-p, penalties", "T 1.3, all of them"])
@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
def test_the_text_is_that_of_plain_decoding(rig: Rig, mixed: str) -> None:
    """Random heads are refused nearly always and change nothing, in batches and chunks."""
    got = drafted(rig, batch_size=3, prefill_chunk=9).generate(prompts(4), mix(mixed, 3, max_tokens=40))
    plain = engine(rig, batch_size=1).generate(prompts(4), mix(mixed, 3, max_tokens=40))
    assert [said(r) for r in got] == [said(r) for r in plain]
    assert rejected(got) > 20


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_fast_heads_agree_with_the_plain_ones(tmp_path: Path, shared: bool, blocks: int) -> None:
    """All three: the oracle in float64, numpy, and packed fp32 weights; a row does not depend on its neighbours."""
    heads = medusa(tmp_path, files(), shared_head=shared, blocks=blocks)
    states = np.random.default_rng(0).standard_normal((5, files().config.hidden)).astype(np.float32)
    exact = {name: tensor.float32().astype(np.float64) for name, tensor in heads.tensors.items()}
    want = np.stack([medusa_logits(exact, 3, blocks, state.astype(np.float64)) for state in states], axis=1)
    for rig in RIGS[:2]:
        made = MedusaHeads(heads, loaded(files(), rig).runner, "fp32")
        got = made.logits(states)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(got[:, 2:3], made.logits(states[2:3]))


def test_guesses_come_from_the_state_that_wrote_the_last_token() -> None:
    """The root's children are the first head's best tokens for the last accepted node's state."""
    e = drafted()
    drafter: Any = e._drafter("medusa")
    seen: list[tuple[Request, np.ndarray, int]] = []
    honest_observe, honest_propose = drafter.observe, drafter.propose

    def observe(step: list[Observation]) -> None:
        for one in step:
            if one.tree is not None:
                row = one.pending - 1 + (one.path[-1] if one.path else 0)
                seen.append((one.request, one.scores.hidden(one.feed)[row, 0].copy(), len(one.request.shaping.tokens)))
        honest_observe(step)

    checked = 0

    def propose(batch: list[Request]) -> Any:
        nonlocal checked
        trees = honest_propose(batch)
        for request, tree in zip(batch, trees, strict=True):
            _, state, length = next(one for one in reversed(seen) if one[0].id == request.id)
            assert length == len(request.shaping.tokens)
            logits = drafter._heads.logits(state[None])[0, 0]
            best = drafter._heads._known[np.argsort(-logits, kind="stable")]
            children = [tree.tokens[n] for n in tree.children()[0]]
            assert children == best[: len(children)].tolist()
            checked += len(children) > 0
        return trees

    drafter.observe, drafter.propose = observe, propose
    e.generate(prompts(4), mix("greedy", 1, max_tokens=20, repetition_penalty=1.0))
    assert checked > 20


def test_a_head_that_knows_the_target_is_accepted() -> None:
    """Heads whose blocks do nothing and whose projection is the target's guess the last token again: in a text of one
    token repeated they are right, all levels of them."""
    e = drafted()
    drafter: Any = e._drafter("medusa")
    vocabulary = files().config.vocabulary

    def logits(states: np.ndarray) -> np.ndarray:
        out = np.full((3, len(states), len(drafter._heads._known)), -5.0, np.float32)
        out[:, :, int(np.flatnonzero(drafter._heads._known == favourite)[0])] = 5.0
        return out

    favourite = int(drafter._heads._known[7])
    assert favourite < vocabulary
    drafter._heads.logits = logits
    (result,) = e.generate([[5, 6]], mix("greedy", 0, max_tokens=30, logit_bias={favourite: 100.0}, ignore_eos=True))
    assert set(result.tokens) == {favourite}
    assert accepted([result]) > 20
    assert max(step.accepted for step in result.steps) == 3


def test_nothing_is_guessed_without_the_state() -> None:
    """A sequence that the heads have not seen, or whose text has moved on, gets the root."""
    drafter: Any = drafted()._drafter("medusa")
    shaping = Shaping(mix("greedy", 0), 0, [1, 2, 3], 2)
    (tree,) = drafter.propose([Request(5, shaping, 8)])
    assert tree.guesses == 0
    drafter._states[5] = 2, np.zeros(files().config.hidden, np.float32)
    assert drafter.propose([Request(5, shaping, 8)])[0].guesses == 0
    drafter._states[5] = 3, np.zeros(files().config.hidden, np.float32)
    assert drafter.propose([Request(5, shaping, 8)])[0].guesses > 0
    drafter.forget(5)
    assert drafter.memory()["states"] == 0


@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
def test_memory_is_told_beforehand(rig: Rig) -> None:
    """Within 5 % of what it then holds."""
    e = drafted(rig)
    told, held = e.forecast("medusa"), e._drafter("medusa").memory()
    assert sum(told.values()) == pytest.approx(sum(held.values()), rel=0.05)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """No heads for the target, an EAGLE head, no head at all: each with the way out."""
    from heads import head_folder

    with pytest.raises(DrafterError, match=r"medusa: no heads come with the package .* head=FOLDER"):
        engine(drafter="medusa")
    with pytest.raises(DrafterError, match="holds an EAGLE head: use --drafter eagle"):
        drafted(folder=head_folder())
    with pytest.raises(DrafterError, match="medusa: "):
        drafted(folder=tmp_path)
