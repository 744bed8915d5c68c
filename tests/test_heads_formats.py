"""Heads in every layout that people publish, written here as small random checkpoints, are read as what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from outrider.kernels.reference_heads import EagleForm, EagleReference, medusa_logits
from outrider.models.errors import ModelError
from outrider.models.heads import (
    Eagle,
    EagleConfig,
    Medusa,
    MedusaConfig,
    eagle_shapes,
    is_head,
    medusa_shapes,
    read_head,
    write_eagle,
    write_medusa,
)
from outrider.models.rotary import rotary_table
from tiny import tiny_config

Arrays = dict[str, NDArray[Any]]
TARGET = tiny_config(layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)
TOKENS = np.array([0, 3, 4, 9, 17, 40, 41, 96])
RNG = np.random.default_rng(0)


def noise(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


def layer(prefix: str, width: int = 64, *, norms: tuple[str, ...] = ()) -> Arrays:
    """One decoder layer under Hugging Face's names."""
    found = {
        "self_attn.q_proj.weight": noise(64, width),
        "self_attn.k_proj.weight": noise(32, width),
        "self_attn.v_proj.weight": noise(32, width),
        "self_attn.o_proj.weight": noise(64, 64),
        "mlp.gate_proj.weight": noise(96, 64),
        "mlp.up_proj.weight": noise(96, 64),
        "mlp.down_proj.weight": noise(64, 96),
        "post_attention_layernorm.weight": noise(64),
    }
    return {prefix + name: value for name, value in {**found, **{norm: noise(64) for norm in norms}}.items()}


def shapes_config(**more: Any) -> dict[str, Any]:
    """A Llama config of the target's shapes."""
    return {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **more,
    }


def mapping() -> Arrays:
    return {"d2t": TOKENS - np.arange(8), "t2d": np.isin(np.arange(97), TOKENS)}


def put(folder: Path, config: dict[str, Any], arrays: Arrays, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / name)
    return folder


def safeailab_eagle1(folder: Path) -> Path:
    config = shapes_config(architectures=["LlamaForCausalLM"], bias=True)
    arrays = layer("layers.0.") | {
        "fc.weight": noise(64, 128),
        "fc.bias": noise(64),
        "embed_tokens.weight": noise(97, 64),
    }
    return put(folder, config, arrays)


def safeailab_eagle3(folder: Path) -> Path:
    config = shapes_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=8)
    arrays = layer("midlayer.", 128, norms=("input_layernorm.weight", "hidden_norm.weight")) | {
        "fc.weight": noise(64, 192),
        "norm.weight": noise(64),
        "lm_head.weight": noise(8, 64),
        **mapping(),
    }
    return put(folder, config, arrays)


def speculators_eagle3(folder: Path) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": []}},
        "transformer_layer_config": shapes_config(),
        "draft_vocab_size": 8,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 7],
    }
    arrays = layer("layers.0.", 128, norms=("input_layernorm.weight", "hidden_norm.weight")) | {
        "fc.weight": noise(64, 192),
        "input_norm.weight": noise(192),
        "norm.weight": noise(64),
        "lm_head.weight": noise(8, 64),
        "embed_tokens.weight": noise(97, 64),
        **mapping(),
    }
    return put(folder, config, arrays)


def speculators_eagle1(folder: Path) -> Path:
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_config": {"algorithm": "eagle"},
        "transformer_layer_config": shapes_config(),
        "layernorms": True,
        "fusion_bias": True,
    }
    arrays = layer("transformer.", norms=("input_layernorm.weight",)) | {
        "fusion_fc.weight": noise(64, 128),
        "fusion_fc.bias": noise(64),
        "embedding_layernorm.weight": noise(64),
        "pre_lm_head_layernorm.weight": noise(64),
    }
    return put(folder, config, arrays)


