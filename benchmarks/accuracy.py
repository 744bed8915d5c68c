"""What each way to hold the weights costs in accuracy, against the same weights in float32.

    python benchmarks/accuracy.py smollm2-135m
    python benchmarks/accuracy.py MODEL --text book.txt --tokens 50000 --kinds "int8; bf16" --json out.json

For every token of a text of at least 20,000 tokens: the perplexity, the Kullback-Leibler divergence of the law from
that of float32 weights (mean, and its 99th percentile), and how often both have the same likeliest token. The text is
read in windows of 512 tokens that know nothing of one another.

Without --text the text is half prose and half code that every CPython brings along: the language reference in
`pydoc_data.topics`, and the sources of a few modules of the standard library.

For comparison, `Q8_0` is that scheme emulated in numpy, for weights and activations alike: groups of 32 along K, each
with a half-precision scale of max / 127. `numpy` is the same code without any rounding: it shows how near to zero the
figures of equal arithmetic come. Letters: n rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.bench import environment
from outrider.core.cache import Rows
from outrider.core.tree import Tree
from outrider.models.load import ModelFiles
from outrider.models.rotary import rotary_table
from outrider.runtime.load import Loaded, load
from outrider.runtime.runner import Feed, Runner

Floats = NDArray[np.float32]

WINDOW = 512
ROWS = 64  # per forward: bounds the memory of the logits

SOURCES = ("textwrap", "heapq", "difflib", "statistics", "csv", "fractions", "shlex", "sched", "bisect", "dataclasses")

# name -> dtype, head_dtype, kv_dtype of the runner; None = what the runner takes by default
KINDS: dict[str, tuple[str, str | None, str | None]] = {
    "auto": ("auto", None, None),
    "fp32, kv bf16": ("fp32", None, "bf16"),
    "fp32, kv int8": ("fp32", None, "int8"),
    "bf16": ("bf16", None, None),
    "int8": ("int8", None, None),
    "int8, kv fp32": ("int8", None, "fp32"),
    "int8, kv int8": ("int8", None, "int8"),
    "int4": ("int4", None, None),
    "int4, head int4": ("int4", "int4", None),
}


class Judge(Protocol):
    """Something that gives logits for a window of tokens, a few rows at a time."""

    def logits(self, window: Sequence[int]) -> Iterator[Floats]:
        """Logits after each token of the window, `ROWS` rows at a time. [<= ROWS, V]"""
        ...


class Ran:
    """A runner of the product."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.rows = runner, Rows(runner.pages)

    def logits(self, window: Sequence[int]) -> Iterator[Floats]:
        self.rows.keep(0)
        for start in range(0, len(window), ROWS):
            part = window[start : start + ROWS]
            self.rows.reserve(len(part))
            scores = self.runner.forward([Feed(self.rows, part[:1], Tree.chain(part[0], part[1:]))])
            yield np.stack([scores.logits(0, node) for node in range(len(part))])
            self.rows.commit(1, range(1, len(part)))


def q8_0(x: Floats) -> Floats:
    """What Q8_0 keeps of x: per 32 along the last axis, whole numbers up to 127 times a half-precision scale."""
    groups = x.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(groups * inverse) * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)


