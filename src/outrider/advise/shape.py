"""A model as sizes: from its file, from the list of known ones, or from its number of parameters alone."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.names import near
from outrider.models.config import DecoderConfig

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles

__all__ = ["BITS", "Shape", "ShapeError", "from_config", "from_files", "known", "named"]

# Bits per weight as they lie in memory, scales included.
BITS = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "int8": 8.5, "int4": 4.5}
_EAGLE_VOCABULARY = 32_000  # draft vocabulary of published EAGLE-3 heads
_MOST = 1e15  # parameters of a model that anybody could mean
_MEDUSA_HEADS = 5  # of published Medusa heads


class ShapeError(ValueError):
    """A model that nothing is known of: names the way out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder. Sizes as in `DecoderConfig`; `hub`, `draft`, `eagle3` and `medusa` are names, where known."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool = False
    bits: float = 16.0  # per weight
    hub: str | None = None
    draft: str | None = None
    eagle3: str | None = None
    medusa: str | None = None

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Of the projection to the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All, the embedding included."""
        return self.layers * self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def read_parameters(self) -> int:
        """Those that a forward reads: all but the rows of the embedding that nobody asked for."""
        return self.layers * self.layer_parameters + self.head_parameters

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bits / 8

    @property
    def read_bytes(self) -> float:
        return self.read_parameters * self.bits / 8

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache per token, in 16 bits."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    @property
    def eagle_parameters(self) -> tuple[int, int]:
        """Of an EAGLE-3 head: those that each guess reads, and those that a step reads once (the fused states)."""
        attention = self.hidden * self.head_dim * (3 * self.heads + 4 * self.kv_heads)  # q, k, v read two states
        vocabulary = min(_EAGLE_VOCABULARY, self.vocabulary)
        return attention + 3 * self.hidden * self.intermediate + vocabulary * self.hidden, 3 * self.hidden**2

    @property
    def medusa_parameters(self) -> int:
        """Of Medusa heads, each with a projection of its own."""
        return _MEDUSA_HEADS * (self.hidden**2 + self.head_parameters)

    def at(self, dtype: str) -> Shape:
        """The same model with weights of another format."""
        return replace(self, bits=BITS[dtype])


@cache
def known() -> dict[str, Shape]:
    """The models of models.json, in bf16."""
    stored: dict[str, Any] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))["models"]
    return {name: Shape(name=name, **sizes) for name, sizes in stored.items()}


def named(text: str) -> Shape:
    """A known model by its short or hub name, or one of about so many parameters, such as 8B or 500M.

    Raises ShapeError for anything else.
    """
    for name, shape in known().items():
        if text.lower() in (name, (shape.hub or "").lower(), (shape.hub or "").lower().split("/")[-1]):
            return shape
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([bm])", text.lower())
    parameters = float(match[1]) * (1e9 if match[2] == "b" else 1e6) if match else 0.0
    if 0 < parameters <= _MOST:
        return _typical(parameters, text)
    raise ShapeError(
        f"model {text!r} is no file here, and its shape is not known (known: {', '.join(known())}): "
        f"give its path, or its size such as 8B{near(text, known())}"
    )


def from_config(config: DecoderConfig, name: str, bits: float = 16.0) -> Shape:
    return Shape(
        name=name,
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        tied=config.tied_embeddings,
        bits=bits,
    )


def from_files(files: ModelFiles) -> Shape:
    """A model on disk, its weights in the format of the file."""
    matrices = [tensor for tensor in files.tensors.values() if len(tensor.shape) == 2]
    values = sum(tensor.shape[0] * tensor.shape[1] for tensor in matrices)
    return from_config(files.config, files.name, 8 * sum(tensor.nbytes for tensor in matrices) / values)


def _typical(parameters: float, name: str) -> Shape:
    """Llama-3.1-8B made larger or smaller in all directions."""
    model = known()["llama-3.1-8b"]
    factor = (parameters / model.parameters) ** (1 / 3)

    def scaled(size: int, step: int) -> int:
        return int(max(step, round(size * factor / step) * step))

    shape = Shape(
        name=name,
        vocabulary=model.vocabulary if parameters > 1e9 else 49_152,
        hidden=scaled(model.hidden, 64),
        layers=scaled(model.layers, 1),
        heads=scaled(model.heads, 1),
        kv_heads=scaled(model.kv_heads, 1),
        head_dim=128,
        intermediate=scaled(model.intermediate, 64),
        tied=parameters < 4e9,
    )
    # the vocabulary does not grow along: the layers' width takes what is left
    left = parameters - shape.head_parameters * (1 if shape.tied else 2)
    wanted = left / shape.layers - shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    return replace(shape, intermediate=max(64, round(wanted / (3 * shape.hidden))))
