"""What a request with `speculation.trace` is told of how its texts came about: `outrider` in each of its choices."""

from __future__ import annotations

from typing import Any

from outrider.engine.attribution import Attribution
from outrider.engine.results import Delta, Result
from outrider.models.tokenizer import Tokenizer
from outrider.server.engine_thread import Piece

__all__ = ["Trace"]


class Trace:
    """Of one text. Spans are its pieces of text, steps the target's forwards; both go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._attribution = Attribution(tokenizer.token_bytes, tokenizer.is_special)

    def take(self, piece: Piece) -> dict[str, Any]:
        """What is new with this piece, and the times with the last one."""
        for delta in piece.deltas:
            self._attribution.add(delta)
        out: dict[str, Any] = {
            "spans": [
                {"text": span.text, "origin": span.origin, "source": span.source or None, "step": span.step}
                for span in self._attribution.take(piece.text)
            ],
            "steps": [_step(delta) for delta in piece.deltas if delta.tokens],
        }
        return out if piece.result is None else out | {"timings": _timings(piece.result)}


def _step(delta: Delta) -> dict[str, Any]:
    assert delta.step is not None  # it has tokens
    return {
        "tokens": len(delta.tokens),
        "drafted": delta.step.drafted,
        "accepted": delta.step.accepted,
        "drafter": delta.step.drafter,
    }


def _timings(result: Result) -> dict[str, float]:
    """Seconds: to the first token and to the last one since the engine took the request, and by phase."""
    return {"ttft": result.ttft, "total": result.seconds, **result.timings}
