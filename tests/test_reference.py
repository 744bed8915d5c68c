"""The reference runner: a row depends on its own text only, bit for bit, and its arithmetic is right.

Against another implementation it is held in test_oracle_transformers.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from outrider.core.cache import Rows
from outrider.core.tree import Tree
from outrider.kernels.reference import attention, linear, rms_norm, rotate, swiglu
from outrider.models.config import RopeScaling
from outrider.models.load import ModelFiles
from outrider.models.rotary import inverse_frequencies
from outrider.runtime.reference import ReferenceRunner
from outrider.runtime.runner import Feed, Runner, Scores

Logits = NDArray[np.float32]

TEXT = [random.Random(7).randrange(3, 90) for _ in range(45)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def files(request: pytest.FixtureRequest) -> ModelFiles:
    """A tiny random model of each shape: plain, with biases and tied embeddings, with q/k norms."""
    return tiny.tiny_model(family=request.param)


def make(files: ModelFiles, page_size: int = 16, dtype: str = "fp32") -> ReferenceRunner:
    return ReferenceRunner(files, dtype, cache_tokens=512, page_size=page_size)


def feed(runner: Runner, rows: Rows, pending: Sequence[int], tree: Tree | None = None) -> Scores:
    """One forward of one sequence, its rows reserved."""
    rows.reserve(len(pending) + (tree.guesses if tree else 0))
    return runner.forward([Feed(rows, pending, tree)])


def plain(files: ModelFiles, tokens: Sequence[int], dtype: str = "fp32") -> list[Logits]:
    """Logits after each token, fed one by one: plain decoding, alone on the machine."""
    runner = make(files, dtype=dtype)
    rows = Rows(runner.pages)
    out = []
    for token in tokens:
        out.append(feed(runner, rows, [token], Tree.root(token)).logits(0, 0).copy())
        rows.commit(1)
    return out


def random_tree(rng: random.Random, root: int, size: int) -> Tree:
    """A tree of `size` guesses: bushy or deep, as it falls."""
    paths = []
    while True:
        tree = Tree.merge(root, paths, size)
        if tree.guesses == size:
            return tree
        start = list(rng.choice(paths))[: rng.randrange(1, 6)] if paths and rng.random() < 0.6 else []
        paths.append([*start, *(rng.randrange(3, 90) for _ in range(rng.randrange(1, 5)))])


def prefill(runner: Runner, rows: Rows, tokens: Sequence[int], chunk: int) -> None:
    """Cache all of `tokens`, `chunk` at a time."""
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        feed(runner, rows, part)
        rows.commit(len(part))


def scatter(array: NDArray[np.floating], offset: int) -> NDArray[np.floating]:
    """The same numbers, `offset` items after the start of an allocation."""
    flat = np.full(array.size + 64, np.nan, array.dtype)[offset : offset + array.size]
    flat[:] = array.ravel()
    return flat.reshape(array.shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kernels_do_not_care_where_arrays_lie(dtype: type) -> None:
    """Every kernel gives the same bits for the same numbers at each of 17 offsets in memory."""
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> NDArray[np.floating]:
        return rng.standard_normal(shape).astype(dtype)

    cases = [
        (linear, (numbers(37, 75), numbers(75), numbers(37))),
        (linear, (numbers(64, 160), numbers(160))),
        (lambda x, w: rms_norm(x, w, 1e-5), (numbers(5, 77), numbers(77))),
        (rotate, (numbers(3, 26), numbers(13), numbers(13))),
        (attention, (numbers(6, 26), numbers(53, 2, 26), numbers(53, 2, 26))),
        (swiglu, (numbers(133), numbers(133))),
    ]
    for kernel, arrays in cases:
        wanted = kernel(*arrays)
        for offset in range(17):
            moved = [scatter(array, (offset * (i + 1)) % 17) for i, array in enumerate(arrays)]
            assert np.array_equal(kernel(*moved), wanted)


@pytest.mark.parametrize("chunk", [1, 7, 16, 45])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_and_pages_do_not_show(files: ModelFiles, chunk: int, page_size: int) -> None:
    """However the prompt was cut into chunks and pages, the logits after it are those of plain decoding."""
    runner = make(files, page_size)
    rows = Rows(runner.pages)
    prefill(runner, rows, TEXT[:-1], chunk)
    scores = feed(runner, rows, TEXT[-1:], Tree.root(TEXT[-1]))
    assert np.array_equal(scores.logits(0, 0), plain(files, TEXT)[-1])


@pytest.mark.parametrize("seed", range(8))
def test_tree_nodes_equal_plain_decoding(files: ModelFiles, seed: int) -> None:
    """Every node of a random tree has the logits of plain decoding of its own path, siblings or none."""
    rng = random.Random(seed)
    tokens = TEXT[: rng.randrange(1, 40)]
    tree = random_tree(rng, tokens[-1], rng.randrange(1, 20))
    runner = make(files, rng.choice([1, 4, 16]))
    rows = Rows(runner.pages)
    cached = rng.randrange(len(tokens))
    prefill(runner, rows, tokens[:cached], 16)
    scores = feed(runner, rows, tokens[cached:], tree)
    for node in range(len(tree)):
        path = [tree.tokens[n] for n in tree.path(node)]
        assert np.array_equal(scores.logits(0, node), plain(files, [*tokens, *path])[-1])


def test_others_in_the_batch_do_not_show(files: ModelFiles) -> None:
    """A sequence among others, in any order and with pages between theirs, has the logits that it has alone."""
    rng = random.Random(3)
    texts = [[rng.randrange(3, 90) for _ in range(n)] for n in (1, 30, 9, 17)]
    trees = [random_tree(rng, text[-1], 6) for text in texts]
    alone = []
    for text, tree in zip(texts, trees, strict=True):
        runner = make(files)
        alone.append(feed(runner, Rows(runner.pages), text, tree))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        runner = make(files, page_size=4)
        rows = [Rows(runner.pages) for _ in texts]
        for length in range(0, 40, 4):  # pages taken in turn lie between one another
            for row, text, tree in zip(rows, texts, trees, strict=True):
                row.reserve(min(length, len(text) + tree.guesses))
        feeds = [Feed(rows[i], texts[i], trees[i]) for i in order]
        for feed_ in feeds:
            feed_.rows.reserve(len(feed_.pending) + 6)
        scores = runner.forward(feeds)
        for place, i in enumerate(order):
            for node in range(len(trees[i])):
                assert np.array_equal(scores.logits(place, node), alone[i].logits(0, node))


@pytest.mark.parametrize("seed", range(8))
def test_commit_keeps_what_plain_decoding_would_have(files: ModelFiles, seed: int) -> None:
    """After steps of trees, of which random paths are accepted, the logits are still those of plain decoding.

    Rejected rows lie where later ones are written, and accepted ones are moved over pages of 4 rows.
    """
    rng = random.Random(seed)
    runner = make(files, page_size=4)
    rows = Rows(runner.pages)
    tokens = TEXT[:9]
    moved = rejected = 0
    for _ in range(6):
        pending = tokens[rows.length :]
        tree = random_tree(rng, tokens[-1], rng.randrange(0, 9))
        scores = feed(runner, rows, pending, tree)
        node = rng.randrange(len(tree))
        path = tree.path(node)
        accepted = [tree.tokens[n] for n in path]
        assert np.array_equal(scores.logits(0, node), plain(files, [*tokens, *accepted])[-1])
        rows.commit(len(pending), path)
        tokens = [*tokens, *accepted, rng.randrange(3, 90)]
        moved += path != tuple(range(1, len(path) + 1))
        rejected += tree.guesses - len(path)
    assert moved
    assert rejected


def test_float32_is_near_float64(files: ModelFiles) -> None:
    """The same arithmetic in float64 moves no logit by more than 2e-5 of their spread, and moves most of them."""
    single, double = np.stack(plain(files, TEXT)), np.stack(plain(files, TEXT, "fp64"))
    assert np.abs(single - double).max() < 2e-5 * double.std()
    assert (single != double).mean() > 0.5


def test_hidden_states_are_those_the_head_reads(files: ModelFiles) -> None:
    """State -1 times the head is the logits; the last layer's state, normed, is state -1; order is the caller's."""
    runner = make(files)
    rows = Rows(runner.pages)
    rows.reserve(12)
    tree = Tree.chain(TEXT[9], [5, 6])
    last = files.config.layers - 1
    scores = runner.forward([Feed(rows, TEXT[:10], tree)], wants=[-1, last, 0])
    states = scores.hidden(0)
    assert states.shape == (12, 3, files.config.hidden)
    norm = files.tensors["norm"].float32()
    head = files.tensors["embed" if files.config.tied_embeddings else "head"].float32()
    for node in range(3):
        assert np.array_equal(linear(head, states[9 + node, 0]), scores.logits(0, node))
    for state in states:
        assert np.array_equal(rms_norm(state[1], norm, files.config.norm_eps), state[0])
        assert not np.array_equal(state[1], state[2])


def test_a_chunk_without_tree_scores_nothing(files: ModelFiles) -> None:
    """A prefill chunk has hidden states for each row, and no logits."""
    runner = make(files)
    rows = Rows(runner.pages)
    rows.reserve(5)
    scores = runner.forward([Feed(rows, TEXT[:5])], wants=[0])
    assert scores.hidden(0).shape == (5, 1, files.config.hidden)
    with pytest.raises(IndexError):
        scores.logits(0, 0)


def test_memory_is_what_is_held(files: ModelFiles) -> None:
    """Weights and cache are counted to the byte: float64 takes twice float32."""
    sizes = {dtype: make(files, dtype=dtype).memory() for dtype in ("fp32", "fp64")}
    c = files.config
    assert sizes["fp32"]["weights"] == 4 * sum(tensor.float32().size for tensor in files.tensors.values())
    assert sizes["fp32"]["cache"] == 4 * 2 * c.layers * 512 * c.kv_heads * c.head_dim
    assert sizes["fp64"] == {name: 2 * size for name, size in sizes["fp32"].items()}


def test_what_cannot_be_run_is_refused_by_name(files: ModelFiles) -> None:
    """A token outside the vocabulary, an unknown layer, rows that nobody reserved, an unknown dtype."""
    runner = make(files)
    rows = Rows(runner.pages)
    with pytest.raises(ValueError, match="reserve"):
        runner.forward([Feed(rows, [1, 2])])
    rows.reserve(16)
    for token in (-1, files.config.vocabulary):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary"):
            runner.forward([Feed(rows, [token])])
    with pytest.raises(ValueError, match="layer 99"):
        runner.forward([Feed(rows, [1])], wants=[99])
    with pytest.raises(ValueError, match="fp16"):
        ReferenceRunner(files, "fp16")  # type: ignore[arg-type]


def test_rope_scaling_stretches_what_it_should() -> None:
    """Linear divides all frequencies; llama3 and yarn divide the slow ones, keep the fast ones, and blend between."""
    config = replace(tiny.tiny_config(), head_dim=64, rope_theta=10000.0)
    base, factor = inverse_frequencies(config)
    assert (base[0], factor) == (1.0, 1.0)
    linear4, factor = inverse_frequencies(replace(config, rope_scaling=RopeScaling("linear", 4.0)))
    assert factor == 1.0
    np.testing.assert_allclose(linear4, base / 4, rtol=1e-15)
    for kind, wanted in (("llama3", 1.0), ("yarn", 0.1 * np.log(4) + 1)):
        scaled, factor = inverse_frequencies(replace(config, rope_scaling=RopeScaling(kind, 4.0, 512)))
        ratio = base / scaled
        assert factor == pytest.approx(wanted)
        assert (ratio[0], ratio[-1]) == (1.0, 4.0)
        assert np.all(np.diff(ratio) >= 0)
        assert ((ratio > 1) & (ratio < 4)).sum() >= 3
    with pytest.raises(ValueError, match="dynamic"):
        inverse_frequencies(replace(config, rope_scaling=RopeScaling("dynamic", 4.0)))
