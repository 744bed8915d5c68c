"""Opens a model: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.models import gguf_model, hf_model
from outrider.models.config import DecoderConfig
from outrider.models.digest import sha256_of, sha256_of_folder
from outrider.models.errors import ModelError
from outrider.models.gguf_file import GgufFile
from outrider.models.layout import check_config
from outrider.models.safetensors_folder import hint, read_folder, read_json
from outrider.models.tensor import Tensor
from outrider.models.tokenizer import Tokenizer

__all__ = ["ModelFiles", "open_model"]


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, checked but not yet decoded: tensors are memory-mapped in the format of the file."""

    config: DecoderConfig
    tensors: Mapping[str, Tensor] = field(repr=False)  # by canonical name
    tokenizer: Tokenizer = field(repr=False)
    path: Path
    name: str
    digest: Callable[[], str] = field(repr=False)
    licence: str | None = None
    tokens: NDArray[np.int64] | None = field(default=None, repr=False)  # of the target, by row of a draft's own head

    def sha256(self) -> str:
        """SHA-256 of the file, or over the files of the folder. Reads them once, later only their sizes and times."""
        return self.digest()

    @property
    def quantisation(self) -> str:
        """The format that most of the layers' weights are in, such as Q4_1 or BF16."""
        sizes: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            if name.startswith("layers.") and len(tensor.shape) == 2:
                sizes[tensor.kind] += tensor.shape[0] * tensor.shape[1]
        return sizes.most_common(1)[0][0]


def open_model(path: str | Path, name: str | None = None) -> ModelFiles:
    """Opens the model at `path`, a GGUF file or a folder with config.json, safetensors and tokenizer.json.

    Reads directories and tokenizer only; the weights stay where they are until a runner packs them. Raises ModelError,
    before any of them is touched, for a model that is not supported or not sound, naming what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, name or path.resolve().name)
    if not path.is_file():
        raise ModelError(f"{path} {'is neither a file nor a folder' if path.exists() else 'does not exist'}")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is a file of weights alone: give its folder, with config.json and tokenizer.json")
    return _open_gguf(path, name or path.stem)


def _open_gguf(path: Path, name: str) -> ModelFiles:
    from outrider.models import gguf_tokenizer

    file = GgufFile(path)
    config = gguf_model.read_config(file)
    tensors = gguf_model.read_tensors(file, config)
    tokenizer = gguf_tokenizer.read_tokenizer(file.metadata)
    config = _with_tokens(config, tokenizer, path)
    licence = file.metadata.pairs.get("general.license")
    return ModelFiles(
        config, tensors, tokenizer, path, name, partial(sha256_of, path), licence if isinstance(licence, str) else None
    )


def _open_folder(path: Path, name: str) -> ModelFiles:
    from outrider.models import hf_tokenizer

    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: it is no model folder{hint(path)}")
    stored = read_json(path / "config.json")
    config = hf_model.read_config(stored, path / "config.json")
    tensors = hf_model.rename(read_folder(path), config, path)
    tokenizer = hf_tokenizer.read_tokenizer(path, stored)
    config = _with_tokens(config, tokenizer, path)
    files = [*path.glob("*.safetensors"), path / "config.json", path / "tokenizer.json"]
    return ModelFiles(config, tensors, tokenizer, path, name, partial(sha256_of_folder, files))


def _with_tokens(config: DecoderConfig, tokenizer: Tokenizer, path: Path) -> DecoderConfig:
    if tokenizer.vocabulary > config.vocabulary:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocabulary} tokens and the model rows for {config.vocabulary} only"
        )
    config = replace(config, bos=tokenizer.bos, eos=tokenizer.eos)
    check_config(config, str(path))
    return config
