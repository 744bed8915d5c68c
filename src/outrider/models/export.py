"""Writes a model as a Hugging Face folder, for the engines that read nothing else: vLLM, SGLang, transformers.

The layout is that of transformers' `save_pretrained`: config.json, generation_config.json, safetensors in shards with
an index where there is more than one, tokenizer.json and tokenizer_config.json with the chat template.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models import rope_scaling
from outrider.models.config import DecoderConfig
from outrider.models.errors import ModelError
from outrider.models.hf_model import file_name
from outrider.models.layout import shapes
from outrider.models.load import ModelFiles
from outrider.models.safetensors_folder import INDEX, SINGLE
from outrider.models.tensor import Tensor, bfloat16_bits
from outrider.models.tokenizer import Tokenizer

__all__ = ["DTYPES", "write_hf"]

DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WIDTH: Final = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes a value
SHARD: Final = 4 << 30  # bytes; a shard is decoded in memory before it is written
CLASSES: Final = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

Progress = Callable[[int, int], None]


def write_hf(
    files: ModelFiles, folder: Path, dtype: str = "fp32", shard: int = SHARD, progress: Progress | None = None
) -> Path:
    """Writes `files` into `folder`, which is there only when all of it is; returns the folder.

    Quantised weights are decoded, in float32 without loss; bf16 and fp16 round them. `shard` bounds the bytes of a
    file, and the memory needed. `progress` is called with the bytes written and all bytes.

    Raises ModelError for a folder that is there and not empty, a draft with a vocabulary of its own, or values that
    fp16 cannot hold.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if files.tokens is not None:
        raise ModelError(
            f"{files.name} is a draft with a reduced vocabulary: Hugging Face's layout has no place for it"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already: give a folder that is new or empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of an export that was cut off
    try:
        part.mkdir()
        _write_weights(files, part, dtype, shard, progress)
        _write_json(
            part / "config.json", _config(files.config, dtype) | {"outrider": {"source_sha256": files.sha256()}}
        )
        _write_json(part / "generation_config.json", _ends(files.config))
        (part / "tokenizer.json").write_text(_tokenizer(files.tokenizer), "utf-8")
        _write_json(part / "tokenizer_config.json", _tokenizer_config(files.tokenizer, files.config.context))
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _write_weights(files: ModelFiles, folder: Path, dtype: str, shard: int, progress: Progress | None) -> None:
    from safetensors import TensorSpec, serialize_file

    shards = list(_shards(files.config, WIDTH[dtype], shard))
    places: dict[str, str] = {}
    total, done = sum(_bytes(files.config, names, WIDTH[dtype]) for names in shards), 0
    for number, names in enumerate(shards, 1):
        place = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        data: dict[str, NDArray[Any]] = {}
        specs: dict[str, Any] = {}
        for name in names:
            theirs, values = file_name(name), _encoded(files.tensors[name], dtype)
            data[theirs] = values
            specs[theirs] = TensorSpec(
                dtype=DTYPES[dtype], shape=list(values.shape), data_ptr=values.ctypes.data, data_len=values.nbytes
            )
            done += values.nbytes
            if progress is not None:
                progress(done, total)
        path = folder / place
        path.touch()  # the library would make the file readable for its owner alone
        serialize_file(specs, str(path), {"format": "pt"})
        places |= dict.fromkeys(data, place)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _shards(config: DecoderConfig, width: int, limit: int) -> Iterator[list[str]]:
    """The tensors by canonical name in groups of at most `limit` bytes, a larger tensor alone."""
    group: list[str] = []
    for name in shapes(config):
        if group and _bytes(config, [*group, name], width) > limit:
            yield group
            group = []
        group.append(name)
    yield group


def _bytes(config: DecoderConfig, names: list[str], width: int) -> int:
    sizes = shapes(config)
    return sum(int(np.prod(sizes[name])) for name in names) * width


def _encoded(tensor: Tensor, dtype: str) -> NDArray[Any]:
    """The values in `dtype`, bfloat16 as its bits."""
    values = tensor.float32()
    if dtype == "fp32":
        return values
    if dtype == "bf16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if np.isinf(halves).any():
        raise ModelError(f"tensor {tensor.name} has values that fp16 cannot hold: export it in bf16 or fp32")
    return halves


def _config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    scaling = None if config.rope_scaling is None else rope_scaling.to_hf(config.rope_scaling)
    rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {
        "model_type": config.architecture,
        "architectures": [f"{CLASSES[config.architecture]}ForCausalLM"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        # transformers 4 and the engines that follow it read the first two, transformers 5 the third
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "sliding_window": None,
        "use_cache": True,
        "torch_dtype": DTYPES[dtype],
    } | _ends(config)


def _ends(config: DecoderConfig) -> dict[str, Any]:
    ends: dict[str, Any] = {"eos_token_id": config.eos[0] if len(config.eos) == 1 else list(config.eos)}
    return ends if config.bos is None else {"bos_token_id": config.bos} | ends


def _tokenizer(tokenizer: Tokenizer) -> str:
    """tokenizer.json, with a step that puts `bos` in front where the model was trained so."""
    stored = json.loads(tokenizer.to_json())
    if tokenizer.adds_bos and tokenizer.bos is not None:
        name = tokenizer.name_of(tokenizer.bos)
        special = {"SpecialToken": {"id": name, "type_id": 0}}
        first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
        stored["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [special, first],
            "pair": [special, first, {"SpecialToken": {"id": name, "type_id": 1}}, second],
            "special_tokens": {name: {"id": name, "ids": [tokenizer.bos], "tokens": [name]}},
        }
    return json.dumps(stored, ensure_ascii=False)


def _tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    for name, token in (("bos_token", tokenizer.bos), ("eos_token", next(iter(tokenizer.eos), None))):
        if token is not None:
            found[name] = tokenizer.name_of(token)
    if tokenizer.template is not None:
        found |= tokenizer.template.tokens | {"chat_template": tokenizer.template.source}
    return found


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
