"""The same model from every kind of file: equal tensors, equal configuration, equal tokens."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from outrider.models.config import RopeScaling
from outrider.models.load import ModelFiles, open_model
from outrider.models.registry import resolve
from outrider.models.rope_scaling import llama3_divisors
from outrider.models.tensor import KINDS
from tiny import encode, hf_config, tensor, tiny_model, write_gguf, write_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BLOCKS = [kind for kind in KINDS if KINDS[kind].block > 1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are remembered in a cache folder of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def assert_same(got: ModelFiles, wanted: ModelFiles) -> None:
    assert got.tensors.keys() == wanted.tensors.keys()
    for name, part in wanted.tensors.items():
        np.testing.assert_array_equal(got.tensors[name].float32(), part.float32(), err_msg=name)
        assert got.tensors[name].shape == part.shape
    assert got.tokenizer.fingerprint() == wanted.tokenizer.fingerprint()
    assert got.tokenizer.encode("Hello aa 12") == wanted.tokenizer.encode("Hello aa 12")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_folder_equals_memory(tmp_path: Path, family: str, shards: int) -> None:
    """A safetensors folder, single or sharded, gives back the tensors and the configuration that were written."""
    wanted = tiny_model(family=family)
    got = open_model(write_hf(tmp_path / "model", wanted, shards))
    assert_same(got, wanted)
    assert got.config == wanted.config
    assert got.quantisation == "F32"
    assert got.name == "model"


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_memory(tmp_path: Path, family: str) -> None:
    """A GGUF file gives back the same tensors, Q and K rows in Hugging Face's order, and the same config."""
    wanted = tiny_model(family=family)
    got = open_model(write_gguf(tmp_path / "model.gguf", wanted))
    assert_same(got, wanted)
    # GGUF has no name of its own for Mistral: it is a llama there.
    assert got.config == replace(wanted.config, architecture="llama" if family == "mistral" else family)
    assert got.licence == "apache-2.0"


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_heads(tmp_path: Path, tied: bool) -> None:
    """A tied model has no head of its own in either file, an untied one has."""
    wanted = tiny_model(family="qwen3", tied_embeddings=tied)
    for path in (write_hf(tmp_path / "hf", wanted), write_gguf(tmp_path / "m.gguf", wanted)):
        got = open_model(path)
        assert got.config.tied_embeddings is tied
        assert ("head" in got.tensors) is not tied


def test_a_tied_folder_may_repeat_its_head(tmp_path: Path) -> None:
    """Some tied checkpoints store the head too: the embedding counts, as in transformers."""
    untied = tiny_model()
    folder = write_hf(tmp_path / "m", untied)
    (folder / "config.json").write_text(json.dumps(hf_config(untied.config) | {"tie_word_embeddings": True}))
    assert "head" not in open_model(folder).tensors


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_half_precision_folders(tmp_path: Path, dtype: str) -> None:
    """F16 and BF16 folders hold the rounded values, and nothing is lost on the way to float32."""
    wanted = tiny_model(family="qwen2")
    got = open_model(write_hf(tmp_path / "m", wanted, dtype=dtype))
    assert got.quantisation == dtype
    for name, part in wanted.tensors.items():
        rounded = tensor(name, part.float32(), dtype).float32()
        np.testing.assert_array_equal(got.tensors[name].float32(), rounded)
        assert np.abs(rounded - part.float32()).max() <= 2**-8 * np.abs(part.float32()).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_gguf_type(tmp_path: Path, kind: str, family: str) -> None:
    """Each tensor type comes through a GGUF file with the values that the gguf package decodes from the same blocks.

    For a llama the blocks of Q and K rows are moved, never decoded and encoded again.
    """
    sizes = {"hidden": 256, "heads": 4, "head_dim": 64, "intermediate": 256, "layers": 1}
    wanted = tiny_model(family=family, kind=kind, **sizes)
    got = open_model(write_gguf(tmp_path / "m.gguf", wanted, kind))
    assert got.quantisation == kind
    for name, part in got.tensors.items():
        np.testing.assert_array_equal(part.raw, wanted.tensors[name].raw, err_msg=name)
        oracle = dequantize(part.raw, GGMLQuantizationType[part.kind]).reshape(part.shape)
        np.testing.assert_array_equal(part.float32(), oracle, err_msg=name)


