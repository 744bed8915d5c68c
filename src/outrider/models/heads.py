"""Heads that draft from a target's states - EAGLE-1, -2, -3 and Medusa - in the layouts that people publish them in.

Read: the checkpoints of SafeAILab's EAGLE and of the speculators library, and Medusa's as FasterDecoding has them, all
as safetensors. Written: EAGLE-3 in the speculators layout, Medusa in FasterDecoding's; matrices in F32, BF16, or int8
in groups of 32 with a float16 scale, which is Q8_0 without loss.

Canonical names of tensors, i a layer, k a head, j a block:

    EAGLE    fc [D, W D] ([D, 2 D] in version 1), fc_bias, input_norm [W D], head [V, D], norm [D], embed, embed_norm
             layers.{i}. as a decoder's (q, k, v, o, mlp_norm, gate, up, down, attn_norm); in version 3 layer 0 has
             embed_norm and hidden_norm for its attn_norm, and q, k, v [rows, 2 D]
    Medusa   heads.{k}.blocks.{j} [D, D], heads.{k}.blocks.{j}_bias [D], heads.{k}.head [V, D] or one shared `head`

Letters: D hidden size, W wanted layers, V tokens of the draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models import hf_model, rope_scaling
from outrider.models.config import DecoderConfig
from outrider.models.digest import sha256_of_weights
from outrider.models.errors import ModelError
from outrider.models.layout import shapes
from outrider.models.load import ModelFiles
from outrider.models.tensor import Tensor, bfloat16_bits

__all__ = [
    "Eagle",
    "EagleConfig",
    "Medusa",
    "MedusaConfig",
    "eagle_shapes",
    "is_draft",
    "is_head",
    "medusa_shapes",
    "read_draft",
    "read_head",
    "write_draft",
    "write_eagle",
    "write_medusa",
]

PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OURS: Final = "outrider"  # the key in config.json under which we keep what the layouts have no place for
GROUP: Final = 32  # values per scale in int8, as in Q8_0


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE head as data (Li et al. 2024 for versions 1 and 2, 2025 for 3).

    Version 1 (EAGLE-2 has the same weights): x = fc(embedding, state), layers, the first without a norm of its own, and
    the target's head on the result. Version 3: x = fc(states of three layers), a first layer that reads
    (norm(embedding), norm(x)) side by side, a final norm and a head over the draft vocabulary; what the layers leave,
    before the final norm, is the state of the next guess.
    """

    version: int  # 1 | 3
    decoder: DecoderConfig  # of the head's own layers; `vocabulary` is the target's
    draft_vocabulary: int
    wants: tuple[int, ...]  # target layers, numbered as in runtime.runner: -1 is the final normed state
    norm_before_residual: bool = False  # version 3: the first layer's residual is the normed x
    norm_before_fc: bool = False  # version 3: one norm over the side-by-side states, before fc
    target_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa heads as data (Cai et al. 2024). Head k guesses the k-th token after the one that the target draws."""

    heads: int
    blocks: int  # residual blocks per head
    hidden: int
    vocabulary: int  # the target's
    draft_vocabulary: int
    shared_head: bool = False  # one projection for all heads
    target_sha256: str | None = None

    @property
    def wants(self) -> tuple[int, ...]:
        return (-1,)


@dataclass(frozen=True)
class _Head:
    path: Path
    tensors: Mapping[str, Tensor] = field(repr=False)
    tokens: NDArray[np.int64] | None = field(repr=False)  # draft token -> target token, ascending; None: the same
    config: EagleConfig | MedusaConfig

    def target_tokens(self, draft: NDArray[np.integer]) -> NDArray[np.int64]:
        """Draft tokens as the target numbers them."""
        return np.asarray(draft, np.int64) if self.tokens is None else self.tokens[draft]

    def memory(self) -> int:
        """Bytes of the weights as they lie in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def warning(self, target_sha256: str) -> str | None:
        """A warning with both hashes if the head was made for another target; None if not, or if it does not say."""
        recorded = self.config.target_sha256
        if recorded is None or recorded == target_sha256:
            return None
        return (
            f"{self.path}: made for the target with SHA-256 {recorded}, and this one has {target_sha256}: "
            "its guesses will be worse; train a head for this target"
        )


