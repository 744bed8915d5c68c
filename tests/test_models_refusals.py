"""What is not supported or not sound is refused by name, in one line, before any weight is touched."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from outrider.models.errors import ModelError
from outrider.models.gguf_file import GgufFile, Metadata
from outrider.models.gguf_tokenizer import read_tokenizer
from outrider.models.load import open_model
from tiny import hf_config, tiny_model, tokenizer_metadata, write_gguf, write_hf, write_safetensors


def refusal(path: Path) -> str:
    """The one line with which the model at `path` is refused."""
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
    ("llama", {"model_type": None}, "model_type None"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias True"),
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
    ("llama", {"num_hidden_layers": 10**9}, "layers is 1000000000"),
    ("llama", {"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    ("llama", {"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight has no place"),
    ("llama", {"vocab_size": 98}, "tensor model.embed_tokens.weight has shape [97, 64], not [98, 64]"),
    ("llama", {"intermediate_size": 97}, "mlp.gate_proj.weight has shape [96, 64], not [97, 64]"),
    ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3 key/value heads"),
    ("llama", {"head_dim": 15}, "head_dim is 15: rotary embeddings need an even one"),
    ("llama", {"rms_norm_eps": -1}, "norm_eps is -1"),
    ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps is 'x', not a number"),
    ("llama", {"tie_word_embeddings": False, "bos_token_id": 97}, "bos token 97 is outside the vocabulary of 97"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "RoPE scaling 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "RoPE scaling has no factor"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5: 1 or more"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "YaRN with mscale = 0.7"),
    ("llama", {"rope_parameters": {"rope_theta": 0.0}}, "rope_theta is 0.0"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ("mistral", {"sliding_window": -4}, "sliding_window is -4"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
]


@pytest.mark.parametrize(("family", "settings", "message"), CONFIGS, ids=[case[2][:40] for case in CONFIGS])
def test_configs(tmp_path: Path, family: str, settings: dict[str, Any], message: str) -> None:
    """A config.json that asks for what is not built, or makes no sense, is refused with the name of the setting."""
    wanted = tiny_model(family=family)
    folder = write_hf(tmp_path / "m", wanted)
    (folder / "config.json").write_text(json.dumps(hf_config(wanted.config) | settings))
    assert message in refusal(folder)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])


def other_dtype(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b'"F32"', b'"I32"', 1))


def one_more(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {"extra.weight": np.zeros((2, 2), np.float32)})


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(places: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(places))


def word_level(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"] = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps(stored | {"added_tokens": []}))


FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (drop("config.json"), "has no config.json: it is no model folder"),
    (drop("model.safetensors"), "has neither model.safetensors nor"),
    (drop("tokenizer.json"), "tokenizer.json is missing: save the tokenizer"),
    (pickled, "pickled weights are not read"),
    (cut, "it is truncated; fetch it again"),
    (other_dtype, "has dtype 'I32', which is not read"),
    (one_more, "tensor model.embed_tokens.weight is missing"),
    (write("config.json", b"{"), "config.json: its JSON cannot be read"),
    (write("config.json", b"[]"), "config.json: its JSON is no object"),
    (write("config.json", b"\xff\xfe"), "config.json: its JSON cannot be read"),
    (write("config.json", b"[" * 100_000), "config.json: its JSON cannot be read"),
    (write("model.safetensors", b""), "model.safetensors is empty"),
    (write("model.safetensors", b"\xff" * 64), "claims a header of"),
    (write("tokenizer.json", b"{}"), "tokenizer.json cannot be read"),
    (word_level, "a WordLevel tokenizer is not supported"),
    (index({}), "has no weight_map"),
    (index({"weight_map": {"a": "../m/model.safetensors"}}), "no safetensors file of its folder"),
    (index({"weight_map": {"a": "model-00009.safetensors"}}), "model-00009.safetensors cannot be read"),
    (index({"weight_map": {"a": "model.safetensors"}}), "tensor a is missing, though"),
]


@pytest.mark.parametrize(("damage", "message"), FOLDERS, ids=[case[1][:40] for case in FOLDERS])
def test_folders(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """A folder that lacks a file, or has one that is damaged or of a foreign kind, is refused with its name."""
    folder = write_hf(tmp_path / "m", tiny_model())
    damage(folder)
    assert message in refusal(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """One missing tensor is named as the file would name it, and so is one too many."""
    folder = write_hf(tmp_path / "m", tiny_model())
    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")
    gone = "model.layers.1.self_attn.k_proj.weight"
    write_safetensors(folder / "model.safetensors", {name: value for name, value in stored.items() if name != gone})
    assert f"tensor {gone} is missing" in refusal(folder)
    write_safetensors(
        folder / "model.safetensors", stored | {"model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    )
    assert "tensor model.layers.0.self_attn.o_proj.bias has no place in a llama decoder" in refusal(folder)


class Foreign:
    """A GGUF file of the tiny llama, with some metadata or tensors exchanged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def write(self, path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
        key, add = GGUFWriter.add_key_value, GGUFWriter.add_tensor

        def add_key(writer: GGUFWriter, name: str, value: Any, *rest: Any, **more: Any) -> None:
            if metadata.get(name, ...) is not None:
                key(writer, name, metadata.get(name, value), *rest, **more)

        def add_tensor(writer: GGUFWriter, name: str, data: Any, raw_dtype: Any = None) -> None:
            replaced = tensors.get(name, (name, data, raw_dtype))
            if replaced is not None:
                add(writer, replaced[0], replaced[1], raw_dtype=replaced[2])

        self.monkeypatch.setattr(GGUFWriter, "add_key_value", add_key)
        self.monkeypatch.setattr(GGUFWriter, "add_tensor", add_tensor)
        write_gguf(path, tiny_model())
        return path


F32 = GGMLQuantizationType.F32
GGUFS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, {}, "has the architecture 'mamba', which is not supported"),
    ({"llama.block_count": None}, {}, "metadata llama.block_count is missing"),
    ({"llama.block_count": 3}, {}, "tensor blk.2.attn_norm.weight is missing"),
    ({"llama.block_count": 1}, {}, "tensor blk.1.attn_k.weight has no place in a llama decoder"),
    ({"llama.embedding_length": 65}, {}, "has shape [97, 64], not [97, 65]"),
    ({"llama.attention.head_count": 0}, {}, "llama.attention.head_count is 0"),
    ({"llama.attention.head_count_kv": 3}, {}, "4 heads cannot share 3 key/value heads"),
    ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count is 8 where heads have 16"),
    ({"llama.attention.value_length": 8}, {}, "llama.attention.value_length is 8"),
    ({"llama.attention.layer_norm_rms_epsilon": 2.0}, {}, "norm_eps is 2.0"),
    ({"tokenizer.ggml.model": "t5"}, {}, "tokenizer 't5' is not supported"),
    ({"tokenizer.ggml.pre": "dbrx"}, {}, "pre-tokenizer 'dbrx' is not supported"),
    ({"tokenizer.ggml.eos_token_id": 97}, {}, "eos_token_id is 97, outside the vocabulary of 97"),
    ({"tokenizer.ggml.merges": ["a aaa"]}, {}, "merges are unsound"),
    ({"tokenizer.ggml.token_type": [1]}, {}, "97 tokens have 1 token types"),
    ({}, {"token_embd.weight": None}, "tensor token_embd.weight is missing"),
    ({}, {"blk.1.ffn_up.weight": None}, "tensor blk.1.ffn_up.weight is missing"),
    ({}, {"blk.1.ffn_up.weight": ("blk.1.ffn_up.weight", np.zeros((96, 32), np.float32), F32)},
     "blk.1.ffn_up.weight has shape [96, 32], not [96, 64]"),
    ({}, {"blk.1.ffn_up.weight": ("blk.1.ffn_up.weight", np.zeros((2, 96, 64), np.float32), F32)},
     "has shape [2, 96, 64]"),
    ({}, {"blk.1.ffn_up.weight": ("blk.1.ffn_up.weight", np.zeros((96, 64), np.int32), GGMLQuantizationType.I32)},
     "has type I32, which is not read"),
    ({}, {"blk.1.ffn_up.weight": ("blk.1.ffn_up.weight", np.zeros((96, 36), np.uint8), GGMLQuantizationType.IQ4_NL)},
     "tensor blk.1.ffn_up.weight has type IQ4_NL"),
    ({}, {"blk.0.attn_norm.weight": ("blk.0.attn_norm.weight", np.zeros((1, 68), np.uint8), GGMLQuantizationType.Q8_0)},
     "tensor blk.0.attn_norm.weight"),
    ({}, {"output_norm.weight": ("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32), F32)},
     "rope_freqs.weight is not the frequency scaling of Llama 3"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "tensors", "message"), GGUFS, ids=[case[2][:40] for case in GGUFS])
def test_gguf_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    """A GGUF file with foreign metadata, or a missing, misshapen or foreign tensor, is refused with its name."""
    assert message in refusal(Foreign(monkeypatch).write(tmp_path / "m.gguf", metadata, tensors))


EXTRA: list[tuple[str, Any, str]] = [
    ("llama.expert_count", 8, "llama.expert_count is 8"),
    ("llama.attention.scale", 0.5, "llama.attention.scale is 0.5"),
    ("llama.logit_scale", 2.0, "llama.logit_scale is 2"),
    ("llama.rope.scaling.type", "longrope", "RoPE scaling 'longrope'"),
    ("llama.rope.scaling.type", "yarn", "RoPE scaling factor is 0.0: 1 or more"),
    ("split.count", 2, "is one part of a split model"),
    ("general.alignment", 12, "general.alignment is 12"),
]


@pytest.mark.parametrize(("key", "value", "message"), EXTRA, ids=[case[0] for case in EXTRA])
def test_foreign_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str) -> None:
    """Metadata that would change the arithmetic in a way that is not built is refused, never ignored."""
    name = GGUFWriter.add_name

    def add(writer: GGUFWriter, text: str) -> None:
        name(writer, text)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)

    monkeypatch.setattr(GGUFWriter, "add_name", add)
    assert message in refusal(write_gguf(tmp_path / "m.gguf", tiny_model()))