ERRORS = {"Q8_0": 0.01, "Q4_0": 0.1, "Q4_1": 0.1, "Q5_0": 0.05, "Q5_1": 0.05, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.03}


@pytest.mark.parametrize(("kind", "error"), ERRORS.items())
def test_blocks_hold_the_values(kind: str, error: float) -> None:
    """What tests call quantised weights are the weights, up to the format's coarseness (root mean square of error)."""
    values = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    decoded = tensor("x", values, kind).float32()
    assert 0 < np.sqrt(np.mean((decoded - values) ** 2)) < error


def test_mixed_types_are_named_by_the_most_common(tmp_path: Path) -> None:
    """A file of mixed types is called after the one that most of the layers' weights are in; each keeps its own."""
    wanted = tiny_model(hidden=256, intermediate=256, heads=4, head_dim=64)
    kinds = {"embed": "Q8_0", "layers.0.q": "Q6_K", "head": "F16"}
    got = open_model(write_gguf(tmp_path / "m.gguf", wanted, lambda name: kinds.get(name, "Q4_K")))
    assert got.quantisation == "Q4_K"
    assert {name: got.tensors[name].kind for name in kinds} == kinds


def test_rows_are_put_back_in_order(tmp_path: Path) -> None:
    """The order of Q and K rows in a llama GGUF is the one of the format's own converter, written down independently.

    The converter splits each head's rows into 2 halves of head_dim / 2 and swaps these two axes.
    """
    wanted = tiny_model(heads=4, kv_heads=2, head_dim=16, qkv_bias=True)
    file = open_model(write_gguf(tmp_path / "m.gguf", wanted))
    for name, heads in (("q", 4), ("k", 2)):
        plain = wanted.tensors[f"layers.1.{name}"].float32()
        converted = plain.reshape(heads, 2, 8, plain.shape[1]).swapaxes(1, 2).reshape(plain.shape)
        part = file.tensors[f"layers.1.{name}"]
        np.testing.assert_array_equal(part.stored.view(np.float32), converted)
        np.testing.assert_array_equal(part.raw.view(np.float32), plain)
        bias = file.tensors[f"layers.1.{name}_bias"]
        np.testing.assert_array_equal(bias.float32(), wanted.tensors[f"layers.1.{name}_bias"].float32())
        assert (bias.stored != bias.raw).any()
    assert file.tensors["layers.1.v"].order is None


def test_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    """Opening a model copies no weights: what a tensor gives is the file's own memory, read-only."""
    wanted = tiny_model(family="qwen2")
    for path in (write_hf(tmp_path / "hf", wanted), write_gguf(tmp_path / "m.gguf", wanted)):
        raw = open_model(path).tensors["layers.0.gate"].raw
        assert not raw.flags.owndata
        assert not raw.flags.writeable
        values = open_model(path).tensors["layers.0.gate"].float32()
        assert values.flags.writeable
        assert values.flags.aligned


SCALINGS = [
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeScaling("yarn", 4.0, 128, beta_fast=32.0, beta_slow=1.0),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling.kind}-{scaling.factor:g}")
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "gguf"])
def test_rope_scaling(tmp_path: Path, scaling: RopeScaling, form: str) -> None:
    """Linear, Llama 3 and YaRN scaling are read from transformers' new and old form and from GGUF, where Llama 3's is
    a tensor of divisors."""
    wanted = tiny_model(rope_scaling=scaling, rope_theta=500000.0, head_dim=64, context=512)
    if form == "gguf":
        got = open_model(write_gguf(tmp_path / "m.gguf", wanted))
    else:
        got = open_model(write_hf(tmp_path / "m", wanted, old_rope=form == "rope_scaling"))
    assert got.config.rope_scaling == scaling
    assert got.config.rope_theta == 500000.0


def test_llama3_divisors() -> None:
    """The divisors that stand for Llama 3's scaling are those of its definition, here frequency by frequency.

    Wavelengths under 8192 / 4 stay, over 8192 are divided by the factor, and in between linearly in 8192 / length.
    """
    factor, theta, head_dim = 32.0, 500000.0, 64
    wanted = []
    for i in range(head_dim // 2):
        length = 2 * np.pi / theta ** (-2 * i / head_dim)
        smooth = min(1.0, max(0.0, (8192 / length - 1.0) / (4.0 - 1.0)))
        wanted.append(1.0 / ((1.0 - smooth) / factor + smooth))
    got = llama3_divisors(factor, theta, head_dim)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)
    assert got[0] == 1.0
    assert got[-1] == factor
    assert 1.0 < np.median(got) < factor


