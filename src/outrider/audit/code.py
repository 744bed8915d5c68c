"""Which code runs, whatever its version number says."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["sha256_of_code"]

_PACKAGE = Path(__file__).parents[1]


def sha256_of_code(package: Path = _PACKAGE) -> str:
    """SHA-256 over the lines `hash  path` of the package's own .py and .so files, sorted by path."""
    lines = []
    for path in sorted((*package.rglob("*.py"), *package.rglob("*.so")), key=lambda p: p.relative_to(package).parts):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{digest}  {path.relative_to(package).as_posix()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
