"""Where pulled models lie."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`$OUTRIDER_CACHE`, or else the user's cache folder as the platform has it, and `models` in it."""
    if named := os.environ.get("OUTRIDER_CACHE"):
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("outrider")) / "models"
