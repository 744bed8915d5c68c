"""Where a figure was measured: the machine, the versions and the commit."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider.runtime.machine import machine

__all__ = ["git", "machine", "versions"]

_PACKAGES = ("numpy", "tokenizers", "gguf", "safetensors", "torch", "transformers")


def versions() -> dict[str, str]:
    """Python and the packages that the figures depend on, as far as they are installed."""
    out = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def git() -> dict[str, Any] | None:
    """Commit of the sources that run, and whether they were changed since; None outside a repository."""
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "HEAD")
    # installed below somebody else's repository, it is not among what that one keeps
    if commit is None or not _git(here, "ls-files", Path(__file__).name):
        return None
    return {"commit": commit, "changed": bool(_git(here, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
