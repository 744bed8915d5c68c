"""A tokenizer from a Hugging Face folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from outrider.models.chat_template import ChatTemplate
from outrider.models.errors import ModelError
from outrider.models.safetensors_folder import read_json
from outrider.models.tokenizer import Role, Tokenizer

__all__ = ["read_tokenizer"]

LONGEST_TEMPLATE: Final = 1 << 20


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer and its chat template. `config` is the object of config.json.

    The tokens that end a text come from generation_config.json, else config.json, else the tokenizer's own config.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing: save the tokenizer with transformers' fast tokenizer, which writes it")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    settings = _optional(folder / "tokenizer_config.json")
    added = backend.get_added_tokens_decoder()
    bos, eos = _ends(folder, config, settings, backend)
    role = Role(
        special=frozenset(token for token, entry in added.items() if entry.special),
        literal=frozenset(added),
        bos=bos,
        eos=eos,
        adds_bos=bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos],
    )
    template = _template(folder, settings)
    if template is None:
        return Tokenizer(backend, role, byte_level=_is_byte_level(backend, path))
    names = {name: text for name, entry in settings.items() if name.endswith("_token") and (text := _text(entry))}
    return Tokenizer(backend, role, byte_level=_is_byte_level(backend, path), template=ChatTemplate(template, names))


def _is_byte_level(backend: tokenizers.Tokenizer, path: Path) -> bool:
    kind = type(backend.model).__name__
    if kind not in ("BPE", "Unigram"):
        raise ModelError(f"{path}: a {kind} tokenizer is not supported (these are: BPE, Unigram)")
    if backend.decoder is None:
        raise ModelError(f"{path}: the tokenizer has no decoder: how its tokens spell text is unknown")
    stored = json.loads(backend.decoder.__getstate__())
    steps = [step.get("type") for step in stored.get("decoders", [stored])]
    if "ByteLevel" in steps:
        return True
    if {"Metaspace", "Replace"} & set(steps):
        return False
    raise ModelError(f"{path}: decoder {steps[0]!r} is not supported (these are: ByteLevel, and SentencePiece's)")


def _ends(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> tuple[int | None, tuple[int, ...]]:
    generation = _optional(folder / "generation_config.json")
    found: dict[str, list[int]] = {}
    for name in ("bos", "eos"):
        value = generation.get(f"{name}_token_id", config.get(f"{name}_token_id"))
        if value is None and (text := _text(settings.get(f"{name}_token"))):
            value = backend.token_to_id(text)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ModelError(f"{folder}: {name}_token_id is {value!r}, no token")
        found[name] = ids
    return next(iter(found["bos"]), None), tuple(dict.fromkeys(found["eos"]))


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > LONGEST_TEMPLATE:
            raise ModelError(f"{path} is larger than {LONGEST_TEMPLATE >> 20} MiB")
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{path} is not UTF-8") from None
    stored = settings.get("chat_template")
    if isinstance(stored, list):
        return _default(stored)
    return stored if isinstance(stored, str) else None


def _default(templates: Iterable[Any]) -> str | None:
    named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    found = named.get("default")
    return found if isinstance(found, str) else None


def _text(entry: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that holds it."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
