"""The tensors of a folder of safetensors files, memory-mapped, single or sharded. Nothing is copied, nothing trusted.

Source: the format page of the safetensors project: length u64, that many bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end]}}`, then the data, without holes. Our own reader because the package
hands numpy a copy, and has no bfloat16 for it.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.models.errors import ModelError
from outrider.models.tensor import KINDS, Tensor

__all__ = ["INDEX", "SINGLE", "hint", "read_file", "read_folder", "read_json"]

DTYPES: Final = ("F32", "F16", "BF16")
LONGEST_HEADER: Final = 100 << 20  # the format's own limit
LONGEST_JSON: Final = 64 << 20  # config and index files; no real one comes near
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder by the file's own name. Raises ModelError for whatever is missing or unsound."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{hint(folder)}")
        return read_file(folder / SINGLE)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ModelError(f"{index} has no weight_map from tensor to file names")
    shards: dict[str, dict[str, Tensor]] = {}
    for place in sorted(set(places.values())):
        if Path(place).name != place or not place.endswith(".safetensors"):
            raise ModelError(f"{index} names {place!r}, which is no safetensors file of its folder")
        shards[place] = read_file(folder / place)
    for name, place in places.items():
        if name not in shards[place]:
            raise ModelError(f"{folder / place}: tensor {name} is missing, though {INDEX} places it there")
    return {name: shards[place][name] for name, place in places.items()}


def read_file(path: Path) -> dict[str, Tensor]:
    """Every tensor of one file."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    length = int.from_bytes(data[:8], "little")
    start = 8 + length
    if length > LONGEST_HEADER or start > len(data):
        raise ModelError(f"{path} claims a header of {length} bytes among {len(data)}: it is truncated or damaged")
    header = _parse(data[8:start], path)
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    end = 0
    for begin, stop, name, entry in sorted(_places(header, path)):
        if begin != end:
            raise ModelError(f"{path}: tensor {name} begins at {begin} where {end} is next: it is damaged")
        end = stop
        if start + stop > len(data):
            raise ModelError(
                f"{path}: tensor {name} ends at byte {start + stop}, the file at {len(data)}: "
                "it is truncated; fetch it again"
            )
        tensors[name] = _tensor(name, entry, data, start + begin, stop - begin, path)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if there is none."""
    try:
        if path.stat().st_size > LONGEST_JSON:
            raise ModelError(f"{path} is larger than {LONGEST_JSON >> 20} MiB")
        return _parse(path.read_bytes(), path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None


def _places(header: dict[str, Any], path: Path) -> list[tuple[int, int, str, dict[str, Any]]]:
    found = []
    for name, entry in header.items():
        offsets = _whole_numbers(entry.get("data_offsets")) if isinstance(entry, dict) else None
        if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ModelError(f"{path}: tensor {name} has no sound data_offsets")
        found.append((offsets[0], offsets[1], name, entry))
    return found


def _tensor(name: str, entry: dict[str, Any], data: mmap.mmap, offset: int, size: int, path: Path) -> Tensor:
    dtype, shape = entry.get("dtype"), _whole_numbers(entry.get("shape"))
    if dtype not in DTYPES:
        raise ModelError(f"{path}: tensor {name} has dtype {dtype!r}, which is not read (only {', '.join(DTYPES)})")
    if shape is None or len(shape) not in (1, 2) or min(shape) < 1:
        raise ModelError(f"{path}: tensor {name} has shape {entry.get('shape')!r}: a vector or a matrix is needed")
    needed = KINDS[dtype].row_bytes(shape[-1]) * (shape[0] if len(shape) == 2 else 1)
    if size != needed:
        raise ModelError(f"{path}: tensor {name} has {size} bytes where {shape} in {dtype} takes {needed}")
    return Tensor.over(name, dtype, tuple(shape), np.frombuffer(data, np.uint8, size, offset))


def _whole_numbers(values: Any) -> list[int] | None:
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return values
    return None


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a number too long, or nested too deep
        raise ModelError(f"{path}: its JSON cannot be read: it is damaged") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: its JSON is no object")
    return value


def hint(folder: Path) -> str:
    """The way out where a folder holds a model in another form, or nothing."""
    if any(folder.glob("*.gguf")):
        return ": give the .gguf file in it instead"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return ": pickled weights are not read; save the model as safetensors"
    return ""
