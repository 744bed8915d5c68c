"""The measurement of accuracy measures what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from outrider.runtime.reference import ReferenceRunner
from tiny import tiny_model, write_gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import accuracy

TEXT = "Measure twice, cut once. A carpenter who measures once cuts twice, and pays for the wood. " * 20


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_emulated_decoder_is_the_reference_runner(family: str) -> None:
    """Without rounding, the decoder that Q8_0 is emulated in has the runner's logits; with it, others."""
    files = tiny_model(family=family)
    window = np.random.default_rng(2).integers(1, 97, 100).tolist()
    runner = ReferenceRunner(files, cache_tokens=accuracy.WINDOW, page_size=16)
    wanted = np.concatenate(list(accuracy.Ran(runner).logits(window)))
    exact = np.concatenate(list(accuracy.Emulated(files, lambda x: x).logits(window)))
    rounded = np.concatenate(list(accuracy.Emulated(files, accuracy.q8_0).logits(window)))
    assert np.abs(exact - wanted).max() < 1e-4
    assert 1e-3 < np.abs(rounded - wanted).mean() < 0.2


def test_q8_0_is_that_of_the_format() -> None:
    """The rounding of weights is that of the gguf package, bit for bit, zero groups included."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    x[3, 32:64] = 0
    stored = quantize(x, GGMLQuantizationType.Q8_0)
    assert np.array_equal(accuracy.q8_0(x), dequantize(stored, GGMLQuantizationType.Q8_0))


def test_figures_of_known_laws() -> None:
    """p = (1/2, 1/4, 1/4) against q = (1/4, 1/2, 1/4): KL is log(2) / 4, agreement 0; against itself 0 and 1."""
    p = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    q = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    other, same = accuracy.Tally(), accuracy.Tally()
    other.add(p, q, np.array([0]))
    same.add(p, p, np.array([0]))
    assert other.figures()["kl_mean"] == pytest.approx(np.log(2) / 4)
    assert other.figures()["perplexity"] == pytest.approx(4)
    assert other.figures()["argmax_agreement"] == 0
    assert same.figures() == pytest.approx({"perplexity": 2, "kl_mean": 0, "kl_p99": 0, "argmax_agreement": 1})


def test_every_kind_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command measures every kind on a tiny model: float32 has no divergence, int4 more than int8 than bf16."""
    model = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = [str(model), "--text", str(text), "--tokens", "600", "--threads", "1", "--json", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments])
    accuracy.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out").read_text())
    assert (result["tokens"], list(result["kinds"])) == (1024, ["fp32", *accuracy.KINDS, "Q8_0", "numpy"])
    divergence = {name: figures["kl_mean"] for name, figures in result["kinds"].items()}
    assert divergence["fp32"] == divergence["auto"] == 0
    assert abs(divergence["numpy"]) < 1e-6 < divergence["bf16"] < divergence["int8"] < divergence["int4"]


def test_a_short_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with too few tokens is refused with both numbers."""
    model = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    (tmp_path / "text.txt").write_text("short")
    monkeypatch.setattr(sys, "argv", ["accuracy.py", str(model), "--text", str(tmp_path / "text.txt")])
    with pytest.raises(SystemExit, match="5 tokens, 20,481 are needed"):
        accuracy.main()