class Emulated:
    """The decoder over whole windows, in float32 through BLAS, with `rounded` put over weights and activations."""

    def __init__(self, files: ModelFiles, rounded: Callable[[Floats], Floats]) -> None:
        self.config, self.rounded = files.config, rounded
        self.weights = {name: tensor.float32() for name, tensor in files.tensors.items()}
        for name, weight in self.weights.items():
            if weight.ndim == 2:
                self.weights[name] = rounded(weight)
        cosines, sines = rotary_table(self.config, WINDOW)
        self.cosines, self.sines = cosines.astype(np.float32), sines.astype(np.float32)

    def logits(self, window: Sequence[int]) -> Iterator[Floats]:
        states = self._states(window)
        head = "embed" if self.config.tied_embeddings else "head"
        for start in range(0, len(window), ROWS):
            yield self._linear(states[start : start + ROWS], head)

    def _linear(self, x: Floats, name: str) -> Floats:
        """[n, K] -> [n, M]"""
        y = self.rounded(x) @ self.weights[name].T
        bias = self.weights.get(f"{name}_bias")
        return y if bias is None else y + bias

    def _norm(self, x: Floats, name: str) -> Floats:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self.config.norm_eps)) * self.weights[name]

    def _states(self, window: Sequence[int]) -> Floats:
        """Final normed states. [n, D]"""
        x = self.weights["embed"][list(window)]
        for i in range(self.config.layers):
            layer = f"layers.{i}."
            x = x + self._linear(self._attention(self._norm(x, layer + "attn_norm"), layer), layer + "o")
            h = self._norm(x, layer + "mlp_norm")
            gate = self._linear(h, layer + "gate")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(h, layer + "up"), layer + "down")
        return self._norm(x, "norm")

    def _attention(self, h: Floats, layer: str) -> Floats:
        """[n, D] -> [n, H * d]"""
        c, n = self.config, len(h)
        q = self._heads(h, layer, "q", c.heads)
        k = self._heads(h, layer, "k", c.kv_heads)
        v = self._linear(h, layer + "v").reshape(n, c.kv_heads, c.head_dim).transpose(1, 0, 2)
        future = np.triu(np.full((n, n), -np.inf, np.float32), 1)
        out = np.empty((n, c.heads, c.head_dim), np.float32)
        for head in range(c.heads):
            group = head * c.kv_heads // c.heads
            scores = q[head] @ k[group].T / np.float32(np.sqrt(c.head_dim)) + future
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[group]
        return out.reshape(n, -1)

    def _heads(self, h: Floats, layer: str, name: str, count: int) -> Floats:
        """Rotated queries or keys. [n, D] -> [count, n, d]"""
        x = self._linear(h, layer + name).reshape(len(h), count, self.config.head_dim)
        if self.config.qk_norm:
            x = self._norm(x, f"{layer}{name}_norm")
        cosines, sines = self.cosines[: len(h), None], self.sines[: len(h), None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate((a * cosines - b * sines, b * cosines + a * sines), axis=-1).transpose(1, 0, 2)


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis, in place. [n, V]"""
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return logits


@dataclass
class Tally:
    """Figures of one kind, position by position."""

    surprise: list[Floats] = field(default_factory=list)  # -log q of the text's own next token
    divergence: list[Floats] = field(default_factory=list)  # KL(p || q), p of float32 weights
    agreement: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, log_p: Floats, log_q: Floats, truth: NDArray[np.intp]) -> None:
        self.surprise.append(-log_q[np.arange(len(truth)), truth])
        self.divergence.append((np.exp(log_p) * (log_p - log_q)).sum(axis=-1, dtype=np.float64).astype(np.float32))
        self.agreement.append(log_p.argmax(axis=-1) == log_q.argmax(axis=-1))

    def figures(self) -> dict[str, float]:
        divergence = np.concatenate(self.divergence)
        return {
            "perplexity": float(np.exp(np.concatenate(self.surprise).mean(dtype=np.float64))),
            "kl_mean": float(divergence.mean(dtype=np.float64)),
            "kl_p99": float(np.quantile(divergence, 0.99)),
            "argmax_agreement": float(np.concatenate(self.agreement).mean()),
        }


def default_text() -> tuple[str, str]:
    """Prose and code that come with CPython."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    return prose, "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES)


