"""What a forward costs by its number of rows, beside what the machine's memory allows.

Everything is measured in turns within one run, since machines drift: each round reads memory, runs one forward of
every dtype and number of rows, and takes a few plain steps of the engine. Medians over the rounds count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.steps import Forwards, filler
from outrider.core.params import ParameterError, SamplingParams
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.engine.engine import Engine
from outrider.runtime.load import load
from outrider.runtime.runner import Feed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from outrider import _native
    from outrider.drafters.base import Request
    from outrider.runtime.load import Loaded
    from outrider.runtime.native import NativeRunner

__all__ = ["DTYPES", "ROWS", "measure"]

DTYPES = ("int8", "bf16", "fp32", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64)
_BLOCK = 512 << 20  # bytes read for the bandwidth: many times any cache
_TILE = (512, 512, 1024)  # rows, outputs and inputs of the product that measures arithmetic: it stays in the caches
_STEPS = 16  # plain steps of the engine per round
_GUESSES = 32  # of the tree whose bookkeeping is measured
_DRAWS = 64  # draws of each kind per round
_KINDS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0, logprobs=5),
    "temperature 1": SamplingParams(temperature=1),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
}


def measure(
    model: str,
    *,
    threads: int | None = None,
    context: int = 256,
    dtypes: Sequence[str] = DTYPES,
    rows: Sequence[int] = ROWS,
    rounds: int = 30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Bandwidth in GB/s by threads, and per dtype and number of rows: milliseconds, GB/s, both as ratios.

    `gb_s` counts the packed weights and the `context` cache rows that a forward reads, over its time; `of_one_row` is
    the time against a forward of one row, `of_bandwidth` the speed against this run's own read bandwidth.
    `multiply_gflop_s` is the rate of one thread on a product that stays in its caches, the rounding of the activations
    included. `draw_us` is one draw of a token, by parameters. `python_share` is the part of a plain step of the engine
    that is neither forward nor draw, for the first dtype; `tree_share` is what a tree of 32 guesses adds to that, as a
    share of a plain step: checking, choosing, feeding, verifying and committing it. Raises ParameterError for sizes
    that make no sense, ModelError for the model.
    """
    from outrider import _native
    from outrider.runtime.cores import physical_cores

    threads = threads or physical_cores()
    _check(context=context, rounds=rounds, **{f"rows {m}": m for m in rows})
    # the subject's rows and the engine's, each in whole pages
    room = 2 * context + max(rows) + _GUESSES + _STEPS + 4 * 64
    models = {dtype: load(model, dtype=dtype, threads=threads, cache_tokens=room) for dtype in dtypes}
    subjects = {dtype: _Subject(loaded, context) for dtype, loaded in models.items()}
    plain, bushy = _Steps(models[dtypes[0]], context), _Steps(models[dtypes[0]], context, _GUESSES)
    draws: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    reader = _native.Reader(_BLOCK)
    counts = sorted({1, threads})
    reads: dict[int, list[float]] = {count: [] for count in counts}
    forwards: dict[tuple[str, int], list[float]] = {(dtype, m): [] for dtype in dtypes for m in rows}
    products: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for number in range(rounds):
        for count in counts:
            reads[count].append(reader.read(count))
        for dtype in dtypes:
            subjects[dtype].seconds(1)  # the model before it has left its own weights in the caches
            for m in rows:
                forwards[dtype, m].append(subjects[dtype].seconds(m))
        for dtype in dtypes:
            products[dtype].append(_product(dtype))
        plain.run(_STEPS)
        bushy.run(_STEPS)
        for kind, params in _KINDS.items():
            draws[kind].append(subjects[dtypes[0]].draw(params))
        progress(number + 1, rounds)
    bandwidth = {count: _BLOCK / median(seconds) / 1e9 for count, seconds in reads.items()}
    return {
        "bandwidth_gb_s": {str(count): value for count, value in bandwidth.items()},
        "threads": threads,
        "context": context,
        "rounds": rounds,
        "forward": {
            dtype: {str(m): _entry(forwards, dtype, m, subjects[dtype].bytes, bandwidth[threads]) for m in rows}
            for dtype in dtypes
        },
        "multiply_gflop_s": {dtype: 2 * np.prod(_TILE) / median(products[dtype]) / 1e9 for dtype in dtypes},
        "draw_us": {kind: median(seconds) * 1e6 for kind, seconds in draws.items()},
        "python_share": plain.python_share(),
        "tree_share": (bushy.python() - plain.python()) / plain.wall(),
    }


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ParameterError(name, f"{value} is not at least 1")


def _entry(
    forwards: dict[tuple[str, int], list[float]], dtype: str, rows: int, size: int, bandwidth: float
) -> dict[str, float]:
    seconds = median(forwards[dtype, rows])
    one = median(next(times for (d, _), times in forwards.items() if d == dtype))
    speed = size / seconds / 1e9
    return {"ms": seconds * 1e3, "gb_s": speed, "of_one_row": seconds / one, "of_bandwidth": speed / bandwidth}


