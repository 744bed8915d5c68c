"""The native core: see kernels/native/module.cpp and bind_sampling.cpp. Letters as in runtime/runner.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Feed = tuple[int, Sequence[int], Sequence[int], Sequence[int] | None, Sequence[int] | None]

def isa() -> str:
    """The instruction set in use: avx512, avxvnni, avx2 or portable. The environment's OUTRIDER_ISA overrides it."""

def cache_bytes(kv_dtype: str, layers: int, kv_heads: int, head_dim: int, slots: int) -> int:
    """Bytes of address space that a decoder's cache takes."""

def workspace_bytes(shape: Mapping[str, Any], fusion: Mapping[str, Any], threads: int) -> int:
    """Bytes of a decoder's workspace once it has met a long prompt, but for its logits."""

class Decoder:
    def __init__(
        self,
        *,
        shape: Mapping[str, Any],  # a DecoderConfig as a dict, and `outputs`: the rows of the head
        fusion: Mapping[str, Any],  # of an EAGLE head: version, states, norm_before_residual; else empty
        tensors: Mapping[str, tuple[str, NDArray[np.uint8], int]],  # name -> kind, raw [rows, bytes per row], columns
        formats: Mapping[str, str],  # "head", "layers.0.qkv", ".o" ... -> fp32, bf16, int8 or int4
        frequencies: NDArray[np.float64],  # [head_dim / 2]
        rope_factor: float,
        kv_dtype: str,
        page_count: int,
        page_size: int,
        threads: int,
        tokens: NDArray[np.int64] | None,  # the target's, by row of a head that knows some only
        head: Decoder | None,  # whose head is shared
    ) -> None: ...
    def forward(
        self, feeds: Sequence[_Feed], wants: Sequence[int], layers: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Feeds: (committed rows, pages, pending tokens, tree tokens, tree parents) -> [scored rows, V], [M, W, D]"""
    def grow(
        self, plan: tuple[int, float, float, Sequence[int], int, float], sprouts: Sequence[tuple[Any, ...]]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], dict[int, NDArray[np.float64]]]]:
        """A plan (width, least, reach, layers, vocabulary, gain) and sprouts as runtime/native.py writes them ->
        trees: tokens, parents, chances, laws"""
    def move(self, source: Sequence[int], target: Sequence[int]) -> None: ...
    def memory(self) -> dict[str, int]: ...
    @property
    def row_bytes(self) -> int: ...

class NativeShaping:
    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        bias: list[tuple[int, float]],
        min_tokens: int,
        ends: list[int],
        seed: int,
        prompt_length: int,
        logprobs: int,
    ) -> None: ...
    def draw(
        self,
        row: NDArray[np.float32],
        position: int,
        path: Sequence[int],
        tokens: Sequence[int],
        mask: NDArray[np.uint32] | None,
    ) -> tuple[int, float | None, tuple[tuple[int, float], ...]]: ...
    def law(
        self,
        row: NDArray[np.float32],
        position: int,
        path: Sequence[int],
        tokens: Sequence[int],
        mask: NDArray[np.uint32] | None,
    ) -> NDArray[np.float64]: ...
    def top(
        self,
        row: NDArray[np.float32],
        k: int,
        position: int,
        path: Sequence[int],
        tokens: Sequence[int],
        mask: NDArray[np.uint32] | None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...
    def ranked(
        self,
        row: NDArray[np.float32],
        known: NDArray[np.int32] | None,
        vocabulary: int,
        k: int,
        position: int,
        path: Sequence[int],
        tokens: Sequence[int],
        mask: NDArray[np.uint32] | None,
    ) -> tuple[tuple[int, float], ...]: ...

def top(row: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...
def log_softmax(row: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]: ...
def gumbel(seed: int, position: int, count: int, stream: int) -> NDArray[np.float64]: ...
def draw_children(q: NDArray[np.float64], count: int, seed: int, position: int, stream: int) -> tuple[int, ...]: ...

class Reader:
    """A block of memory larger than any cache; `read` reads it once with so many threads and returns seconds."""

    def __init__(self, bytes: int) -> None: ...
    def read(self, threads: int) -> float: ...

class Linear:
    """A linear layer y = x W^T + b with packed weights. Sources: (kind, raw [rows, bytes per row], columns)."""

    def __init__(
        self,
        format: str,
        sources: Sequence[tuple[str, NDArray[np.uint8], int]],
        bias: NDArray[np.float32] | None = None,
        paired: bool = False,
        group: int = 0,
        threads: int = 0,
    ) -> None: ...
    def multiply(
        self,
        x: NDArray[np.float32],
        splits: Sequence[int] = (),
        add_to: NDArray[np.float32] | None = None,
        swiglu: bool = False,
        first_row: int = 0,
    ) -> NDArray[np.float32]: ...
    @property
    def bytes(self) -> int: ...
    def apply(self, x: NDArray[np.float32], threads: int) -> NDArray[np.float32]:
        """[M, K] -> [M, N], any M, on the process's pool of `threads` threads."""
