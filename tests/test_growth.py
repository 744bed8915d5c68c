"""Trees grown by one native call are those that the plain way grows by whole forwards, and no row knows its batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heads import eagle3
from outrider.core.cache import Rows
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.models.heads import Eagle, read_head
from outrider.runtime.growth import Grower, Plan, Sprout
from rigs import MIXES, Rig, draft_files, files, loaded, prompts
from test_heads_formats import LAYOUTS
from tiny import tiny_model

NATIVE = Rig(runner="native")
PLANS = [Plan(97), Plan(97, width=3), Plan(97, width=4, least=0.02, reach=0.2)]


def shaping(tokens: list[int], mix: str, seed: int = 5) -> Shaping:
    return Shaping(replace(MIXES[mix], seed=seed), seed, tokens, max(1, len(tokens) - 4))


def sprout(
    grower: Grower, tokens: list[int], mix: str, plan: Plan, states: np.ndarray | None, **settings: object
) -> Sprout:
    """All rows of a text from the first on; a head's row stands for the token behind it."""
    rows = Rows(grower.pages)
    made = Sprout(
        rows, tokens if states is None else tokens[1:], shaping(tokens, mix), 12, 4, states=states, **settings
    )  # type: ignore[arg-type]
    rows.reserve(len(made.pending) + plan.rows(made.guesses, made.depth))
    return made


def texts(head: bool, count: int = 3) -> list[tuple[list[int], np.ndarray | None]]:
    rng = np.random.default_rng(3)
    return [
        (t, rng.standard_normal((len(t) - 1, 3 * files().config.hidden), np.float32) if head else None)
        for t in prompts(count)
    ]


def close(a: list[Tree], b: list[Tree]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.tokens, x.parents) == (y.tokens, y.parents)
        assert (x.chances is None) == (y.chances is None)
        if x.chances is not None and y.chances is not None:
            np.testing.assert_allclose(x.chances, y.chances, atol=1e-4)
        assert x.laws.keys() == y.laws.keys()
        for node, law in x.laws.items():
            np.testing.assert_allclose(law, y.laws[node], atol=1e-5)


def growers(kind: str, folder: Path) -> tuple[Grower, Grower]:
    """A native one and the reference."""
    made = []
    for rig in (NATIVE, Rig()):
        if kind == "draft":
            made.append(loaded(draft_files(), rig).runner)
        else:
            head = eagle3(
                folder, files(), norm_before_fc=kind == "eagle normed", norm_before_residual=kind == "eagle normed"
            )
            made.append(loaded(files(), rig).runner.eagle(head, files()))
    return made[0], made[1]


@pytest.mark.parametrize("kind", ["draft", "eagle", "eagle normed"])
@pytest.mark.parametrize("mix", ["greedy", "greedy, penalised", "T 0.7", "T 1.3, all of them"])
@pytest.mark.parametrize("rejection", [False, True])
def test_native_trees_are_the_reference_ones(kind: str, mix: str, rejection: bool, tmp_path: Path) -> None:
    """Tokens, parents, chances and laws of several texts at once."""
    native, reference = growers(kind, tmp_path)
    for plan in PLANS:
        grown = []
        for grower in (native, reference):
            batch = [
                sprout(grower, tokens, mix, plan, states, rejection=rejection)
                for tokens, states in texts(kind != "draft")
            ]
            grown.append(grower.grow(batch, plan))
            for one in batch:
                one.rows.release()
        close(*grown)
        assert all(0 < tree.guesses <= 12 for tree in grown[0])
        point = rejection and mix.startswith("greedy")  # a law of one token has one child
        assert plan.width == 1 or point or any(len(set(tree.parents)) < len(tree) for tree in grown[0])
        for tree in grown[0]:
            tree.check(97)


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_batches_and_chunks_change_no_bit(kind: str, tmp_path: Path) -> None:
    """A text alone, beside others, fed at once or in pieces: the same tree and the same chances."""
    native, _ = growers(kind, tmp_path)
    plan = PLANS[1]
    given = texts(kind != "draft")
    batch = [sprout(native, tokens, "T 0.7", plan, states) for tokens, states in given]
    together = native.grow(batch, plan)
    for (tokens, states), expected in zip(given, together, strict=True):
        whole = sprout(native, tokens, "T 0.7", plan, states)
        pending = whole.pending
        for start in range(0, len(pending) - 1, 5):
            end = min(start + 5, len(pending) - 1)
            part = None if states is None else states[start:end]
            (nothing,) = native.grow([replace(whole, pending=pending[start:end], guesses=0, states=part)], plan)
            assert nothing.guesses == 0
            whole.rows.commit(end - start)
        last = replace(whole, pending=pending[-1:], states=None if states is None else states[-1:])
        (alone,) = native.grow([last], plan)
        assert alone == expected


def test_some_layers_on_the_texts_own_rows() -> None:
    """Growing from some of a model's layers reads the committed rows and harms none: the next forward is as before."""
    from outrider.runtime.runner import Feed

    for rig in (NATIVE, Rig()):
        runner = loaded(files(), rig).runner
        tokens = prompts(2)[1]
        rows = Rows(runner.pages)
        rows.reserve(len(tokens) + 40)
        runner.forward([Feed(rows, tokens[:-1])])
        rows.commit(len(tokens) - 1)
        plain = runner.forward([Feed(rows, tokens[-1:], Tree.root(tokens[-1]))]).logits(0, 0).copy()
        trees = [
            runner.grow([Sprout(rows, tokens[-1:], shaping(tokens, "greedy"), 8, 3)], Plan(97, width=2, layers=layers))
            for layers in ((0,), ())
        ]
        assert trees[0] != trees[1]
        again = runner.forward([Feed(rows, tokens[-1:], Tree.root(tokens[-1]))]).logits(0, 0)
        assert np.array_equal(plain, again)
        if rig is NATIVE:
            first = trees[0]
    close(first, trees[0])


@pytest.mark.parametrize(
    "layout", ["SafeAILab EAGLE-1", "SafeAILab EAGLE-3", "speculators EAGLE-3", "speculators EAGLE-1"]
)
def test_heads_of_every_published_layout_grow_alike(layout: str, tmp_path: Path) -> None:
    """EAGLE-1 reads the final state and shares the target's head; EAGLE-3 has its own. Native is as the reference."""
    target = tiny_model(layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)
    head = read_head(LAYOUTS[layout][0](tmp_path / "head"), target.config)
    assert isinstance(head, Eagle)
    plan, grown = Plan(97, width=3), []
    tokens = np.random.default_rng(2).permutation(20).tolist()
    states = np.random.default_rng(3).standard_normal((19, len(head.config.wants) * 64), np.float32)
    for rig in (NATIVE, Rig()):
        grower = loaded(target, rig).runner.eagle(head, target)
        grown.append(grower.grow([sprout(grower, tokens, "greedy", plan, states)], plan))
        if rig is NATIVE:
            told = loaded(target, rig).runner.eagle_bytes(head)
            assert told["weights"] == grower.memory()["weights"]
    close(*grown)
    assert grown[0][0].guesses > 4
