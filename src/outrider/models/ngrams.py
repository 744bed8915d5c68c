"""An n-gram model of what a target writes: after its last one or two tokens, the likeliest next ones.

A folder has `config.json` (what it is, for which target) and `model.safetensors` with four arrays per order o = 1, 2:

    contexts.o [R, o]   the tokens before, ascending; a row of the table each
    counts.o   [R]      guesses of each row, one behind the other in
    tokens.o   [G]      the guesses, each row's likeliest first
    chances.o  [G]      their probabilities in 255ths

Letters: o order, R rows of an order, G guesses of an order.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from outrider.models.errors import ModelError

__all__ = ["KIND", "Ngrams", "Row", "read_ngrams", "write_ngrams"]

KIND = "ngram_model"
_ORDERS = 2  # two tokens of any vocabulary are one key of 64 bits
_SCALE = 255
Row = Sequence[tuple[int, float]]  # tokens with their probabilities, the likeliest first


@dataclass(frozen=True, slots=True)
class _Order:
    """The rows of one order."""

    keys: array[int]  # [R] ascending: the context's tokens as one number
    starts: array[int]  # [R + 1] of each row in the other two
    tokens: array[int]  # [G]
    chances: array[float]  # [G]

    @property
    def bytes(self) -> int:
        return sum(len(each) * each.itemsize for each in (self.keys, self.starts, self.tokens, self.chances))

    def find(self, key: int) -> Row:
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key:
            return ()
        first, end = self.starts[place], self.starts[place + 1]
        return tuple(zip(self.tokens[first:end], self.chances[first:end], strict=True))


@dataclass(frozen=True, slots=True)
class Ngrams:
    """The model in memory. Nothing changes in it: any thread may ask."""

    orders: tuple[_Order, ...]
    target_sha256: str | None

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(order.bytes for order in self.orders)

    @property
    def order(self) -> int:
        """Tokens that are looked at, at most."""
        return len(self.orders)

    def after(self, last: Sequence[int]) -> Row:
        """What follows the text's last tokens: the row of the longest context that has one, else nothing."""
        for order in range(min(len(self.orders), len(last)), 0, -1):
            row = self.orders[order - 1].find(_key(last[-order:]))
            if row:
                return row
        return ()


def read_ngrams(folder: Path, vocabulary: int) -> Ngrams:
    """The model in a folder. Raises ModelError for one that is damaged, or has tokens that the target has not."""
    try:
        config = json.loads((folder / "config.json").read_text())
        own = config["outrider"]
        if own["kind"] != KIND:
            raise ModelError(f"{folder}: holds {own['kind']!r}, no n-gram model")
        orders = int(own["orders"])
        if not 1 <= orders <= _ORDERS:
            raise ModelError(f"{folder}: {orders} orders; there are 1 to {_ORDERS}")
        arrays = load_file(folder / "model.safetensors")
        made = tuple(_order(arrays, order, vocabulary) for order in range(1, orders + 1))
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{folder}: {error.strerror or error}: an n-gram model has config.json and weights") from None
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"{folder}: no n-gram model of `outrider train ngram-model` ({error})") from None
    return Ngrams(made, own.get("target_sha256"))


def write_ngrams(folder: Path, rows: Sequence[Mapping[tuple[int, ...], Row]], notes: Mapping[str, Any]) -> None:
    """Write the rows of order 1, 2 ...; `notes` go into config.json, `target_sha256` among them."""
    arrays: dict[str, NDArray[Any]] = {}
    for order, found in enumerate(rows, start=1):
        contexts = sorted(found)
        guesses = [guess for context in contexts for guess in found[context]]
        for name, values in (
            ("contexts", np.array(contexts, np.int64).reshape(-1, order)),
            ("tokens", np.array([token for token, _ in guesses], np.int64)),
        ):
            arrays[f"{name}.{order}"] = values.astype(np.uint16 if values.max(initial=0) < 2**16 else np.int32)
        arrays[f"counts.{order}"] = np.array([len(found[context]) for context in contexts], np.uint8)
        arrays[f"chances.{order}"] = np.array([round(_SCALE * chance) for _, chance in guesses], np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"outrider": {"kind": KIND, "orders": len(rows), **notes}}
    for name, content in (
        ("model.safetensors", save(arrays)),
        ("config.json", (json.dumps(config, indent=1) + "\n").encode()),
    ):
        part = folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)


def _key(tokens: Sequence[int]) -> int:
    return tokens[0] if len(tokens) == 1 else tokens[0] << 32 | tokens[1]


def _order(arrays: Mapping[str, NDArray[Any]], order: int, vocabulary: int) -> _Order:
    contexts, counts, tokens, chances = (
        arrays[f"{name}.{order}"].astype(np.int64) for name in ("contexts", "counts", "tokens", "chances")
    )
    if contexts.shape != (len(counts), order) or counts.sum() != len(tokens) or len(tokens) != len(chances):
        raise ValueError(f"the arrays of order {order} do not fit each other")
    for values in (contexts, tokens):
        if values.size and not 0 <= values.min() <= values.max() < vocabulary:
            raise ValueError(f"token {values.max()} is outside the target's {vocabulary:,}")
    keys = contexts[:, 0] if order == 1 else contexts[:, 0] << 32 | contexts[:, 1]
    if (np.diff(keys) <= 0).any():
        raise ValueError(f"the contexts of order {order} do not ascend")
    starts = np.concatenate(([0], np.cumsum(counts)))
    return _Order(
        array("q", keys.tobytes()),
        array("i", starts.astype(np.int32).tobytes()),
        array("i", tokens.astype(np.int32).tobytes()),
        array("f", (chances / _SCALE).astype(np.float32).tobytes()),
    )
