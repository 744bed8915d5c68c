"""What training refuses."""

from __future__ import annotations

__all__ = ["TrainError"]


class TrainError(ValueError):
    """A prompt file, a recipe or a folder that cannot be trained with: names the culprit and the way out."""
