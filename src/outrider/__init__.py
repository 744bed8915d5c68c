"""Outrider: speculative decoding with the promise of the same bits as plain decoding, sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.core.params import SamplingParams
    from outrider.core.tree import Tree
    from outrider.engine.engine import Engine
    from outrider.engine.results import Delta, Result
    from outrider.engine.speculation import Speculation

__version__ = "0.1.0"

__all__ = ["Delta", "Engine", "Result", "SamplingParams", "Speculation", "Tree", "__version__"]

# Resolved on first use, so that `import outrider` and `outrider --help` load neither numpy nor the native core.
_HOMES = {
    "Delta": "outrider.engine.results",
    "Engine": "outrider.engine.engine",
    "Result": "outrider.engine.results",
    "SamplingParams": "outrider.core.params",
    "Speculation": "outrider.engine.speculation",
    "Tree": "outrider.core.tree",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
