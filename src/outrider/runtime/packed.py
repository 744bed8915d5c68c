"""A linear layer of a drafter on the native core, and the bytes that packed layers take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider import _native
from outrider.models.tensor import Tensor

__all__ = ["WEIGHT_KINDS", "PackedLinear", "packed_bytes", "pick_format"]

# The formats that weights may be packed in, the most exact first, and the kinds of tensors that `auto` packs so.
WEIGHT_KINDS = {
    "fp32": ("F32",),
    "bf16": ("BF16", "F16"),
    "int8": ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0"),
    "int4": ("Q4_K", "Q4_1", "Q4_0"),
}


class PackedLinear:
    """y = x W^T + b: matrices of a file stacked along N and packed once. Rows of y do not depend on one another.

    `dtype` is fp32, bf16, int8, int4 or auto, which is what the file holds. The product runs on the process's pool of
    `threads` threads, the one that the target's forward uses. Raises ValueError for shapes that do not fit the format.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        *,
        dtype: str = "auto",
        bias: NDArray[np.float32] | None = None,
        threads: int = 1,
    ) -> None:
        self.dtype = pick_format(dtype, [matrix.kind for matrix in matrices])
        self._threads = threads
        given = [(matrix.kind, matrix.raw, matrix.shape[-1]) for matrix in matrices]
        self._linear = _native.Linear(self.dtype, given, bias, threads=threads)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """[M, K] -> [M, N], contiguous"""
        return self._linear.apply(np.ascontiguousarray(x, np.float32), self._threads)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._linear.bytes


def pick_format(wish: str, kinds: Sequence[str]) -> str:
    """The format of matrices that are stacked: `wish`, or for auto the most exact among what the file has."""
    if wish != "auto":
        return wish
    return next(format for format, known in WEIGHT_KINDS.items() if set(kinds) & set(known))


def packed_bytes(format: str, kinds: Sequence[str], rows: int, columns: int, *, paired: bool = False) -> int:
    """Bytes of `rows` x `columns` once packed, padding included: what `_native.Linear.bytes` tells afterwards.

    `kinds` are those of the stacked matrices in the file; `paired` are gate and up, `rows` both together.
    """
    units = -(-(rows // 2) // 16) if paired else -(-rows // 32)
    groups = -(-columns // 32)
    if format == "fp32":
        return units * -(-columns // 16) * 16 * 128
    if format == "bf16":
        return units * groups * 32 * 64
    if format == "int8":
        return units * groups * (64 + 32 * 32)
    known = set(kinds)
    if known == {"Q4_K"}:
        return units * (-(-groups // 8) * 128 + groups * (64 + 512))
    scales = 64 if known == {"Q4_0"} else 256 if "Q4_K" in known else 128
    return units * groups * (scales + 512)