def test_damaged_heads(tmp_path: Path) -> None:
    """Magic, version, byte order and absurd counts are refused for what they are."""
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    sound = path.read_bytes()
    cases = {
        b"GGML" + sound[4:]: "is not a GGUF file",
        sound[:4] + struct.pack("<I", 1) + sound[8:]: "has GGUF version 1",
        sound[:4] + struct.pack(">I", 3) + sound[8:]: "big-endian",
        sound[:8] + struct.pack("<Q", 1 << 60) + sound[16:]: "claims 1152921504606846976 tensors",
        sound[:16] + struct.pack("<Q", 1 << 60) + sound[24:]: "claims 1152921504606846976 metadata pairs",
        sound[:24] + struct.pack("<Q", 1 << 50) + sound[32:]: "a name of 1125899906842624 bytes",
        sound[:100]: "truncated or damaged",
        sound[:-5000]: "it is truncated; fetch it again",
        b"": "is empty",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        assert message in refusal(path)


def test_overlapping_tensors(tmp_path: Path) -> None:
    """Two tensors that share bytes are refused: the directory is damaged, whatever else fits."""
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    entries = GgufFile(path).entries
    names = list(entries)
    data = path.read_bytes()
    name = names[1].encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8 * len(entries[names[1]].dims) + 4
    path.write_bytes(data[:at] + struct.pack("<Q", 0) + data[at + 8 :])
    assert f"tensors {names[0]} and {names[1]} overlap" in refusal(path)


def test_paths(tmp_path: Path) -> None:
    """Paths that hold no model say what they are and what to give instead."""
    assert "does not exist" in refusal(tmp_path / "nothing.gguf")
    assert "is neither a file nor a folder" in refusal(Path("/dev/null"))
    folder = write_hf(tmp_path / "m", tiny_model())
    assert "give its folder" in refusal(folder / "model.safetensors")
    assert "is not a GGUF file" in refusal(folder / "config.json")
    (tmp_path / "g").mkdir()
    write_gguf(tmp_path / "g" / "m.gguf", tiny_model())
    assert "give the .gguf file in it instead" in refusal(tmp_path / "g")
    (tmp_path / "g" / "config.json").write_text(json.dumps(hf_config(tiny_model().config)))
    assert "give the .gguf file in it instead" in refusal(tmp_path / "g")


def test_vocabularies(tmp_path: Path) -> None:
    """A token twice, a token that is not spelled in bytes, and a tokenizer larger than its model are refused."""
    config = tiny_model().config
    sound = tokenizer_metadata(config)
    tokens = sound["tokenizer.ggml.tokens"]

    def message(changed: list[str]) -> str:
        with pytest.raises(ModelError) as caught:
            read_tokenizer(Metadata(Path("m"), sound | {"tokenizer.ggml.tokens": changed}))
        return str(caught.value)

    assert "token 'A' is there twice" in message([*tokens[:-1], "A"])
    assert "token 96 is '日', which is not spelled in bytes" in message([*tokens[:-1], "日"])
    wanted = tiny_model()
    larger = tiny_model(vocabulary=99)
    folder = write_hf(tmp_path / "m", wanted)
    (folder / "tokenizer.json").write_text(larger.tokenizer.to_json())
    assert "the tokenizer has 99 tokens and the model rows for 97 only" in refusal(folder)
