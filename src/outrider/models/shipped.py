"""Finds what was trained for a model and comes with the package, by the SHA-256 of that model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "find_shipped"]

FOLDER = Path(__file__).parents[1] / "shipped"  # one folder per head, draft or set of layers


def find_shipped(kind: str, target_sha256: str, folder: Path = FOLDER) -> Path | None:
    """The folder of a `kind` (eagle, medusa, draft, layer_skip, ngram_model) for that target; None if there is none."""
    for path, found, sha256 in _all(folder):
        if (found, sha256) == (kind, target_sha256):
            return path
    return None


def _all(folder: Path) -> Iterator[tuple[Path, str, str | None]]:
    """Each shipped folder: path, kind, SHA-256 of its target."""
    for path in sorted(folder.glob("*/config.json")):
        config = json.loads(path.read_text())
        own = config.get("outrider", {})
        yield path.parent, _kind(config, own), own.get("target_sha256")
    for path in sorted(folder.glob("*/layer_skip.json")):
        yield path.parent, "layer_skip", json.loads(path.read_text()).get("target_sha256")


def _kind(config: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    if "medusa_num_heads" in config:
        return "medusa"
    kind = own.get("kind")
    return str(kind) if kind in ("draft", "ngram_model") else "eagle"
