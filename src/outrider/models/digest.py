"""SHA-256 of large files, remembered: a file of the same size and time of change is not read twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from outrider.models.cache_folder import cache_folder

__all__ = ["sha256_of", "sha256_of_folder", "sha256_of_weights"]


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex. Remembered in the cache folder, by path, size and time of change."""
    path = path.resolve()
    state = path.stat()
    stamp = [str(path), state.st_size, state.st_mtime_ns]
    note = cache_folder() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        stored = json.loads(note.read_text())
        if stored["file"] == stamp:
            return str(stored["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note yet, or a damaged one: it is written anew
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _remember(note, {"file": stamp, "sha256": digest})
    return digest


def sha256_of_folder(paths: Iterable[Path]) -> str:
    """One SHA-256 for several files: of the lines `hash  name`, sorted by name."""
    lines = sorted((path.name, sha256_of(path)) for path in paths)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in lines).encode()).hexdigest()


def sha256_of_weights(folder: Path) -> str:
    """One SHA-256 for the weights in a folder and the config.json that says how to read them."""
    return sha256_of_folder([folder / "config.json", *folder.glob("*.safetensors")])


def _remember(note: Path, content: object) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(content))
        part.replace(note)
    except OSError:
        pass  # a cache folder that cannot be written only costs the next reading
