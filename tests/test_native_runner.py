"""The native runner: near the float64 reference, and the same bits for a row wherever and with whomever it is computed.

`pytest tests/test_native_runner.py` takes the instruction set of the processor; the last test runs everything again
with each of the others that the processor has. OUTRIDER_FUZZ sets the number of random trees per format.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import _native
from outrider.core.cache import Rows
from outrider.core.params import ParameterError
from outrider.core.tree import Tree
from outrider.models.load import ModelFiles
from outrider.runtime.native import NativeRunner
from outrider.runtime.reference import ReferenceRunner
from outrider.runtime.runner import Feed, Runner
from tiny import tiny_model

FUZZ = int(os.environ.get("OUTRIDER_FUZZ", "40"))
WANTS = (0, 1, -1)
KIND = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
FORMATS = [("fp32", "fp32"), ("fp32", "int8"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"), ("int4", "bf16")]
SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 96},
    "odd": {"heads": 7, "kv_heads": 1, "head_dim": 24, "hidden": 64, "intermediate": 128},
}


@dataclass(frozen=True)
class Setting:
    """How a model is run. Everything but the formats must not be seen in any bit."""

    dtype: str = "fp32"
    kv_dtype: str = "fp32"
    threads: int = 1
    page_size: int = 64
    family: str = "llama"
    shape: str = "small"


@lru_cache(maxsize=32)
def files(family: str, dtype: str, shape: str) -> ModelFiles:
    sizes = dict(SHAPES[shape])
    if dtype not in ("fp32", "bf16") and sizes.get("head_dim") == 24:
        sizes |= {"heads": 8, "kv_heads": 2}  # integers come in groups of 32 columns
    return tiny_model(family=family, kind=KIND[dtype], **sizes)


@lru_cache(maxsize=64)
def runner(setting: Setting) -> NativeRunner:
    model = files(setting.family, setting.dtype, setting.shape)
    return NativeRunner(
        model,
        setting.dtype,
        kv_dtype=setting.kv_dtype,
        threads=setting.threads,
        cache_tokens=2048,
        page_size=setting.page_size,
    )


def shuffle_pages(of: Runner, rng: np.random.Generator) -> None:
    """Free pages are handed out in random order from now on."""
    pages = [of.pages.take() for _ in range(of.pages.free)]
    for page in rng.permutation(pages):
        of.pages.give(int(page))


@dataclass
class Seen:
    """What a forward said about some rows, copied."""

    logits: NDArray[np.float32]  # [N, V]
    hidden: NDArray[np.float32]  # [n, W, D]


def forward(of: Runner, feeds: Sequence[Feed]) -> list[Seen]:
    scores = of.forward(feeds, WANTS)
    return [
        Seen(
            np.array([scores.logits(i, node) for node in range(len(feed.tree) if feed.tree else 0)]),
            scores.hidden(i).copy(),
        )
        for i, feed in enumerate(feeds)
    ]


class Plain:
    """The logits and states after a text, each token fed alone: what every other way must give."""

    def __init__(self, of: Runner) -> None:
        self.runner = of
        self.rows = Rows(of.pages)
        self.text: list[int] = []
        self.known: dict[tuple[int, ...], Seen] = {}

    def __call__(self, text: Sequence[int]) -> Seen:
        key = tuple(text)
        if key not in self.known:
            common = 0
            while common < min(len(self.text), len(text) - 1) and self.text[common] == text[common]:
                common += 1
            self.rows.keep(common)
            for end in range(common, len(text)):
                self.rows.reserve(1)
                (seen,) = forward(self.runner, [Feed(self.rows, [text[end]], Tree.root(text[end]))])
                self.rows.commit(1)
                self.known[tuple(text[: end + 1])] = seen
            self.text = list(text)
        return self.known[key]

    def states(self, text: Sequence[int]) -> NDArray[np.float32]:
        return np.concatenate([self(text[: i + 1]).hidden for i in range(len(text))])


@lru_cache(maxsize=64)
def plain(setting: Setting) -> Plain:
    return Plain(runner(Setting(setting.dtype, setting.kv_dtype, family=setting.family, shape=setting.shape)))


def feed_text(of: Runner, rows: Rows, text: Sequence[int], chunk: int, tree: Tree | None) -> Seen:
    """Feeds the text in chunks, the last one with the tree; commits all chunks but the last."""
    states = []
    while len(text) > chunk:
        rows.reserve(chunk)
        (seen,) = forward(of, [Feed(rows, text[:chunk])])
        states.append(seen.hidden)
        rows.commit(chunk)
        text = text[chunk:]
    rows.reserve(len(text) + (tree.guesses if tree else 0))
    (seen,) = forward(of, [Feed(rows, text, tree)])
    return Seen(seen.logits, np.concatenate([*states, seen.hidden]))


def random_tree(rng: np.random.Generator, root: int, guesses: int, vocabulary: int) -> Tree:
    """Any tree: deep, bushy or both."""
    tokens, parents = [root], [-1]
    taken: set[tuple[int, int]] = set()
    depth_first = rng.random()
    for _ in range(guesses):
        parent = len(tokens) - 1 if rng.random() < depth_first else int(rng.integers(len(tokens)))
        token = int(rng.integers(vocabulary))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return Tree(tuple(tokens), tuple(parents)).check(vocabulary)


def same(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def text_of(rng: np.random.Generator, length: int, vocabulary: int = 97) -> list[int]:
    return [int(token) for token in rng.integers(vocabulary, size=length)]


# Largest difference of a logit from the float64 reference over the same weights; logits spread by about 2.5.
TOLERANCE = {
    ("fp32", "fp32"): 5e-4,
    ("fp32", "int8"): 1.0,
    ("bf16", "bf16"): 1.0,
    ("int8", "bf16"): 1.5,
    ("int8", "int8"): 1.5,
    ("int4", "bf16"): 1.5,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_near_the_reference(dtype: str, kv_dtype: str, family: str, shape: str) -> None:
    """Logits and states of a prompt and a tree behind it are the float64 reference's, up to the formats' rounding."""
    rng = np.random.default_rng(3)
    text = text_of(rng, 70)
    tree = random_tree(rng, text[-1], 12, 97)
    reference = ReferenceRunner(files(family, dtype, shape), "fp64", cache_tokens=128)
    rows = Rows(reference.pages)
    expected = feed_text(reference, rows, text, 100, tree)
    got = feed_text(
        native := runner(Setting(dtype, kv_dtype, 2, 64, family, shape)), Rows(native.pages), text, 100, tree
    )
    error = np.abs(got.logits - expected.logits)
    assert error.max() < TOLERANCE[dtype, kv_dtype]
    assert np.sqrt((error**2).mean()) < TOLERANCE[dtype, kv_dtype] / 5
    scale = np.sqrt((expected.hidden**2).mean())
    assert np.sqrt(((got.hidden - expected.hidden) ** 2).mean()) < TOLERANCE[dtype, kv_dtype] / 5 * scale


@pytest.mark.parametrize(("threads", "page_size"), [(2, 1), (1, 16), (2, 24), (2, 64)])
@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_pages_and_threads(shape: str, dtype: str, kv_dtype: str, threads: int, page_size: int) -> None:
    """A text fed token by token, by 16 or whole, into pages of any size in any order, by one thread or two: same."""
    rng = np.random.default_rng(page_size)
    setting = Setting(dtype, kv_dtype, threads, page_size, shape=shape)
    text = text_of(rng, 75)
    expected = plain(setting).states(text)
    shuffle_pages(runner(setting), rng)
    for chunk in (1, 16, len(text)):
        rows = Rows(runner(setting).pages)
        got = feed_text(runner(setting), rows, text, chunk, Tree.root(text[-1]))
        assert same(got.hidden, expected)
        assert same(got.logits, plain(setting)(text).logits)
        rows.release()


def test_beside_busy_processes() -> None:
    """Two threads that have to share their cores with others, and change to one and back, write the same bits."""
    rng = np.random.default_rng(0)
    setting = Setting("int8", "bf16", 2)
    text = text_of(rng, 40)
    expected = plain(setting)(text).logits
    rows = Rows(runner(setting).pages)
    rows.reserve(len(text))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        forward(runner(setting), [Feed(rows, text[:-1])])
        rows.commit(len(text) - 1)
        for _ in range(200):
            (seen,) = forward(runner(setting), [Feed(rows, text[-1:], Tree.root(text[-1]))])
            assert same(seen.logits, expected)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        rows.release()


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_a_chunk_longer_than_a_pass(dtype: str, kv_dtype: str) -> None:
    """700 rows in one forward, more than one pass takes, are the 700 rows of chunks of 100."""
    rng = np.random.default_rng(0)
    setting = Setting(dtype, kv_dtype, 2)
    text = text_of(rng, 700)
    seen = []
    for chunk in (100, 700):
        rows = Rows(runner(setting).pages)
        seen.append(feed_text(runner(setting), rows, text, chunk, Tree.root(text[-1])))
        rows.release()
    assert same(seen[0].hidden, seen[1].hidden)
    assert same(seen[0].logits, seen[1].logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_who_shares_the_batch(dtype: str, kv_dtype: str, family: str) -> None:
    """A sequence alone and among others, first or last, with trees and prompts beside it: same bits."""
    rng = np.random.default_rng(5)
    setting = Setting(dtype, kv_dtype, 2, 16, family)
    native = runner(setting)
    texts = [text_of(rng, length) for length in (3, 33, 64, 95, 1, 31)]
    trees = [None if i % 3 == 2 else random_tree(rng, text[-1], 3 * i, 97) for i, text in enumerate(texts)]
    alone = []
    for text, tree in zip(texts, trees, strict=True):
        rows = Rows(native.pages)
        alone.append(feed_text(native, rows, text, 1000, tree))
        rows.release()
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 4]):
        feeds = []
        for i in order:
            rows = Rows(native.pages)
            tree = trees[i]
            rows.reserve(len(texts[i]) + (tree.guesses if tree else 0))
            feeds.append(Feed(rows, texts[i], tree))
        for i, got in zip(order, forward(native, feeds), strict=True):
            assert same(got.logits, alone[i].logits)
            assert same(got.hidden, alone[i].hidden)
        for feed in feeds:
            feed.rows.release()


def walk(setting: Setting, rng: np.random.Generator) -> int:
    """A random text, written by random trees with random accepted paths beside other sequences. Returns the nodes seen.

    Every node's logits and states must be those of its own text fed token by token.
    """
    native, truth = runner(setting), plain(setting)
    vocabulary = native.config.vocabulary
    lengths = rng.integers(1, 80, size=int(rng.integers(1, 4)))
    sequences = [(Rows(native.pages), text_of(rng, int(length), 5)) for length in lengths]
    nodes = 0
    for _ in range(3):
        feeds = []
        for rows, text in sequences:
            pending = text[rows.length :]
            if len(pending) > 1 and rng.random() < 0.3:
                pending = pending[: int(rng.integers(1, len(pending)))]
                tree = None
            else:
                tree = random_tree(rng, text[-1], int(rng.integers(0, 24)), vocabulary)
            rows.reserve(len(pending) + (tree.guesses if tree else 0))
            feeds.append(Feed(rows, pending, tree))
        for feed, seen, (rows, text) in zip(feeds, forward(native, feeds), sequences, strict=True):
            if feed.tree is None:
                rows.commit(len(feed.pending))
                continue
            tree = feed.tree
            for node in range(len(tree)):
                path = [tree.tokens[n] for n in tree.path(node)]
                expected = truth([*text, *path])
                assert same(seen.logits[node], expected.logits[0]), (setting, len(text), tree, node)
                assert same(seen.hidden[len(feed.pending) - 1 + node], expected.hidden[0])
                nodes += 1
            accepted = tree.path(int(rng.integers(len(tree))))
            rows.commit(len(feed.pending), accepted)
            text.extend(tree.tokens[n] for n in accepted)
            text.append(int(rng.integers(5)))
    for rows, _ in sequences:
        rows.release()
    if len(truth.known) > 20000:
        truth.known.clear()
    return nodes


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_random_trees(dtype: str, kv_dtype: str) -> None:
    """Nodes of random trees, committed along random paths, are bit for bit the rows of plain decoding."""
    rng = np.random.default_rng(17)
    nodes = 0
    for i in range(FUZZ):
        setting = Setting(dtype, kv_dtype, 1 + i % 2, (1, 16, 24, 64)[i // 2 % 4], shape=("small", "odd")[i // 8 % 2])
        if i % 8 == 0:
            shuffle_pages(runner(setting), rng)
        nodes += walk(setting, rng)
        runner(setting).pages.check_integrity()
    assert nodes > 10 * FUZZ


def test_scores_outlive_their_buffers() -> None:
    """Scores that are held while a larger forward replaces the buffers stay readable."""
    native = runner(Setting())
    rows = Rows(native.pages)
    rows.reserve(200)
    scores = native.forward([Feed(rows, [5], Tree.root(5))], [-1])
    before = scores.logits(0, 0).copy()
    native.forward([Feed(rows, [5], Tree.chain(5, [7] * 199))], [-1])
    assert np.isfinite(scores.logits(0, 0)).all()
    scores = native.forward([Feed(rows, [5], Tree.root(5))])
    assert same(scores.logits(0, 0), before)
    rows.release()


def test_only_trees_are_scored() -> None:
    """A prefill chunk has no logits; the feed after it has its own."""
    native = runner(Setting())
    first, second = Rows(native.pages), Rows(native.pages)
    first.reserve(3)
    second.reserve(1)
    scores = native.forward([Feed(first, [1, 2, 3]), Feed(second, [4], Tree.root(4))])
    alone = native.forward([Feed(second, [4], Tree.root(4))]).logits(0, 0).copy()
    scores = native.forward([Feed(first, [1, 2, 3]), Feed(second, [4], Tree.root(4))])
    assert same(scores.logits(1, 0), alone)
    with pytest.raises(IndexError):
        scores.logits(0, 0)
    with pytest.raises(IndexError):
        scores.logits(1, 1)
    first.release()
    second.release()


def test_bad_feeds_are_refused() -> None:
    """Whatever would read or write outside the cache or the vocabulary is a ValueError that names it."""
    native = runner(Setting(page_size=16))
    rows = Rows(native.pages)
    rows.reserve(16)
    cases: list[tuple[Feed, Sequence[int], str]] = [
        (Feed(rows, [97], Tree.root(97)), (), "token 97"),
        (Feed(rows, [-1], Tree.root(-1)), (), "token -"),
        (Feed(rows, [2**40], None), (), "token -"),
        (Feed(rows, [1] * 17), (), "reserve them before"),
        (Feed(rows, [1], Tree.chain(1, [2] * 16)), (), "reserve them before"),
        (Feed(rows, [1], Tree((2,), (-1,))), (), "root is token 2"),
        (Feed(rows, [1], Tree((1, 2), (-1, 1))), (), "node 1 has parent 1"),
        (Feed(rows, [1], Tree((1, 2), (-1, -1))), (), "node 1 has parent -1"),
        (Feed(rows, [1], Tree((1, 99), (-1, 0))), (), "token 99"),
        (Feed(rows, []), (), "without pending tokens"),
        (Feed(rows, [1]), (2,), "layer 2"),
        (Feed(rows, [1]), (-2,), "layer -2"),
    ]
    for feed, wants, message in cases:
        with pytest.raises(ValueError, match=message):
            native.forward([feed], wants)
    forged = Rows(native.pages)
    forged.pages.append(native.pages.count)
    with pytest.raises(ValueError, match="page "):
        native.forward([Feed(forged, [1])])
    with pytest.raises(ValueError, match="slot"):
        native.move([0], [10**6])
    rows.release()


def test_unknown_formats_are_refused_by_name() -> None:
    """An unknown format is a ParameterError that carries the parameter's name and lists what there is."""
    model = files("llama", "fp32", "small")
    for wrong in ({"dtype": "fp16"}, {"head_dtype": "int3"}, {"kv_dtype": "fp8"}):
        with pytest.raises(ParameterError, match="is not one of") as caught:
            NativeRunner(model, **wrong)
        assert caught.value.parameter in wrong


def test_auto_takes_what_the_file_holds() -> None:
    """`auto` packs each matrix in its file's own precision; the cache is fp32 only where everything is."""
    for kind, dtype in (("F32", "fp32"), ("F16", "bf16"), ("BF16", "bf16"), ("Q8_0", "int8"), ("Q4_0", "int4")):
        native = NativeRunner(tiny_model(kind=kind), cache_tokens=64)
        assert set(native.formats.values()) == {dtype}
        assert native.kv_dtype == ("fp32" if dtype == "fp32" else "bf16")


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa: str) -> None:
    """All of the above holds with the instruction sets of lesser processors."""
    if "OUTRIDER_ISA" in os.environ:
        pytest.skip("already overridden")
    if isa == _native.isa():
        pytest.skip("it is the processor's own")
    environment = {**os.environ, "OUTRIDER_ISA": isa, "OUTRIDER_FUZZ": str(max(4, FUZZ // 10))}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