@dataclass(frozen=True)
class Eagle(_Head):
    """An EAGLE head, checked; its tensors lie in the format of the file."""

    config: EagleConfig


@dataclass(frozen=True)
class Medusa(_Head):
    """Medusa heads, checked; their tensors lie in the format of the file."""

    config: MedusaConfig


# -- names and shapes ----------------------------------------------------------------------------------------------

_LAYER: Final = {name: theirs for name, theirs in hf_model.LAYER.items() if not name.endswith(("_bias", "_norm"))} | {
    "attn_norm": "input_layernorm.weight",
    "embed_norm": "input_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_TOP: Final = {
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    "input_norm": "input_norm.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "embed": "embed_tokens.weight",
}


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that an EAGLE head must have, by canonical name."""
    decoder = config.decoder
    hidden, dim = decoder.hidden, decoder.head_dim
    queries, keys = decoder.heads * dim, decoder.kv_heads * dim
    inputs = 2 * hidden if config.version == 1 else len(config.wants) * hidden
    found: dict[str, tuple[int, ...]] = {"fc": (hidden, inputs)}
    if config.version == 3:
        found |= {"norm": (hidden,), "head": (config.draft_vocabulary, hidden)}
        if config.norm_before_fc:
            found["input_norm"] = (inputs,)
    for i in range(decoder.layers):
        first = i == 0
        width = 2 * hidden if first and config.version == 3 else hidden
        layer: dict[str, tuple[int, ...]] = {
            "q": (queries, width),
            "k": (keys, width),
            "v": (keys, width),
            "o": (hidden, queries),
            "mlp_norm": (hidden,),
            "gate": (decoder.intermediate, hidden),
            "up": (decoder.intermediate, hidden),
            "down": (hidden, decoder.intermediate),
        }
        if first and config.version == 3:
            layer |= {"embed_norm": (hidden,), "hidden_norm": (hidden,)}
        elif not first:
            layer["attn_norm"] = (hidden,)
        if decoder.qkv_bias:
            layer |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
        if decoder.qk_norm:
            layer |= {"q_norm": (dim,), "k_norm": (dim,)}
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def _eagle_optional(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that an EAGLE head may have. A published copy of the target's frozen embedding is passed over."""
    hidden = config.decoder.hidden
    if config.version == 3:
        return {}
    return {
        "fc_bias": (hidden,),
        "embed_norm": (hidden,),  # on the embedding before fc, in the speculators library's variant with norms
        "layers.0.attn_norm": (hidden,),
        "norm": (hidden,),
    }


