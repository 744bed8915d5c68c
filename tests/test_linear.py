"""The native linear layers: right values, weights kept exactly, the same bits for a row whatever stands beside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider import _native

Source = tuple[str, NDArray[np.uint8], int]
Floats = NDArray[np.float32]

FORMATS = ("fp32", "bf16", "int8", "int4")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
K_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def source(kind: str, rows: int, columns: int, seed: int = 0) -> Source:
    """Random weights as they lie in a file. gguf quantises to no K-quants: those are random blocks, small scales."""
    rng = np.random.default_rng(seed)
    if kind in K_BLOCK_BYTES:
        blocks = columns // 256
        raw = rng.integers(0, 256, (rows, blocks, K_BLOCK_BYTES[kind]), dtype=np.uint8)
        halves = rng.uniform(0.5e-3, 1.5e-3, (2, rows, blocks, 1)).astype(np.float16).view(np.uint8)
        if kind == "Q6_K":
            raw[:, :, 208:210] = halves[0]
        else:
            raw[:, :, 0:2], raw[:, :, 2:4] = halves
        return kind, raw.reshape(rows, -1), columns
    weights = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    raw = weights if kind == "F32" else quants.quantize(weights, GGMLQuantizationType[kind])
    return kind, np.ascontiguousarray(raw).view(np.uint8), columns


def values(given: Source) -> Floats:
    kind, raw, _ = given
    return quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float32)


def activations(rows: int, columns: int, seed: int = 1) -> Floats:
    """Rows of different sizes, with an outlier in each and one row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)) * 3)
    x[np.arange(rows), rng.integers(0, columns, rows)] *= 20
    x[rows // 2] = 0
    return x.astype(np.float32)


def rounded(x: Floats, group: int) -> NDArray[np.float64]:
    """Activations as int8 in groups: scale = largest / 127, rounded to nearest even."""
    groups = x.reshape(x.shape[0], -1, group)
    peak = np.abs(groups).max(axis=2, keepdims=True)
    safe = np.where(peak > 0, peak, np.float32(1))
    q = np.rint(groups * (np.float32(127) / safe))
    return (q.astype(np.float64) * (peak * np.float32(1 / 127))).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantises_like_gguf(kind: str) -> None:
    """A row of every kind reads as gguf's own reader gives it, bit for bit."""
    given = source(kind, 5, 768)
    assert np.array_equal(_native.dequantise(*given), values(given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_product(format: str, kind: str) -> None:
    """y = x W^T for the weights that the layer holds, up to float rounding: integers are exact, bf16 rounds inputs.

    Odd N, so that the last unit is not full; M beyond one block of 16 rows.
    """
    given = source(kind, 77, 512)
    x = activations(19, 512)
    layer = _native.Linear(format, [given])
    held = layer.dequantised().astype(np.float64)
    seen = rounded(x, layer.group) if layer.group else x.astype(np.float64)
    size = np.abs(seen) @ np.abs(held).T
    tolerance = 2.0**-8 if format == "bf16" else 2.0**-24 * 64
    assert np.all(np.abs(layer.multiply(x) - seen @ held.T) <= tolerance * size + 1e-30)


@pytest.mark.parametrize(
    ("format", "kind"),
    [("fp32", kind) for kind in KINDS]
    + [("bf16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_0"), ("int4", "Q4_1"), ("int4", "Q4_K")],
)
def test_keeps_weights_exactly(format: str, kind: str) -> None:
    """What a format can hold, it holds without loss."""
    given = source(kind, 45, 512)
    assert np.array_equal(_native.Linear(format, [given]).dequantised(), values(given))


@pytest.mark.parametrize(("format", "bound"), [("bf16", 2.0**-8), ("int8", 1 / 127), ("int4", 1 / 15)])
def test_rounds_within_half_a_step(format: str, bound: float) -> None:
    """Other weights move by half a step of their group's largest value (int4: range) at most."""
    given = source("F32", 40, 256)
    layer = _native.Linear(format, [given])
    w, held = values(given), layer.dequantised()
    if format == "bf16":
        assert np.all(np.abs(held - w) <= np.abs(w) * bound)
        return
    groups = w.reshape(40, -1, layer.group)
    size = np.ptp(groups, axis=2) if format == "int4" else np.abs(groups).max(axis=2)
    step = (size * bound)[:, :, None]
    assert np.all(np.abs(held.reshape(groups.shape) - groups) <= step * 0.52)


def test_q4_k_takes_no_more_than_its_file() -> None:
    """Two bytes per group and four per 256 weights of scales: 4.625 bits a weight, 4.5 in the file."""
    layer = _native.Linear("int4", [source("Q4_K", 64, 512)])
    assert layer.bytes == 64 * 512 * 37 // 64


@pytest.mark.parametrize("format", FORMATS)
def test_row_invariance(format: str) -> None:
    """A row has the same bits alone and among up to 70 others, wherever it lies, however threads share the units."""
    rng = np.random.default_rng(2)
    x = activations(96, 256)
    for kind, group in (("F32", 0), ("Q4_K", 0), ("Q4_0", 0), ("Q8_0", 0), ("F32", 32), ("F32", 128)):
        if group and (format != "int8"):
            continue
        layer = _native.Linear(format, [source(kind, 150, 256)], group=group)
        alone = np.concatenate([layer.multiply(x[row : row + 1]) for row in range(len(x))])
        for count in range(1, 71):
            rows = rng.permutation(len(x))[:count]
            splits = sorted(rng.integers(0, layer.units + 1, rng.integers(0, 4)).tolist())
            among = layer.multiply(x[rows], splits=splits, first_row=int(rng.integers(0, 20)))
            assert np.array_equal(among, alone[rows]), (kind, group, count)


@pytest.mark.parametrize("format", FORMATS)
def test_stacked_sources(format: str) -> None:
    """q, k and v in one layer give what each gives alone, with their bias, also in a unit with rows of two."""
    parts = [source(kind, rows, 256, seed=rows) for kind, rows in (("Q4_1", 48), ("Q4_1", 20), ("Q4_1", 33))]
    bias = np.random.default_rng(3).standard_normal(101).astype(np.float32)
    x = activations(5, 256)
    stacked = _native.Linear(format, parts, bias=bias)
    alone = np.concatenate([_native.Linear(format, [part]).multiply(x) for part in parts], axis=1)
    assert stacked.shape == (101, 256)
    assert np.array_equal(stacked.multiply(x), alone + bias)


def test_stack_of_different_kinds_keeps_them_exactly() -> None:
    """Q4_K, Q4_0 and Q4_1 rows in one int4 layer, each with its own scales."""
    parts = [source(kind, rows, 256) for kind, rows in (("Q4_K", 40), ("Q4_0", 8), ("Q4_1", 30))]
    layer = _native.Linear("int4", parts)
    assert np.array_equal(layer.dequantised(), np.concatenate([values(part) for part in parts]))


@pytest.mark.parametrize("rows", [16, 40, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_swiglu(format: str, rows: int) -> None:
    """A pair of gate and up gives silu(gate) * up in one pass: bit-equal products, silu to 1e-6."""
    gate, up = source("Q4_1", rows, 256, seed=1), source("Q4_1", rows, 256, seed=2)
    bias = np.random.default_rng(4).standard_normal(2 * rows).astype(np.float32)
    pair = _native.Linear(format, [gate, up], bias=bias, paired=True)
    x = activations(18, 256)
    g = _native.Linear(format, [gate], bias=bias[:rows]).multiply(x).astype(np.float64)
    u = _native.Linear(format, [up], bias=bias[rows:]).multiply(x).astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = g / (1 + np.exp(-g)) * u
    got = pair.multiply(x, swiglu=True)
    assert got.shape == (18, rows)
    # Below -87, e^-x is taken as e^87: what is left is nothing.
    assert np.all(np.abs(got - wanted) <= 1e-6 * np.abs(wanted) + 1e-30)
    if format in ("fp32", "int4"):  # which hold Q4_1 exactly
        assert np.array_equal(pair.dequantised(), np.concatenate([values(gate), values(up)]))


@pytest.mark.parametrize("format", FORMATS)
def test_residual_is_added_once(format: str) -> None:
    """add_to gives the sum of the two, rounded once."""
    layer = _native.Linear(format, [source("Q8_0", 70, 128)])
    x = activations(9, 128)
    residual = activations(9, 70, seed=5)
    assert np.array_equal(layer.multiply(x, add_to=residual), residual + layer.multiply(x))


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("columns", [1, 7, 33, 100])
def test_any_number_of_columns(format: str, columns: int) -> None:
    """Formats without groups take any K."""
    given = source("F32", 3, columns)
    x = activations(4, columns)
    layer = _native.Linear(format, [given])
    wide, weights = x.astype(np.float64), values(given).astype(np.float64)
    assert np.all(np.abs(layer.multiply(x) - wide @ weights.T) <= np.abs(wide) @ np.abs(weights).T * 2.0**-7)


def test_strided_rows() -> None:
    """Rows may lie apart, as slices of a larger tensor do."""
    kind, raw, columns = source("Q8_0", 12, 64)
    assert np.array_equal(
        _native.Linear("int8", [(kind, raw[::2], columns)]).dequantised(),
        _native.Linear("int8", [(kind, raw, columns)]).dequantised()[::2],
    )


def test_groups_of_int8() -> None:
    """Groups of 32 unless others are asked for; wider groups stream fewer bytes."""
    f32 = source("F32", 64, 256)
    assert _native.Linear("int8", [f32]).group == 32
    sizes = [_native.Linear("int8", [f32], group=group).bytes for group in (32, 64, 128)]
    assert [layer_bytes / (64 * 256) for layer_bytes in sizes] == [1 + 2 / group for group in (32, 64, 128)]


def refused(match: str, format: str, sources: list[Source], **options: object) -> None:
    with pytest.raises(ValueError, match=match):
        _native.Linear(format, sources, **options)


def test_refuses_what_does_not_fit() -> None:
    """Bad shapes, kinds and values are refused by name, before anything is packed."""
    f32 = source("F32", 4, 48)
    refused("48 columns are not whole groups of 32", "int8", [f32])
    refused("48 columns are not whole groups of 32", "int4", [f32])
    refused("96 columns are not whole groups of 64", "int8", [source("F32", 4, 96)], group=64)
    refused("a group of 48 columns", "int8", [source("F32", 4, 96)], group=48)
    refused("int4 has groups of 32 columns, not of 64", "int4", [source("F32", 4, 64)], group=64)
    refused("at least one source", "fp32", [])
    refused("48 and 64 columns cannot be stacked", "fp32", [f32, source("F32", 4, 64)])
    refused("as many rows as each other", "fp32", [f32, source("F32", 5, 48)], paired=True)
    refused("as many rows as each other", "fp32", [f32], paired=True)
    refused("unknown weight format int3", "int3", [f32])
    refused("unknown tensor kind Q3_K", "fp32", [("Q3_K", f32[1], 256)])
    refused("not whole blocks of 32 of Q8_0", "fp32", [("Q8_0", f32[1], 33)])
    refused("contiguous bytes, not 192", "fp32", [("F32", f32[1], 49)])
    refused("a bias of 3 values for 4 rows", "fp32", [f32], bias=np.zeros(3, np.float32))
    broken = np.zeros((2, 32), np.float32)
    broken[1, 5] = np.nan
    refused("not finite", "int8", [("F32", broken.view(np.uint8), 32)])
    refused("not finite", "int4", [("F32", broken.view(np.uint8), 32)])
    refused("no int8 scale", "int8", [("F32", np.full((1, 32), 1e9, np.float32).view(np.uint8), 32)])
    layer = _native.Linear("fp32", [f32])
    with pytest.raises(ValueError, match="rows of 47 values for a layer of 48"):
        layer.multiply(np.zeros((1, 47), np.float32))
    with pytest.raises(ValueError, match="from 1 to 512"):
        layer.multiply(np.zeros((513, 48), np.float32))


def checksum(format: str) -> str:
    """Of products whose every operation all instruction sets with FMA do alike."""
    x = activations(21, 256)
    digest = hashlib.sha256()
    for kind in KINDS:
        digest.update(_native.Linear(format, [source(kind, 70, 256)]).multiply(x).tobytes())
    return digest.hexdigest()


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OUTRIDER_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", [isa for isa in _native.isas() if isa != _native.isa()])
def test_every_instruction_set(isa: str) -> None:
    """This file passes with each instruction set that the machine has; where it has FMA, with the same bits."""
    result = run(
        isa, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-k", "not every_instruction_set and not override"
    )
    assert result.returncode == 0, result.stdout[-3000:]
    if "portable" in (isa, _native.isa()):
        return
    for format in ("fp32", "int8", "int4"):
        path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
        result = run(isa, "-c", f"{path}; import test_linear; print(test_linear.checksum({format!r}))")
        assert result.stdout.strip() == checksum(format)


def test_isa_override() -> None:
    """OUTRIDER_ISA chooses, and a name that is not to be had is refused with what there is."""
    code = "from outrider import _native; print(_native.isa())"
    assert run("portable", "-c", code).stdout.strip() == "portable"
    result = run("sse9", "-c", code)
    assert result.returncode != 0
    assert "OUTRIDER_ISA=sse9 is unknown: choose one of" in result.stderr