def test_yarn_attention_factor(tmp_path: Path) -> None:
    """YaRN's own attention factor and ramp come through config.json."""
    scaling = RopeScaling("yarn", 4.0, 128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)
    got = open_model(write_hf(tmp_path / "m", tiny_model(rope_scaling=scaling)))
    assert got.config.rope_scaling == scaling


WINDOWS: list[tuple[str, dict[str, Any], int]] = [
    ("mistral", {"sliding_window": 128}, 128),
    ("mistral", {"sliding_window": 4096}, 512),
    ("mistral", {"sliding_window": None}, 512),
    ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, 512),
    ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, 128),
    ("qwen3", {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 512),
    ("llama", {"sliding_window": 128}, 512),
]


@pytest.mark.parametrize(("family", "settings", "context"), WINDOWS)
def test_sliding_windows_limit_the_context(tmp_path: Path, family: str, settings: dict[str, Any], context: int) -> None:
    """Within a sliding window full attention is the same: the context ends there. Windows that are off do not count."""
    wanted = tiny_model(family=family)
    folder = write_hf(tmp_path / "m", wanted)
    (folder / "config.json").write_text(json.dumps(hf_config(wanted.config) | settings))
    assert open_model(folder).config.context == context


def test_every_end_token_counts(tmp_path: Path) -> None:
    """generation_config.json's list of end tokens wins over config.json's."""
    folder = write_hf(tmp_path / "m", tiny_model())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0, 5]}))
    assert open_model(folder).config.eos == (5, 0)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": 7})
    )
    assert open_model(folder).config.eos == (7,)


def test_sha256_is_the_files(tmp_path: Path) -> None:
    """sha256() is the file's own, is remembered, and changes with the file."""
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    files = open_model(path)
    first = files.sha256()
    assert first == files.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    write_gguf(path, tiny_model(seed=1))
    assert open_model(path).sha256() == hashlib.sha256(path.read_bytes()).hexdigest() != first


def test_sha256_of_a_folder_covers_its_weights(tmp_path: Path) -> None:
    """Folders that differ in one shard or in the tokenizer alone have different hashes; equal ones the same."""
    wanted = tiny_model()
    one, two = write_hf(tmp_path / "one", wanted, 2), write_hf(tmp_path / "two", wanted, 2)
    assert open_model(one).sha256() == open_model(two).sha256()
    write_hf(two, tiny_model(seed=1), 2)
    assert open_model(one).sha256() != open_model(two).sha256()


@pytest.mark.parametrize("seed", range(3))
def test_tiny_models_are_deterministic(seed: int) -> None:
    """The same arguments give the same tiny model, other seeds another."""
    one, two = tiny_model(seed=seed), tiny_model(seed=seed)
    assert one.sha256() == two.sha256() != tiny_model(seed=seed + 1).sha256()
    assert encode(one.tensors["head"].float32(), "F32").nbytes == one.tensors["head"].nbytes


@pytest.mark.parametrize("block", BLOCKS)
def test_block_sizes_are_the_formats(block: str) -> None:
    """Our table of block sizes is the gguf package's."""
    from gguf.constants import GGML_QUANT_SIZES

    assert GGML_QUANT_SIZES[GGMLQuantizationType[block]] == (KINDS[block].block, KINDS[block].size)


def test_opening_imports_little(tmp_path: Path) -> None:
    """Opening a model brings in neither torch nor transformers, nor the slower of our own libraries: it starts fast."""
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    code = (
        "import sys; from outrider.models.load import open_model; files = open_model(sys.argv[1]); "
        "files.tokenizer.encode('a'); files.tensors['norm'].float32(); "
        "slow = {'torch', 'transformers', 'gguf', 'jinja2', 'huggingface_hub', 'safetensors'}; "
        "print(sorted(slow & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_smollm2_opens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 opens, tokenizer included, in less than half a second of processor time (about 0.1 on a free machine)."""
    monkeypatch.undo()
    path = resolve("smollm2-135m")
    started = time.process_time()
    assert open_model(path).tokenizer.encode("Hi")
    assert time.process_time() - started < 0.5
