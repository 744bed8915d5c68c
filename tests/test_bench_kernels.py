"""`outrider bench kernels`: what it reports, on a tiny model. The figures themselves are nobody's test."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from outrider.bench import kernels
from outrider.core.params import ParameterError
from tiny import tiny_model, write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny_model())


def test_every_dtype_and_number_of_rows_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's keys, ratios that fit their figures, and shares between 0 and 1."""
    monkeypatch.setattr(kernels, "_BLOCK", 4 << 20)
    report = kernels.measure(str(model), threads=1, context=200, dtypes=("fp32", "int8"), rows=(1, 3), rounds=2)
    assert (report["threads"], report["context"]) == (1, 200)
    assert set(report["bandwidth_gb_s"]) == {"1"}
    assert set(report["forward"]) == {"fp32", "int8"}
    for entries in report["forward"].values():
        assert list(entries) == ["1", "3"]
        assert entries["1"]["of_one_row"] == 1
        assert entries["3"]["of_one_row"] == pytest.approx(entries["3"]["ms"] / entries["1"]["ms"])
        assert all(
            e["of_bandwidth"] == pytest.approx(e["gb_s"] / report["bandwidth_gb_s"]["1"]) for e in entries.values()
        )
    assert 0 < report["python_share"] < 1
    assert math.isfinite(report["tree_share"])  # a difference of two medians: its sign is the machine's
    assert all(us > 0 for us in report["draw_us"].values())
    assert all(rate > 0 for rate in report["multiply_gflop_s"].values())


def test_sizes_that_make_no_sense_are_refused(model: Path) -> None:
    """Named, before anything is measured."""
    with pytest.raises(ParameterError, match="context: 0 is not at least 1"):
        kernels.measure(str(model), context=0)
