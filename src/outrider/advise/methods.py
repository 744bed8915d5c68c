"""What each method costs beside the target's forward, by the analytic model, and how well others' figures fit it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.advise.roofline import Roofline, hardware_named, stacks
from outrider.advise.shape import Shape, known

__all__ = ["Draft", "Reproduced", "extra_bytes", "published", "speedup", "step_seconds"]


@dataclass(frozen=True, slots=True)
class Draft:
    """How a method drafts in each step: `nodes` guesses per sequence, found in `passes` forwards of its own.

    `method` is one of ours, or eagle1 for EAGLE-1 and -2 heads, which use the target's own projection.
    """

    method: str
    nodes: int
    passes: int
    tree: bool = False
    model: Shape | None = None  # the draft model


def step_seconds(machine: Roofline, target: Shape, draft: Draft | None, batch: int, context: int) -> float:
    """Of a step in which each of `batch` sequences checks the draft's guesses; of a plain one without a draft."""
    if draft is None or not draft.nodes:
        return machine.forward(target, batch, batch, context)
    verify = machine.forward(target, batch * (1 + draft.nodes), batch, context)
    return verify + machine.speculation(tree=draft.tree) + _guessing(machine, target, draft, batch, context)


def speedup(
    machine: Roofline, target: Shape, draft: Draft, tokens: float, *, batch: int = 1, context: int = 512
) -> float:
    """Over plain decoding, of a method that brings so many tokens per step and sequence."""
    plain = step_seconds(machine, target, None, batch, context)
    return tokens * plain / step_seconds(machine, target, draft, batch, context)


def extra_bytes(target: Shape, draft: Draft, batch: int, context: int) -> float:
    """Memory that the method takes beside the target's."""
    if draft.method == "draft_model" and draft.model is not None:
        return draft.model.weight_bytes + batch * context * draft.model.kv_bytes
    cache = batch * context * target.kv_bytes / target.layers
    if draft.method in ("eagle", "eagle1"):
        return sum(_eagle(target, draft.method)) * target.bits / 8 + cache
    if draft.method == "medusa":
        return target.medusa_parameters * target.bits / 8
    return 0.0


def _guessing(machine: Roofline, target: Shape, draft: Draft, batch: int, context: int) -> float:
    if draft.method == "draft_model":
        model = draft.model
        assert model is not None, "a draft model without a shape"
        cache = batch * context * model.kv_bytes
        one = machine.draft(model.read_parameters, model.bits, batch, layers=model.layers, kv=cache)
        return draft.passes * one
    if draft.method in ("eagle", "eagle1"):
        each, once = _eagle(target, draft.method)
        kv = batch * context * target.kv_bytes / target.layers
        one = machine.draft(each, target.bits, batch, kv=kv)
        first = machine.draft(each + once, target.bits, batch, kv=kv)  # reads what was accepted too
        return first + (draft.passes - 1) * one
    if draft.method == "medusa":
        return machine.draft(target.medusa_parameters, target.bits, batch)
    return 0.0  # looked up on the host while the device works


def _eagle(target: Shape, method: str) -> tuple[float, float]:
    """Parameters that each guess reads, and that a step reads once."""
    if method == "eagle":
        return target.eagle_parameters
    return target.layer_parameters + 2 * target.hidden**2 + target.head_parameters, 0.0


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A published speed-up and what the model says of it."""

    title: str
    speedup: float
    predicted: float
    source: str
    fitted: bool  # whether constants of the software were set by it

    @property
    def error(self) -> float:
        """Relative to the published figure."""
        return self.predicted / self.speedup - 1


def published() -> Iterator[Reproduced]:
    """Each point of published.json, with the model's own figure."""
    stored: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text("utf-8"))
    for point in stored["points"]:
        target = known()[point["model"]]
        machine = Roofline(hardware_named(point["hardware"]), stacks()[point["stack"]], devices=point.get("devices", 1))
        draft = Draft(
            point["method"],
            point["nodes"],
            point["passes"],
            point.get("tree", False),
            known()[point["draft"]] if "draft" in point else None,
        )
        predicted = speedup(machine, target, draft, point["tokens"], batch=point["batch"], context=point["context"])
        yield Reproduced(point["title"], point["speedup"], predicted, point["source"], point["fitted"])
