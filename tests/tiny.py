"""Tiny models with random weights, in memory and as the files that people have. For all tests.

The weights are scaled so that a model says lively things: its logits spread by about 2.5, whatever its sizes, and its
attention looks at more than one token. The same arguments always give the same model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from outrider.models.config import DecoderConfig, RopeScaling
from outrider.models.gguf_file import Metadata
from outrider.models.gguf_model import LAYER as GGUF_LAYER
from outrider.models.gguf_model import TOP as GGUF_TOP
from outrider.models.gguf_model import halves
from outrider.models.gguf_tokenizer import read_tokenizer
from outrider.models.hf_model import LAYER as HF_LAYER
from outrider.models.hf_model import TOP as HF_TOP
from outrider.models.layout import check_config, shapes
from outrider.models.load import ModelFiles, open_model
from outrider.models.rope_scaling import llama3_divisors
from outrider.models.tensor import KINDS, Tensor
from outrider.models.tokenizer import BYTES_TO_CHARACTERS

SPREAD = 2.5  # standard deviation of the logits
EOS = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
Kinds = str | Mapping[str, str] | Callable[[str], str]


def tiny_config(family: str = "llama", **overrides: Any) -> DecoderConfig:
    """A decoder of two small layers. `family` sets biases, q/k norms and tying as that family has them."""
    plain = DecoderConfig(
        architecture=family,
        vocabulary=97,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        context=512,
        norm_eps=1e-5,
        rope_theta=10000.0,
        tied_embeddings=family == "qwen2",
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        bos=0,
        eos=(0,),
    )
    config = replace(plain, **overrides)
    check_config(config, "tiny")
    return config


def tiny_model(
    folder: Path | None = None, family: str = "llama", seed: int = 0, kind: str = "F32", **overrides: Any
) -> ModelFiles:
    """A random model in memory; with a folder, written there as Hugging Face has it, and opened.

    `kind` is the format of its matrices. `overrides` are fields of the config, and `name`.
    """
    name = overrides.pop("name", f"tiny-{family}-{seed}")
    config = tiny_config(family, **overrides)
    rng = np.random.default_rng(seed)
    values = {part: _values(part, shape, config, rng) for part, shape in shapes(config).items()}
    tensors = {part: tensor(part, data, kind if data.ndim == 2 else "F32") for part, data in values.items()}
    tokenizer = read_tokenizer(Metadata(Path(name), tokenizer_metadata(config)))

    def digest() -> str:
        total = hashlib.sha256(repr(config).encode())
        for part in sorted(tensors):
            total.update(tensors[part].raw.tobytes())
        return total.hexdigest()

    files = ModelFiles(config, tensors, tokenizer, Path(name), name, digest)
    if folder is None:
        return files
    write_hf(folder, files)
    return open_model(folder)


def tensor(name: str, values: NDArray[np.float32], kind: str = "F32") -> Tensor:
    """The values in a storage format; what it cannot hold is rounded as the format's reference does, or nearly so."""
    return Tensor.over(name, kind, values.shape, encode(values, kind).reshape(-1))


