"""What a step costs by public figures alone: bytes over bandwidth, arithmetic over its rate, and what software adds.

A forward of R rows over B sequences with c cached tokens each reads the weights and B c rows of the cache, and
multiplies R rows with all weights (Williams et al. 2009, roofline):

    memory = (weights + B c kv) / (share * bandwidth)      arithmetic = 2 parameters R / (share * rate)
    device = sqrt(memory^2 + arithmetic^2)                 between their maximum and their sum: kernels overlap in part
    seconds = max(device, layers * launch) + step          launches of software without graphs run beside the device

The shares and what software adds are data of the stacks in hardware.json, each with its source.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.advise.shape import Shape
from outrider.core.names import near

__all__ = ["Hardware", "HardwareError", "Roofline", "Stack", "hardware", "hardware_named", "stacks"]


class HardwareError(ValueError):
    """A device or software that is not in the list: names those that are."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device by its maker's figures: GB/s, GB, dense TFLOP/s by format."""

    name: str
    title: str
    bandwidth: float
    memory: float
    compute: dict[str, float]
    source: str

    def rate(self, bits: float) -> float:
        """FLOP/s with weights of so many bits. 4-bit weights are multiplied in 16 bits; 8-bit ones where it can."""
        wide = self.compute["bf16"]
        return 1e12 * (max(self.compute.get("fp8", 0), self.compute.get("int8", 0), wide) if 7 < bits < 9 else wide)


@dataclass(frozen=True, slots=True)
class Stack:
    """What software makes of a device. Milliseconds."""

    name: str
    title: str
    bandwidth_share: float
    compute_share: float
    step_ms: float  # of each forward of the target, beside the device's work
    layer_ms: float  # of launching a layer's kernels, beside the device's work
    speculation_ms: float  # of each step that checks guesses
    tree_ms: float  # and if they are a tree
    draft_ms: float  # of each forward of a draft model or head
    source: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device under some software. Seconds; `batch` sequences with `context` cached tokens each."""

    device: Hardware
    stack: Stack
    devices: int = 1  # tensor-parallel

    def forward(self, shape: Shape, rows: int, batch: int, context: int) -> float:
        """Of the target: `rows` rows, all sequences together."""
        work = self._work(shape.read_bytes + batch * context * shape.kv_bytes, shape.read_parameters, rows, shape.bits)
        return max(work, shape.layers * self.stack.layer_ms / 1e3) + self.stack.step_ms / 1e3

    def draft(self, parameters: float, bits: float, rows: int, *, layers: int = 1, kv: float = 0.0) -> float:
        """Of one forward of a draft model or head that reads so many parameters, and `kv` bytes of its cache."""
        work = self._work(parameters * bits / 8 + kv, parameters, rows, bits)
        return max(work, layers * self.stack.layer_ms / 1e3) + self.stack.draft_ms / 1e3

    def speculation(self, *, tree: bool) -> float:
        """What checking guesses adds to a step beside their rows."""
        return (self.stack.speculation_ms + (self.stack.tree_ms if tree else 0)) / 1e3

    def _work(self, size: float, parameters: float, rows: int, bits: float) -> float:
        memory = size / (self.stack.bandwidth_share * self.device.bandwidth * 1e9)
        arithmetic = 2 * parameters * rows / (self.stack.compute_share * self.device.rate(bits))
        return math.hypot(memory, arithmetic) / self.devices


@cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "hardware.json").read_text("utf-8"))
    return found


def hardware() -> dict[str, Hardware]:
    """All devices of hardware.json, by name."""
    return {name: Hardware(name=name, **figures) for name, figures in _stored()["hardware"].items()}


def hardware_named(name: str) -> Hardware:
    """Raises HardwareError, which lists the devices there are."""
    found = hardware().get(name.lower())
    if found is None:
        raise HardwareError(
            f"hardware {name!r} is not known: give this, {', '.join(hardware())}{near(name, hardware())}"
        )
    return found


def stacks() -> dict[str, Stack]:
    """All kinds of software of hardware.json, by name."""
    return {name: Stack(name=name, **figures) for name, figures in _stored()["stacks"].items()}
