"""A tensor as it lies in its file: raw blocks, memory-mapped, decoded only when asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelError

__all__ = ["KINDS", "Kind", "Tensor", "bfloat16_bits"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A storage format: `block` values along a row take `size` bytes."""

    name: str
    block: int
    size: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; `columns` is a multiple of `block`."""
        return columns // self.block * self.size


KINDS = {
    kind.name: kind
    for kind in (
        Kind("F32", 1, 4),
        Kind("F16", 1, 2),
        Kind("BF16", 1, 2),
        Kind("Q8_0", 32, 34),
        Kind("Q4_0", 32, 18),
        Kind("Q4_1", 32, 20),
        Kind("Q5_0", 32, 22),
        Kind("Q5_1", 32, 24),
        Kind("Q4_K", 256, 144),
        Kind("Q5_K", 256, 176),
        Kind("Q6_K", 256, 210),
    )
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix [rows, columns] or a vector [n], in the format of its file.

    `stored` [rows, bytes per row] is the file's own memory, read-only; a vector is one row. `order`, where given, says
    which stored row is row i: GGUF stores the Q and K rows of some families in another order than Hugging Face.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stored: NDArray[np.uint8] = field(repr=False)
    order: NDArray[np.intp] | None = field(default=None, repr=False)

    @classmethod
    def from_float32(cls, name: str, values: NDArray[np.float32]) -> Self:
        """An F32 tensor over the values themselves, such as the weights of a head that was just trained."""
        data = np.ascontiguousarray(values, np.float32)
        return cls.over(name, "F32", data.shape, data.reshape(-1).view(np.uint8))

    @property
    def raw(self) -> NDArray[np.uint8]:
        """The blocks in row order, contiguous. [rows, bytes per row]; a copy only where rows are reordered.

        The memory starts at no particular alignment: safetensors files promise none.
        """
        if self.order is None:
            return self.stored
        if len(self.shape) == 1:
            return self.stored.reshape(self.shape[0], -1)[self.order].reshape(1, -1)
        return self.stored[self.order]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes

    def float32(self) -> NDArray[np.float32]:
        """The values, in `shape`: a fresh array that the caller owns.

        Block formats are decoded by the gguf package, the format's own reference.
        """
        if self.kind == "F32":
            return np.array(self.raw).view("<f4").reshape(self.shape)
        if self.kind == "F16":
            return np.array(self.raw).view("<f2").astype(np.float32).reshape(self.shape)
        if self.kind == "BF16":
            bits = np.array(self.raw).view("<u2").astype(np.uint32)
            bits <<= 16  # bfloat16 is the upper half of a float32
            return bits.view(np.float32).reshape(self.shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(self.raw, GGMLQuantizationType[self.kind])
        return np.ascontiguousarray(values, np.float32).reshape(self.shape)

    @classmethod
    def over(cls, name: str, kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> Self:
        """A tensor over `data`, the flat bytes of its rows in order.

        Raises ModelError for a format that is not read, a shape that its blocks do not fit, or a wrong number of bytes.
        """
        known = KINDS.get(kind)
        if known is None:
            raise ModelError(f"tensor {name} has type {kind}, which is not read (these are: {', '.join(KINDS)})")
        if len(shape) not in (1, 2) or min(shape) < 1:
            raise ModelError(f"tensor {name} has shape {list(shape)}: a vector or a matrix is needed")
        columns = shape[-1]
        if columns % known.block:
            raise ModelError(f"tensor {name} has rows of {columns} values, but {kind} blocks have {known.block}")
        rows = shape[0] if len(shape) == 2 else 1
        width = known.row_bytes(columns)
        if data.nbytes != rows * width:
            raise ModelError(f"tensor {name} has {data.nbytes} bytes, but {list(shape)} in {kind} takes {rows * width}")
        return cls(name, kind, shape, data.reshape(rows, width))


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even: numpy has no type for it. Any shape -> the same."""
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