class _Subject(Forwards):
    """One model under measurement: its forwards and its draws."""

    def __init__(self, loaded: Loaded, context: int) -> None:
        super().__init__(loaded.runner, context)
        runner: NativeRunner = loaded.runner  # type: ignore[assignment]  # load's default
        self.bytes = runner.memory()["weights"] + context * runner.row_bytes

    def draw(self, params: SamplingParams) -> float:
        """A draw after one row, the mean of a few."""
        self.rows.reserve(1)
        scores = self.runner.forward([Feed(self.rows, [1], Tree.root(1))])
        shaping = Shaping(params, seed=0, tokens=[1], prompt_length=1)
        scores.draw(0, 0, shaping)  # the first one prepares
        began = time.perf_counter()
        for _ in range(_DRAWS):
            scores.draw(0, 0, shaping)
        return (time.perf_counter() - began) / _DRAWS


class _Steps:
    """Steps of the engine, plain or with a tree of so many guesses. The time of native calls and guessing is set apart.

    The guesses are wrong but by chance, so that such steps write as much as plain ones.
    """

    def __init__(self, loaded: Loaded, context: int, guesses: int = 0) -> None:
        self._loaded, self._prompt = loaded, filler(context, loaded.runner.config.vocabulary)
        self._guesses = guesses
        tokens = filler(guesses, loaded.runner.config.vocabulary)
        # three siblings to a node: some rows in order, most not
        self._tree = Tree((0, *tokens), (-1, *(node // 3 for node in range(guesses)))) if guesses else None
        self._wall: list[float] = []
        self._native: list[float] = []

    def run(self, steps: int) -> None:
        engine = Engine.from_loaded(
            self._loaded,
            drafter="none" if self._tree is None else "junk",
            drafter_options=None if self._tree is None else {"max_draft_tokens": self._guesses},
            enable_prefix_caching=False,
        )
        id = engine.add(self._prompt, SamplingParams(max_tokens=steps + 2, ignore_eos=True))
        engine.step()  # the prompt
        with _timed(self._loaded) as native, _guessed(self._tree, native):
            for _ in range(steps):
                native.clear()
                began = time.perf_counter()
                engine.step()
                self._wall.append(time.perf_counter() - began)
                self._native.append(sum(native))
        engine.cancel(id)

    def wall(self) -> float:
        """Seconds of a step."""
        return median(self._wall)

    def python(self) -> float:
        """Seconds of a step that are neither native nor guessing."""
        return median(wall - inside for inside, wall in zip(self._native, self._wall, strict=True))

    def python_share(self) -> float:
        shares = [1 - inside / wall for inside, wall in zip(self._native, self._wall, strict=True)]
        return median(shares)


@contextmanager
def _timed(loaded: Loaded) -> Iterator[list[float]]:
    """Seconds of each native forward and draw while the block runs."""
    from outrider.runtime import native_sampling

    seconds: list[float] = []
    runner: NativeRunner = loaded.runner  # type: ignore[assignment]  # load's default
    decoder, prepared = runner.decoder, native_sampling.prepared

    class Clock:
        def __init__(self, inner: Any, name: str) -> None:
            self._call = getattr(inner, name)
            setattr(self, name, self._run)

        def _run(self, *arguments: Any) -> Any:
            began = time.perf_counter()
            out = self._call(*arguments)
            seconds.append(time.perf_counter() - began)
            return out

    def timed_draws(shaping: Any) -> _native.NativeShaping:
        return Clock(prepared(shaping), "draw")  # type: ignore[return-value]

    runner.decoder = Clock(decoder, "forward")  # type: ignore[assignment]
    native_sampling.prepared = timed_draws
    try:
        yield seconds
    finally:
        runner.decoder, native_sampling.prepared = decoder, prepared


@contextmanager
def _guessed(tree: Tree | None, seconds: list[float]) -> Iterator[None]:
    """Lets the drafter for experiments propose this tree behind each text's end, and adds the time that it takes."""
    from outrider.drafters.junk import Junk

    propose = Junk.propose

    def proposed(self: Junk, batch: Sequence[Request]) -> list[Tree]:
        assert tree is not None
        began = time.perf_counter()
        out = [Tree((request.shaping.tokens[-1], *tree.tokens[1:]), tree.parents) for request in batch]
        seconds.append(time.perf_counter() - began)
        return out

    Junk.propose = proposed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Junk.propose = propose  # type: ignore[method-assign]


@cache
def _layer(dtype: str) -> tuple[_native.Linear, NDArray[np.float32]]:
    """A small layer and its activations."""
    from outrider import _native

    m, n, k = _TILE
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((n, k), np.float32)
    layer = _native.Linear(dtype, [("F32", weights.view(np.uint8), k)], threads=1)
    return layer, rng.standard_normal((m, k), np.float32)


def _product(dtype: str) -> float:
    layer, x = _layer(dtype)
    began = time.perf_counter()
    layer.multiply(x)
    return time.perf_counter() - began
