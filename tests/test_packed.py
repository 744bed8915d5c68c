"""Packed layers of drafters: the product of what was packed, row by row, and bytes that are known before."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.runtime.load import Loaded, forecast
from outrider.runtime.packed import PackedLinear, packed_bytes
from rigs import Rig, files, loaded
from tiny import tensor


def matrix(kind: str, rows: int = 150, columns: int = 256):
    return tensor("w", np.random.default_rng(rows).standard_normal((rows, columns), np.float32) / 16, kind)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "fp32"), ("BF16", "bf16"), ("Q8_0", "int8"), ("Q4_1", "int4")])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_its_bits_whatever_stands_beside_it(kind: str, dtype: str, threads: int) -> None:
    """auto takes the file's format; the product is near the exact one; 700 rows at once equal each row alone."""
    w = matrix(kind)
    layer = PackedLinear([w], threads=threads)
    assert layer.dtype == dtype
    x = np.random.default_rng(1).standard_normal((700, 256), np.float32)
    y = layer(x)
    np.testing.assert_allclose(y, x @ w.float32().T, atol=0.15 if dtype != "fp32" else 1e-4)
    for row in (0, 3, 511, 512, 699):
        assert np.array_equal(layer(x[row : row + 1])[0], y[row])
    assert np.array_equal(PackedLinear([w], threads=1)(x[5:20]), y[5:20])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_bytes_are_known_before_packing(dtype: str, kind: str) -> None:
    w = matrix(kind, 70)
    assert packed_bytes(dtype, [kind], 70, 256) == PackedLinear([w], dtype=dtype).nbytes


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_a_model_takes_the_bytes_that_were_forecast(runner: str) -> None:
    model: Loaded = loaded(files(), Rig(runner=runner))
    held = model.runner.memory()
    told = forecast(files(), runner=runner, dtype="fp32", cache_tokens=2048, page_size=16)
    for purpose in ("weights", "cache"):
        assert told[purpose] == pytest.approx(held[purpose], rel=0.05)