def medusa_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of Medusa heads, by canonical name."""
    square, row = (config.hidden, config.hidden), (config.hidden,)
    found: dict[str, tuple[int, ...]] = {}
    for k in range(config.heads):
        for j in range(config.blocks):
            found |= {f"heads.{k}.blocks.{j}": square, f"heads.{k}.blocks.{j}_bias": row}
        if not config.shared_head:
            found[f"heads.{k}.head"] = (config.draft_vocabulary, config.hidden)
    if config.shared_head:
        found["head"] = (config.draft_vocabulary, config.hidden)
    return found


# -- reading -------------------------------------------------------------------------------------------------------


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head and not a whole model."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = _json(path)
    names = ("speculators_model_type", "medusa_num_heads", "draft_vocab_size")
    return any(name in config for name in names) or "Eagle" in str(config.get("architectures"))


def read_head(folder: str | Path, target: DecoderConfig) -> Eagle | Medusa:
    """The head in a folder with config.json and safetensors files, checked against the target's shapes.

    Raises ModelError, one line that names the culprit and the way out.
    """
    folder = Path(folder)
    if folder.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(_pickled(folder))
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder: give the one with the head's config.json and safetensors file")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing: it says which head this is")
    config = _json(path)
    stored = _stored(folder)
    if "medusa_num_heads" in config:
        return _medusa(folder, config, stored, target)
    kind = config.get("speculators_model_type")
    if kind == "eagle":
        return _speculators_eagle1(folder, config, stored, target)
    if kind == "eagle3":
        return _eagle3(folder, config, _object(config, "transformer_layer_config", path), stored, target)
    if kind is not None:
        raise ModelError(f"{path}: speculators_model_type {kind!r} is not read (these are: eagle, eagle3)")
    if any(name.startswith("midlayer.") for name in stored):
        renamed = {name.replace("midlayer.", "layers.0.", 1): value for name, value in stored.items()}
        return _eagle3(folder, config, config, renamed, target)
    if "fc.weight" in stored:
        return _eagle1(folder, config, {}, stored, target)
    raise ModelError(f"{folder}: no head that is read: neither EAGLE's fc.weight nor medusa_num_heads is there")


def _eagle3(
    folder: Path,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    stored: dict[str, Tensor | Any],
    target: DecoderConfig,
) -> Eagle:
    where = folder / "config.json"
    own = config.get(OURS) or {}
    decoder = _decoder(layer, target, where, layers=_count(layer, "num_hidden_layers", 1, where))
    width = config.get("target_hidden_size") or decoder.hidden
    if width != target.hidden or decoder.hidden != target.hidden:
        raise ModelError(
            f"{where}: the head is for states of {width} and has {decoder.hidden} itself, the target has "
            f"{target.hidden}: use a head that was trained for this target"
        )
    size = _count(config, "draft_vocab_size", decoder.vocabulary, where)
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (2, target.layers // 2, target.layers - 3)
    # theirs is the layer that reads the state, ours the one that leaves it
    wants = tuple(int(i) - 1 for i in ids)
    for i in wants:
        if not 0 <= i < target.layers:
            raise ModelError(
                f"{where}: reads the state before layer {i + 1}, and the target has {target.layers} layers"
            )
    made = EagleConfig(
        version=3,
        decoder=decoder,
        draft_vocabulary=size,
        wants=wants,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", "input_norm.weight" in stored)),
        target_sha256=_sha256(own),
    )
    tokens = _tokens(stored, size, decoder.vocabulary, folder)
    if "lm_head.weight" in stored and config.get("embed_requires_grad"):
        raise ModelError(f"{where}: embed_requires_grad is set: heads with an embedding of their own are not read")
    tensors = _rename(stored, eagle_shapes(made), {}, lambda name: _eagle_name(name, 3), folder)
    return Eagle(folder, tensors, tokens, made)


def _eagle1(
    folder: Path,
    config: Mapping[str, Any],
    flags: Mapping[str, str],
    stored: dict[str, Tensor | Any],
    target: DecoderConfig,
) -> Eagle:
    where = folder / "config.json"
    decoder = _decoder(config, target, where, layers=_count(config, "num_hidden_layers", 1, where))
    if decoder.hidden != target.hidden:
        raise ModelError(
            f"{where}: the head is for states of {decoder.hidden}, the target has {target.hidden}: "
            "use a head that was trained for this target"
        )
    made = EagleConfig(1, decoder, decoder.vocabulary, (-1,), target_sha256=_sha256(config.get(OURS) or {}))
    renames = dict(flags)

    def theirs(name: str) -> str:
        return renames.get(name) or _eagle_name(name, 1)

    return Eagle(folder, _rename(stored, eagle_shapes(made), _eagle_optional(made), theirs, folder), None, made)


def _speculators_eagle1(
    folder: Path, config: Mapping[str, Any], stored: dict[str, Tensor | Any], target: DecoderConfig
) -> Eagle:
    layer = _object(config, "transformer_layer_config", folder / "config.json")
    renamed = {name.replace("transformer.", "layers.0.", 1): value for name, value in stored.items()}
    flags = {
        "fc": "fusion_fc.weight",
        "fc_bias": "fusion_fc.bias",
        "embed_norm": "embedding_layernorm.weight",
        "norm": "pre_lm_head_layernorm.weight",
    }
    made = _eagle1(folder, dict(layer) | {"num_hidden_layers": 1}, flags, renamed, target)
    return replace(made, config=replace(made.config, target_sha256=_sha256(config.get(OURS) or {})))


def _eagle_name(name: str, version: int) -> str:
    if name in _TOP:
        return _TOP[name]
    if name == "embed_norm":
        return "embedding_layernorm.weight"
    _, layer, part = name.split(".")
    return f"layers.{layer}.{_LAYER[part]}"


def _medusa(folder: Path, config: Mapping[str, Any], stored: dict[str, Tensor | Any], target: DecoderConfig) -> Medusa:
    where = folder / "config.json"
    own = config.get(OURS) or {}
    prefix = "medusa_head."
    if any(name.startswith(prefix) for name in stored):  # beside the weights of a fine-tuned target
        stored = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    size = _count(own, "draft_vocab_size", target.vocabulary, where)
    made = MedusaConfig(
        heads=_count(config, "medusa_num_heads", None, where),
        blocks=_count(config, "medusa_num_layers", 1, where),
        hidden=target.hidden,
        vocabulary=target.vocabulary,
        draft_vocabulary=size,
        shared_head=bool(own.get("shared_head", False)),
        target_sha256=_sha256(own),
    )
    tokens = _tokens(stored, size, target.vocabulary, folder)
    return Medusa(
        folder, _rename(stored, medusa_shapes(made), {}, lambda n: _medusa_name(n, made), folder), tokens, made
    )


def _medusa_name(name: str, config: MedusaConfig) -> str:
    if name == "head":
        return "lm_head.weight"
    _, k, *rest = name.split(".")
    if rest == ["head"]:
        return f"{k}.{config.blocks}.weight"
    block, _, bias = rest[1].partition("_")
    return f"{k}.{block}.linear.{bias or 'weight'}"


def _rename(
    stored: Mapping[str, Any],
    needed: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    theirs: Any,
    folder: Path,
) -> dict[str, Tensor]:
    """Tensors under canonical names. Refuses missing, misshapen and unknown ones by the file's own name."""
    tensors: dict[str, Tensor] = {}
    for name, shape in {**needed, **optional}.items():
        tensor = stored.get(theirs(name))
        if tensor is None:
            if name in optional:
                continue
            raise ModelError(f"{folder}: tensor {theirs(name)} is missing")
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{folder}: tensor {theirs(name)} holds whole numbers, weights are needed")
        if tensor.shape != shape:
            raise ModelError(f"{folder}: tensor {theirs(name)} has shape {list(tensor.shape)}, not {list(shape)}")
        tensors[name] = replace(tensor, name=name)
    # frozen copies of the target's own weights, and constants, are no part of the head
    passed = {"embed_tokens.weight", "t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight"}
    known = {theirs(name) for name in tensors} | passed
    strange = sorted(n for n in stored if n not in known and not n.endswith("rotary_emb.inv_freq"))
    if strange and not (strange == ["lm_head.weight"] and "head" not in needed):
        raise ModelError(f"{folder}: tensor {strange[0]} has no place in this head")
    return tensors