def fasterdecoding_medusa(folder: Path) -> Path:
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    arrays: Arrays = {}
    for k in range(3):
        for j in range(2):
            arrays |= {f"{k}.{j}.linear.weight": noise(64, 64), f"{k}.{j}.linear.bias": noise(64)}
        arrays[f"{k}.2.weight"] = noise(97, 64)
    return put(folder, config, arrays, "medusa_lm_head.safetensors")


LAYOUTS: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "SafeAILab EAGLE-1": (safeailab_eagle1, (1, 97, (-1,), False, False, None)),
    "SafeAILab EAGLE-3": (safeailab_eagle3, (3, 8, (1, 3, 4), False, False, 8)),
    "speculators EAGLE-3": (speculators_eagle3, (3, 8, (0, 2, 6), True, True, 8)),
    "speculators EAGLE-1": (speculators_eagle1, (1, 97, (-1,), False, False, None)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eagle_checkpoint_is_read_as_what_it_is(layout: str, tmp_path: Path) -> None:
    """Version, vocabulary, layers, flags and every weight come out, and a row of it can be computed."""
    write, wanted = LAYOUTS[layout]
    folder = write(tmp_path / "head")
    assert is_head(folder) or layout == "SafeAILab EAGLE-1"  # that one looks like a model of one layer
    head = read_head(folder, TARGET)
    assert isinstance(head, Eagle)
    config = head.config
    size = None if head.tokens is None else len(head.tokens)
    flags = (config.norm_before_residual, config.norm_before_fc)
    assert (config.version, config.draft_vocabulary, config.wants, *flags, size) == wanted
    assert set(eagle_shapes(config)) <= set(head.tensors)
    stored = load_file(folder / "model.safetensors")
    query = next(value for name, value in stored.items() if name.endswith("q_proj.weight"))
    np.testing.assert_array_equal(head.tensors["layers.0.q"].float32(), query)
    assert head.memory() == sum(v.nbytes for n, v in stored.items() if n not in ("embed_tokens.weight", "d2t", "t2d"))

    weights = {name: tensor.float32() for name, tensor in head.tensors.items()}
    form = EagleForm(config.version, 1, 16, 1e-5, *flags)
    turns = [table.astype(np.float32) for table in rotary_table(config.decoder, 4)]
    eagle = EagleReference(form, weights, *turns)
    x = noise(64) if config.version == 1 else eagle.fuse(noise(3, 64))
    state, entry = eagle.row(noise(64), x, 0, [])
    second, _ = eagle.row(noise(64), state, 1, [entry])
    scores = eagle.logits(second, noise(97, 64) if config.version == 1 else None)
    assert scores.shape == (config.draft_vocabulary,)
    assert np.isfinite(scores).all()
    if head.tokens is not None:
        np.testing.assert_array_equal(head.target_tokens(np.arange(8)), TOKENS)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_are_read(prefix: str, tmp_path: Path) -> None:
    """Heads, blocks and projections come out, alone or beside a target; head k is not head k + 1."""
    folder = fasterdecoding_medusa(tmp_path / "medusa")
    stored = load_file(folder / "medusa_lm_head.safetensors")
    if prefix:
        whole = {prefix + name: value for name, value in stored.items()} | {"model.norm.weight": noise(64)}
        save_file(whole, folder / "medusa_lm_head.safetensors")
    head = read_head(folder, TARGET)
    assert isinstance(head, Medusa)
    assert head.config == MedusaConfig(3, 2, 64, 97, 97)
    assert set(head.tensors) == set(medusa_shapes(head.config))
    weights = {name: tensor.float32() for name, tensor in head.tensors.items()}
    np.testing.assert_array_equal(weights["heads.1.blocks.1"], stored["1.1.linear.weight"])
    state = noise(64)
    scores = medusa_logits(weights, 3, 2, state)
    x = state
    for j in range(2):
        inner = stored[f"2.{j}.linear.weight"] @ x + stored[f"2.{j}.linear.bias"]
        x = x + inner / (1 + np.exp(-inner))
    np.testing.assert_allclose(scores[2], stored["2.2.weight"] @ x, atol=1e-4)
    assert not np.allclose(scores[0], scores[1])


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_what_is_written_is_read(kind: str, tmp_path: Path) -> None:
    """EAGLE-3 and Medusa come back with their config, their tokens, and weights as exact as the format is."""
    decoder = tiny_config(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)
    eagle = EagleConfig(3, decoder, 8, (1, 3, 4), True, True, "ab" * 32)
    values = {name: noise(*shape) for name, shape in eagle_shapes(eagle).items()}
    write_eagle(tmp_path / "e", eagle, values, TOKENS, target="tiny", kind=kind, notes={"steps": 5})
    head = read_head(tmp_path / "e", TARGET)
    assert isinstance(head, Eagle)
    assert head.config == eagle
    medusa = MedusaConfig(2, 1, 64, 97, 8, shared_head=True, target_sha256="cd" * 32)
    heads = {name: noise(*shape) for name, shape in medusa_shapes(medusa).items()}
    write_medusa(tmp_path / "m", medusa, heads, TOKENS, target="tiny", kind=kind)
    second = read_head(tmp_path / "m", TARGET)
    assert isinstance(second, Medusa)
    assert second.config == medusa
    bound = {"F32": 0.0, "BF16": 2**-8, "Q8_0": 1 / 200}[kind]
    for read, written in ((head, values), (second, heads)):
        np.testing.assert_array_equal(read.tokens, TOKENS)
        for name, value in written.items():
            found = read.tensors[name].float32()
            assert np.abs(found - value).max() <= bound * np.abs(value).max(), name
            if value.ndim == 2:
                assert read.tensors[name].kind == kind
    assert "made for the target" in str(head.warning("00" * 32))
    assert head.warning("ab" * 32) is None
    stored = json.loads((tmp_path / "e" / "config.json").read_text())
    assert stored["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert stored["outrider"]["steps"] == 5
    assert not list((tmp_path / "e").glob("*.part"))


def broken(change: str, arrays: Arrays, config: dict[str, Any]) -> None:
    if change == "no fc":
        del arrays["fc.weight"]
    elif change == "no d2t":
        del arrays["d2t"]
    elif change == "t2d of others":
        arrays["t2d"][5] = True
    elif change == "d2t out of range":
        arrays["d2t"] = arrays["d2t"] + 100
    elif change == "a tensor too many":
        arrays["extra.weight"] = noise(2, 2)
    elif change == "shape":
        arrays["norm.weight"] = noise(32)
    elif change == "vocabulary":
        config["transformer_layer_config"]["vocab_size"] = 96
    elif change == "hidden":
        config["target_hidden_size"] = 128
    elif change == "layer":
        config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 9]
    elif change == "kind":
        config["speculators_model_type"] = "mlp"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("no fc", "fc.weight"),
        ("no d2t", "d2t"),
        ("t2d of others", "t2d"),
        ("d2t out of range", "d2t"),
        ("a tensor too many", "extra.weight"),
        ("shape", "norm.weight"),
        ("vocabulary", "96"),
        ("hidden", "128"),
        ("layer", "8 layers"),
        ("kind", "mlp"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(change: str, word: str, tmp_path: Path) -> None:
    """What is missing, misshapen, strange or for another target is named in one line."""
    folder = speculators_eagle3(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    arrays = dict(load_file(folder / "model.safetensors"))
    broken(change, arrays, config)
    put(folder, config, arrays)
    with pytest.raises(ModelError, match=word) as caught:
        read_head(folder, TARGET)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """A file cut short raises ModelError wherever it is cut, and never anything else."""
    folder = safeailab_eagle3(tmp_path / "head")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 4, 9, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_head(folder, TARGET)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_a_pickle_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    """A pickled checkpoint is not opened: the message names the file and safetensors."""
    (tmp_path / "config.json").write_text(json.dumps(shapes_config(draft_vocab_size=8)))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=f"{name} is a pickle.*safetensors"):
            read_head(given, TARGET)
