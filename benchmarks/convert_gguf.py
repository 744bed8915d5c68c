"""Write a GGUF file's weights anew in another tensor type, for peers that want the same model in theirs.

    python benchmarks/convert_gguf.py MODEL.gguf Q8_0

The file lands in the user's cache folder under a name that holds the hash of its source, and is made once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from platformdirs import user_cache_path

KINDS = {
    "F32": LlamaFileType.ALL_F32,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
# Next to 4-bit layers llama.cpp's own quantiser keeps a tied embedding, which is the head too, in a finer type:
# Q6_K where rows are multiples of 256, and Q8_0 where they are not.
EMBEDDING = {"Q4_0": "Q8_0"}
DEFAULT_FOLDER = user_cache_path("outrider") / "peers"


class ConversionError(ValueError):
    """A file that cannot be converted: names it and says why."""


def convert(path: Path, kind: str, folder: Path = DEFAULT_FOLDER) -> Path:
    """The model of `path` with its matrices in `kind` (F32, BF16, Q8_0 or Q4_0), a file in `folder`.

    Weights are dequantised to float32 and quantised again; vectors stay as they are, metadata is copied. A file that is
    there already is taken as it is. Raises ConversionError for a kind that is not known and
    for a file that is no GGUF file.
    """
    if kind not in KINDS:
        raise ConversionError(f"{kind!r} is no kind to convert to; known are {', '.join(KINDS)}")
    target = folder / f"{path.stem}-{_digest(path)[:12]}-{kind}.gguf"
    if target.exists():
        return target
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ConversionError(f"{path}: not a GGUF file that can be read ({error})") from None
    folder.mkdir(parents=True, exist_ok=True)
    half = target.with_suffix(f".{os.getpid()}.part")  # renamed when whole, so that a killed run leaves no half model
    try:
        _write(reader, kind, half)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)
    return target


def _write(reader: GGUFReader, kind: str, target: Path) -> None:
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub = entry.types[-1] if entry.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub)
    writer.add_file_type(KINDS[kind])
    for tensor in reader.tensors:
        wanted = GGMLQuantizationType[_kind_of(tensor.name, len(tensor.shape), kind, tensor.tensor_type.name)]
        writer.add_tensor(tensor.name, _requantised(tensor.data, tensor.tensor_type, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(name: str, dimensions: int, kind: str, present: str) -> str:
    if dimensions < 2:
        return present
    return EMBEDDING.get(kind, kind) if name == "token_embd.weight" else kind


def _requantised(data: NDArray[Any], present: GGMLQuantizationType, wanted: GGMLQuantizationType) -> NDArray[Any]:
    """The tensor's bytes in the wanted type; untouched if it is of that type already."""
    if present == wanted:
        return data
    values = gguf.quants.dequantize(data, present).astype(np.float32, copy=False)
    return values if wanted is GGMLQuantizationType.F32 else gguf.quants.quantize(values, wanted)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        print(convert(arguments.model, arguments.kind, arguments.folder))
    except (ConversionError, OSError) as error:
        print(f"convert_gguf: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