def text_tokens(files: ModelFiles, path: Path | None, count: int) -> list[int]:
    """`count` whole windows of token ids, and one token more: the last window's last answer."""
    texts = [path.read_text(encoding="utf-8")] if path else list(default_text())
    share = -(-count // len(texts) // WINDOW) * WINDOW
    tokens: list[int] = []
    for text in texts:
        part = files.tokenizer.encode(text)
        if len(part) <= share:
            sys.exit(f"the text has {len(part):,} tokens, {share + 1:,} are needed: a longer --text or fewer --tokens")
        tokens += part[:share]
    return [*tokens, part[share]]


def judges(base: Loaded, args: argparse.Namespace) -> Iterator[tuple[str, Judge]]:
    """The float32 runner first, then the kinds that were asked for. A kind that is refused says why and is left out."""
    yield "fp32", Ran(base.runner)
    for name in args.kinds:
        if name == "numpy":
            yield name, Emulated(base.files, lambda x: x)
        elif name == "Q8_0":
            yield name, Emulated(base.files, q8_0)
        else:
            try:
                yield name, Ran(loaded(args, *KINDS[name]).runner)
            except ValueError as error:
                print(f"{name}: left out: {error}")


def loaded(args: argparse.Namespace, dtype: str, head: str | None, kv: str | None) -> Loaded:
    return load(
        args.model,
        dtype=dtype,
        head_dtype=head,
        kv_dtype=kv,
        threads=args.threads,
        cache_tokens=WINDOW,
        page_size=ROWS,
    )


def measure(judged: dict[str, Judge], tokens: Sequence[int]) -> dict[str, Tally]:
    """All kinds in step, so that only `ROWS` rows of logits of each are ever held."""
    tallies = {name: Tally() for name in judged}
    for start in range(0, len(tokens) - 1, WINDOW):
        window = tokens[start : start + WINDOW]
        streams = {name: judge.logits(window) for name, judge in judged.items()}
        for at in range(start, start + WINDOW, ROWS):
            truth = np.asarray(tokens[at + 1 : at + 1 + ROWS])
            log_p: Floats | None = None
            for name, stream in streams.items():
                log_q = log_softmax(next(stream))
                log_p = log_q if log_p is None else log_p
                tallies[name].add(log_p, log_q, truth)
        print(f"\r{start + WINDOW:,} of {len(tokens) - 1:,} tokens", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tallies


def table(figures: dict[str, dict[str, float]]) -> str:
    base = figures["fp32"]["perplexity"]
    lines = [
        "| | perplexity | against fp32 | KL mean | KL p99 | same argmax |",
        "|---|---|---|---|---|---|",
    ]
    for name, f in figures.items():
        change = f"{100 * (f['perplexity'] / base - 1):+.2f} %"
        agreement = f"{100 * f['argmax_agreement']:.2f} %"
        lines.append(
            f"| {name} | {f['perplexity']:.3f} | {change} | {f['kl_mean']:.5f} | {f['kl_p99']:.4f} | {agreement} |"
        )
    return "\n".join(lines)


def main() -> None:
    known = [*KINDS, "Q8_0", "numpy"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or path")
    parser.add_argument("--text", type=Path, help="a UTF-8 file; default: prose and code that come with CPython")
    parser.add_argument(
        "--tokens", type=int, default=20_000, help="at least so many, in whole windows (default 20,000)"
    )
    parser.add_argument("--kinds", default=";".join(known), help=f"separated by semicolons, of: {'; '.join(known)}")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    args.kinds = [kind.strip() for kind in args.kinds.split(";") if kind.strip()]
    for kind in args.kinds:
        if kind not in known:
            parser.error(f"kind {kind!r} is unknown; there are {'; '.join(known)}")
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: at least 1")

    base = loaded(args, "fp32", "fp32", "fp32")
    judged = dict(judges(base, args))
    tokens = text_tokens(base.files, args.text, args.tokens)
    figures = {name: tally.figures() for name, tally in measure(judged, tokens).items()}
    result = {
        "model": base.files.name,
        "sha256": base.files.sha256(),
        "file_quantisation": base.files.quantisation,
        "tokens": len(tokens) - 1,
        "window": WINDOW,
        "text_sha256": hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest(),
        "kinds": figures,
        "machine": environment.machine(),
        "versions": environment.versions(),
        "git": environment.git(),
        "argv": sys.argv[1:],
    }
    print(table(figures))
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