def _tokens(stored: dict[str, Tensor | Any], size: int, vocabulary: int, folder: Path) -> NDArray[np.int64] | None:
    """The target token of each draft token, from `d2t` (offsets) and checked against `t2d` (a mask)."""
    offsets, mask = stored.get("d2t"), stored.get("t2d")
    if offsets is None:
        if size != vocabulary:
            raise ModelError(
                f"{folder}: tensor d2t is missing: it says which {size:,} of {vocabulary:,} tokens are meant"
            )
        return None
    if isinstance(offsets, Tensor) or offsets.shape != (size,):
        raise ModelError(f"{folder}: d2t is not a vector of {size:,} whole numbers")
    tokens: NDArray[np.int64] = np.arange(size) + offsets.astype(np.int64)
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary or (np.diff(tokens) <= 0).any()):
        raise ModelError(f"{folder}: d2t does not give {size:,} different tokens of {vocabulary:,} in ascending order")
    if mask is not None and not isinstance(mask, Tensor):
        wanted = np.zeros(vocabulary, bool)
        wanted[tokens] = True
        if mask.shape != (vocabulary,) or not np.array_equal(mask.astype(bool), wanted):
            raise ModelError(f"{folder}: t2d and d2t do not tell the same tokens: the checkpoint is damaged")
    return tokens