def encode(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Raw blocks. [rows, columns] or [n] -> [rows, bytes per row]"""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    if kind in ("Q4_K", "Q5_K"):
        return _pack_k45(rows, 4 if kind == "Q4_K" else 5)
    if kind == "Q6_K":
        return _pack_k6(rows)
    if kind == "F32":
        return rows.view(np.uint8)
    if kind == "F16":
        return rows.astype("<f2").view(np.uint8)
    return quantize(rows, GGMLQuantizationType[kind]).view(np.uint8)


def write_hf(folder: Path, files: ModelFiles, shards: int = 1, dtype: str = "F32", *, old_rope: bool = False) -> Path:
    """Writes the model as a Hugging Face folder: weights in `dtype`, in so many files.

    `old_rope` writes `rope_scaling` as it was before transformers 5.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = files.config
    stored = {_hf_name(name): part.float32() for name, part in files.tensors.items()}
    names = sorted(stored)
    places = {}
    for shard in range(shards):
        place = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        parts = {name: stored[name] for name in names[shard::shards]}
        write_safetensors(folder / place, parts, dtype)
        places |= dict.fromkeys(parts, place)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(hf_config(config, old_rope=old_rope), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(config.eos)}))
    (folder / "tokenizer.json").write_text(files.tokenizer.to_json(), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_safetensors(path: Path, values: Mapping[str, NDArray[np.float32]], dtype: str = "F32") -> None:
    """Writes the tensors with the safetensors package, in F32, F16 or BF16."""
    data = {name: encode(value, dtype).reshape(-1) for name, value in values.items()}
    long = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    specs = {
        name: TensorSpec(
            dtype=long, shape=list(value.shape), data_ptr=data[name].ctypes.data, data_len=data[name].nbytes
        )
        for name, value in values.items()
    }
    serialize_file(specs, str(path), {"format": "pt"})


def hf_config(config: DecoderConfig, *, old_rope: bool = False) -> dict[str, Any]:
    """The object of a config.json."""
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    found: dict[str, Any] = {
        "model_type": config.architecture,
        "architectures": [f"{classes[config.architecture]}ForCausalLM"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": config.bos,
        "eos_token_id": list(config.eos),
        "sliding_window": None,
    }
    scaling = _hf_scaling(config.rope_scaling)
    if old_rope:
        return found | {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    return found | {"rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}}


def write_gguf(path: Path, files: ModelFiles, kinds: Kinds = "F32") -> Path:
    """Writes the model as a GGUF file with the gguf package.

    `kinds`: the format of all matrices, or by canonical name (others stay as they are), or a function of the name.
    Vectors are F32. Q and K rows of a llama are put in GGUF's order.
    """
    config = files.config
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = GGUFWriter(str(path), architecture)
    writer.add_name(files.name)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    _write_scaling(writer, config)
    _write_tokenizer(writer, tokenizer_metadata(config))
    for name, part in files.tensors.items():
        kind = _kind_of(name, part, kinds)
        raw = part.raw if kind == part.kind else encode(part.float32(), kind)
        if architecture == "llama" and (order := _gguf_order(name, config)) is not None:
            # a bias is one row of numbers, a matrix many rows
            raw = raw.reshape(len(order), -1)[order].reshape(raw.shape)
        data = raw.view(np.float32)[0] if len(part.shape) == 1 else raw
        writer.add_tensor(_gguf_name(name), data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata(config: DecoderConfig) -> dict[str, Any]:
    """A byte-level vocabulary of any size from 3 up.

    The end token, newline and printable ASCII but for ~ (96 in all), one merged pair; a larger one has the other bytes
    first (257), then more pairs. What a small one lacks becomes its last character.
    """
    first = [0x0A, *range(0x20, 0x7F)]
    letters = [BYTES_TO_CHARACTERS[byte] for byte in [*first, *(byte for byte in range(256) if byte not in first)]]
    letters = letters[: config.vocabulary - 2]
    common = letters[66:92] + letters[:66] + letters[92:]  # a to z first
    pairs = [(a, b) for a in common for b in common][: config.vocabulary - 1 - len(letters)]
    tokens = [EOS, *letters, *(a + b for a, b in pairs)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] + [1] * (len(tokens) - 1), np.int32),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs],
        "tokenizer.ggml.unknown_token_id": len(letters),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **({} if config.bos is None else {"tokenizer.ggml.bos_token_id": config.bos}),
        **({"tokenizer.ggml.eos_token_id": config.eos[0]} if config.eos else {}),
    }


def _values(name: str, shape: tuple[int, ...], config: DecoderConfig, rng: np.random.Generator) -> NDArray[np.float32]:
    noise = rng.standard_normal(shape, np.float32)
    part = name.rpartition(".")[2]
    if part in ("q_norm", "k_norm"):
        return np.float32(2.0) + np.float32(0.1) * noise  # sharp attention, see below
    if part.endswith("norm"):
        return np.float32(1.0) + np.float32(0.1) * noise
    if part.endswith("bias"):
        return np.float32(0.3) * noise
    # Each matrix keeps the size of what it multiplies, but for these. Sharp attention (q) that weighs more than the
    # token itself (o) keeps greedy text from running in a circle of one token; and a tied head, which knows its own
    # embedding again, needs a residual stream in which that is small. The head gives the logits their spread.
    tied = 8.0 if config.tied_embeddings else 1.0
    gains = {"head": SPREAD, "q": 6.0, "o": 3.0 * tied, "down": tied}
    if part == "embed":
        return np.float32(SPREAD / config.hidden**0.5 if config.tied_embeddings else 1.0) * noise
    return np.float32(gains.get(part, 1.0) / shape[-1] ** 0.5) * noise


def _pack_k45(rows: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Q4_K and Q5_K: 256 values as 8 groups, each value = d * scale * q - dmin * floor, scales of 6 bits."""
    groups = rows.reshape(-1, 8, 32)
    floors = np.maximum(0.0, -groups.min(axis=2))
    steps = (groups.max(axis=2) + floors) / (2**bits - 1)
    d = (steps.max(axis=1, keepdims=True) / 63).astype("<f2")
    dmin = (floors.max(axis=1, keepdims=True) / 63).astype("<f2")
    scale = np.rint(steps / np.maximum(d.astype(np.float32), 1e-7)).clip(0, 63).astype(np.uint8)
    floor = np.rint(floors / np.maximum(dmin.astype(np.float32), 1e-7)).clip(0, 63).astype(np.uint8)
    step = (d.astype(np.float32) * scale)[:, :, None]
    shifted = groups + (dmin.astype(np.float32) * floor)[:, :, None]
    q = np.rint(shifted / np.maximum(step, 1e-7)).clip(0, 2**bits - 1).astype(np.uint8)
    low, high = slice(0, 4), slice(4, 8)
    scales = np.concatenate(
        [
            scale[:, low] | (scale[:, high] >> 4 << 6),
            floor[:, low] | (floor[:, high] >> 4 << 6),
            (scale[:, high] & 15) | ((floor[:, high] & 15) << 4),
        ],
        axis=1,
    )
    nibbles = (q[:, 0::2] & 15) | ((q[:, 1::2] & 15) << 4)
    parts = [d.view(np.uint8), dmin.view(np.uint8), scales]
    if bits == 5:
        fifth = (q >> 4) << np.arange(8, dtype=np.uint8)[None, :, None]
        parts.append(np.bitwise_or.reduce(fifth, axis=1))
    return np.concatenate([*parts, nibbles.reshape(len(q), -1)], axis=1).reshape(len(rows), -1)


def _pack_k6(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Q6_K: 256 values as 16 groups, each value = d * scale * (q - 32), scales of 8 bits."""
    groups = rows.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=2) / 31
    d = (steps.max(axis=1, keepdims=True) / 127).astype("<f2")
    scale = np.rint(steps / np.maximum(d.astype(np.float32), 1e-7)).clip(1, 127).astype(np.int8)
    step = (d.astype(np.float32) * scale)[:, :, None]
    q = (np.rint(groups / np.maximum(step, 1e-7)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([(q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)], axis=2).reshape(len(q), -1)
    high = np.bitwise_or.reduce((q >> 4) << np.array([0, 2, 4, 6], np.uint8)[None, None, :, None], axis=2)
    parts = [low, high.reshape(len(q), -1), scale.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _kind_of(name: str, part: Tensor, kinds: Kinds) -> str:
    if len(part.shape) == 1:
        return "F32"
    choose = kinds if callable(kinds) else lambda name: kinds if isinstance(kinds, str) else kinds.get(name, part.kind)
    found = choose(name)
    if part.shape[1] % KINDS[found].block:
        raise ValueError(f"{name} has rows of {part.shape[1]}: give tiny_model sizes that {found} blocks fit into")
    return found


def _gguf_order(name: str, config: DecoderConfig) -> NDArray[np.intp] | None:
    heads = {"q": config.heads, "k": config.kv_heads}.get(name.rpartition(".")[2].removesuffix("_bias"))
    return None if heads is None else np.argsort(halves(heads, config.head_dim))


def _hf_name(name: str) -> str:
    return (
        HF_TOP[name]
        if name in HF_TOP
        else "model.layers.{}.{}".format(name.split(".")[1], HF_LAYER[name.split(".")[2]])
    )


def _gguf_name(name: str) -> str:
    return (
        GGUF_TOP[name] if name in GGUF_TOP else "blk.{}.{}".format(name.split(".")[1], GGUF_LAYER[name.split(".")[2]])
    )


def _hf_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            found["attention_factor"] = scaling.attention_factor
    return found


def _write_scaling(writer: GGUFWriter, config: DecoderConfig) -> None:
    scaling = config.rope_scaling
    if scaling is None:
        return
    if scaling.kind == "llama3":
        divisors = llama3_divisors(scaling.factor, config.rope_theta, config.head_dim)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        return
    prefix = f"{writer.arch}.rope.scaling."
    writer.add_string(prefix + "type", scaling.kind)
    writer.add_float32(prefix + "factor", scaling.factor)
    if scaling.kind == "yarn":
        writer.add_uint32(prefix + "original_context_length", scaling.original_context)
        writer.add_float32(prefix + "yarn_beta_fast", scaling.beta_fast)
        writer.add_float32(prefix + "yarn_beta_slow", scaling.beta_slow)


def _write_tokenizer(writer: GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