def _decoder(layer: Mapping[str, Any], target: DecoderConfig, where: Path, layers: int) -> DecoderConfig:
    """The shapes of the head's own layers; what their config leaves out is as in the target."""
    plain = {
        "model_type": "llama",
        "vocab_size": target.vocabulary,
        "hidden_size": target.hidden,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "intermediate_size": target.intermediate,
        "max_position_embeddings": target.context,
        "rms_norm_eps": target.norm_eps,
    }
    # how weights are stored is told by the tensors themselves
    given = {name: value for name, value in layer.items() if value is not None and name != "quantization_config"}
    heads = given.get("num_attention_heads", target.heads)
    if given.get("hidden_size", target.hidden) == target.hidden and heads == target.heads:
        plain["head_dim"] = target.head_dim
    if given.get("model_type", "llama") not in hf_model.FAMILIES:
        given["model_type"] = "llama"  # SafeAILab's configs name their own class there
    made = hf_model.read_config(plain | given | {"num_hidden_layers": layers, "tie_word_embeddings": False}, where)
    if made.vocabulary != target.vocabulary:
        raise ModelError(
            f"{where}: the head is for a vocabulary of {made.vocabulary:,}, the target has {target.vocabulary:,}: "
            "use a head that was trained for this target"
        )
    return replace(made, bos=target.bos, eos=target.eos)


def _stored(folder: Path) -> dict[str, Tensor | Any]:
    """Every tensor of the folder: floating ones as Tensor, whole numbers and truth values as arrays.

    int8 weights with scales become Q8_0.
    """
    from safetensors import SafetensorError, deserialize

    paths = sorted(folder.glob("model-*-of-*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not paths:
        pickles = [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]
        raise ModelError(_pickled(pickles[0]) if pickles else f"{folder} has no safetensors file")
    found: dict[str, Tensor | Any] = {}
    for path in paths:
        try:
            entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        for name, entry in entries:
            found[name] = _entry(name, entry["dtype"], tuple(entry["shape"]), entry["data"], path)
    return _dequantised(found, folder)


def _entry(name: str, dtype: str, shape: tuple[int, ...], data: Any, path: Path) -> Tensor | Any:
    raw = np.frombuffer(bytes(data), np.uint8)
    if dtype in ("F32", "F16", "BF16"):
        return Tensor.over(name, dtype, shape, raw)
    kinds = {"I64": "<i8", "I32": "<i4", "I8": "<i1", "BOOL": "?", "U8": "<u1"}
    if dtype not in kinds:
        raise ModelError(f"{path}: tensor {name} has dtype {dtype}, which is not read")
    return raw.view(kinds[dtype]).reshape(shape)


def _dequantised(found: dict[str, Tensor | Any], folder: Path) -> dict[str, Tensor | Any]:
    """int8 matrices and their scales as Q8_0 tensors: blocks of a float16 scale and 32 numbers."""
    for name in [name for name in found if name.endswith("_scale")]:
        scales, whole = found.pop(name), found.get(name.removesuffix("_scale"))
        if not isinstance(scales, Tensor) or whole is None or isinstance(whole, Tensor) or whole.dtype != np.int8:
            raise ModelError(f"{folder}: {name} has no int8 matrix that it scales")
        rows, columns = whole.shape
        if scales.shape != (rows, columns // GROUP) or scales.kind != "F16":
            raise ModelError(f"{folder}: {name} is no float16 matrix of one scale per {GROUP} values")
        blocks = np.empty((rows, columns // GROUP, 2 + GROUP), np.uint8)
        blocks[..., :2] = scales.raw.reshape(rows, -1, 2)
        blocks[..., 2:] = whole.view(np.uint8).reshape(rows, -1, GROUP)
        base = name.removesuffix("_scale")
        found[base] = Tensor.over(base, "Q8_0", (rows, columns), blocks.reshape(-1))
    return found


def _pickled(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run code when it is opened: it is not read; load it where you trust it and "
        "save its tensors with safetensors.torch.save_file"
    )


def _json(path: Path) -> dict[str, Any]:
    from outrider.models.safetensors_folder import read_json

    return read_json(path)


def _object(config: Mapping[str, Any], name: str, where: Path) -> Mapping[str, Any]:
    value = config.get(name)
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {name} is missing or no object")
    return value


def _count(config: Mapping[str, Any], name: str, default: int | None, where: Path) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= 1 << 24:
        raise ModelError(f"{where}: {name} is {value!r}, no whole number of at least 1")
    return value


def _sha256(own: Mapping[str, Any]) -> str | None:
    value = own.get("target_sha256")
    return value if isinstance(value, str) else None


# -- writing -------------------------------------------------------------------------------------------------------

Values = Mapping[str, NDArray[np.float32]]


def write_eagle(
    folder: Path,
    config: EagleConfig,
    values: Values,
    tokens: NDArray[np.int64],
    *,
    target: str,
    architecture: str = "LlamaForCausalLM",
    guesses: int = 3,
    kind: str = "BF16",
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes an EAGLE-3 head in the speculators layout: what vLLM loads, and `read_head`.

    `target` is the name that the config gives the verifier, `guesses` the default number of guesses. `kind` is F32,
    BF16 or Q8_0 for matrices (int8 with scales); vectors are F32. `notes` go into the config, with the target's sha256.
    """
    if config.version != 3:
        raise ModelError("only EAGLE-3 heads are written")
    decoder = config.decoder
    stored = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": guesses, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
        "transformer_layer_config": _layer_config(decoder),
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.wants],
        "tie_word_embeddings": False,
        OURS: {"target_sha256": config.target_sha256, **(notes or {})},
    }
    named = {_eagle_name(name, 3): value for name, value in values.items()}
    _check_values(values, eagle_shapes(config))
    _write(folder, stored, named, tokens, decoder.vocabulary, kind)


def write_medusa(
    folder: Path,
    config: MedusaConfig,
    values: Values,
    tokens: NDArray[np.int64],
    *,
    target: str,
    kind: str = "BF16",
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes Medusa heads in FasterDecoding's layout, as safetensors.

    A shared projection and a reduced vocabulary are not known there: `lm_head.weight`, `d2t` and `t2d` are ours.
    """
    stored = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.blocks,
        "base_model_name_or_path": target,
        "hidden_size": config.hidden,
        "vocab_size": config.vocabulary,
        OURS: {
            "target_sha256": config.target_sha256,
            "shared_head": config.shared_head,
            "draft_vocab_size": config.draft_vocabulary,
            **(notes or {}),
        },
    }
    _check_values(values, medusa_shapes(config))
    named = {_medusa_name(name, config): value for name, value in values.items()}
    _write(folder, stored, named, tokens, config.vocabulary, kind)


def write_draft(
    folder: Path,
    config: DecoderConfig,
    values: Values,
    tokens: NDArray[np.int64],
    *,
    target: ModelFiles,
    kind: str = "BF16",
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a draft model that was distilled from `target` and shares its embedding.

    With the whole vocabulary it is a Hugging Face folder that any loader reads: the embedding is written too, and the
    tokenizer. With a reduced one, `read_draft` takes the embedding from the target, and `d2t` says what its head means.
    """
    whole = len(tokens) == config.vocabulary
    own: dict[str, Any] = {"target_sha256": target.sha256(), "kind": "draft", **(notes or {})}
    stored = _layer_config(config) | {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": config.tied_embeddings and whole,
        "bos_token_id": config.bos,
        "eos_token_id": list(config.eos),
        OURS: own,
    }
    named = {_hf_name(name): value for name, value in values.items()}
    if whole:
        if kind == "Q8_0":
            kind = "BF16"  # other loaders know no scales here
        named[_hf_name("embed")] = target.tensors["embed"].float32()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(target.tokenizer.to_json(), "utf-8")
    else:
        stored["draft_vocab_size"] = len(tokens)
    _write(folder, stored, named, tokens, config.vocabulary, kind)


def is_draft(folder: Path) -> bool:
    """Whether a folder holds a draft of `write_draft` with a reduced vocabulary, which needs its target."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = _json(path)
    own = config.get(OURS)
    return "draft_vocab_size" in config and isinstance(own, dict) and own.get("kind") == "draft"


def read_draft(folder: str | Path, target: ModelFiles) -> ModelFiles:
    """A draft of `write_draft` with a reduced vocabulary; `tokens` are the target's, by row of its head.

    Embedding and tokenizer are the target's. Raises ModelError.
    """
    folder = Path(folder)
    where = folder / "config.json"
    config = _json(where)
    size = _count(config, "draft_vocab_size", None, where)
    made = _decoder(config, target.config, where, layers=_count(config, "num_hidden_layers", None, where))
    stored = _stored(folder)
    tokens = _tokens(stored, size, made.vocabulary, folder)
    needed = {name: shape for name, shape in shapes(made).items() if name != "embed"} | {"head": (size, made.hidden)}
    tensors = _rename(stored, needed, {}, _hf_name, folder) | {"embed": target.tensors["embed"]}
    digest = partial(sha256_of_weights, folder)
    name = folder.resolve().name
    return replace(target, config=made, tensors=tensors, path=folder, name=name, digest=digest, tokens=tokens)


def _hf_name(name: str) -> str:
    if name in hf_model.TOP:
        return hf_model.TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{hf_model.LAYER[part]}"


def _layer_config(decoder: DecoderConfig) -> dict[str, Any]:
    scaling = decoder.rope_scaling
    found: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": decoder.vocabulary,
        "hidden_size": decoder.hidden,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.intermediate,
        "max_position_embeddings": decoder.context,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": decoder.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    if scaling is not None:
        found["rope_scaling"] = rope_scaling.to_hf(scaling)
    return found


def _check_values(values: Values, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in values or values[name].shape != shape:
            found = list(values[name].shape) if name in values else "nothing"
            raise ModelError(f"cannot write {name}: {list(shape)} is needed, there is {found}")
    if strange := sorted(values.keys() - shapes.keys()):
        raise ModelError(f"cannot write {strange[0]}: this head has no such tensor")


def _write(
    folder: Path,
    config: dict[str, Any],
    values: Values,
    tokens: NDArray[np.int64],
    vocabulary: int,
    kind: str,
) -> None:
    """config.json and model.safetensors, the weights first: a config without weights is refused when it is read."""
    from safetensors.numpy import save_file

    if kind not in ("F32", "BF16", "Q8_0"):
        raise ModelError(f"a head is written in F32, BF16 or Q8_0, not in {kind}")
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {}
    if len(tokens) != vocabulary:
        arrays["d2t"] = tokens.astype(np.int64) - np.arange(len(tokens))
        arrays["t2d"] = np.isin(np.arange(vocabulary), tokens)
    for name, value in values.items():
        if value.ndim < 2 or kind == "F32":
            arrays[name] = np.ascontiguousarray(value, np.float32)
        elif kind == "Q8_0":
            arrays[name], arrays[name + "_scale"] = _int8(np.ascontiguousarray(value, np.float32))
        else:
            arrays[name] = value  # written as bfloat16 below
    if kind == "Q8_0":
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                    },
                }
            },
        }
    part = folder / "model.safetensors.part"
    if kind == "BF16":
        _save_bf16(part, arrays)
    else:
        save_file(arrays, part)
    part.replace(folder / "model.safetensors")
    text = folder / "config.json.part"
    text.write_text(json.dumps(config, indent=2) + "\n")
    text.replace(folder / "config.json")


def _int8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Q8_0's scheme: per 32 values of a row, scale = largest / 127. [R, C] -> [R, C], [R, C / 32]"""
    rows, columns = values.shape
    if columns % GROUP:
        raise ModelError(f"rows of {columns} values do not fit into groups of {GROUP}: write BF16")
    grouped = values.reshape(rows, -1, GROUP)
    scales = (np.abs(grouped).max(-1) / 127).astype(np.float16)
    inverse = np.divide(1.0, scales, where=scales > 0, out=np.zeros(scales.shape, np.float32), dtype=np.float32)
    whole = np.rint(grouped * inverse[..., None]).clip(-127, 127).astype(np.int8)
    return whole.reshape(rows, columns), scales


def _save_bf16(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """As `save_file`, matrices of float32 as bfloat16, which numpy does not know."""
    from safetensors import TensorSpec, serialize_file

    names = {"float32": "float32", "int64": "int64", "bool": "bool"}
    data: dict[str, NDArray[Any]] = {}
    specs: dict[str, Any] = {}
    for name, value in arrays.items():
        halved = value.dtype == np.float32 and value.ndim > 1
        kept = np.ascontiguousarray(bfloat16_bits(value) if halved else value)
        data[name] = kept
        kind = "bfloat16" if halved else names[str(value.dtype)]
        specs[name] = TensorSpec(dtype=kind, shape=list(value.shape), data_ptr=kept.ctypes.data, data_len=kept.nbytes)
    serialize_file(specs, str(path), {"format": "pt"})
