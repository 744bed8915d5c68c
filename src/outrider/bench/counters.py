"""A server's own counters of speculation, under vLLM's names: what it drafted and accepted between two looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Counters"]

_PREFIX = "vllm:spec_decode_num_"
_DEEPEST = 4096  # positions of a draft; what a page says of others is not believed


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over a server's life, or their difference. `accepted_at[i]`: drafts whose guess i (from 0) was accepted."""

    drafts: float = 0
    drafted: float = 0
    accepted: float = 0
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    memory_bytes: Mapping[str, float] = field(default_factory=dict)  # by purpose, where the server tells it

    @classmethod
    def read(cls, page: str) -> Counters | None:
        """From a page of Prometheus metrics. None if it has none of these counters, or is no such page."""
        from prometheus_client.parser import text_string_to_metric_families

        sums: dict[str, float] = {}
        places: dict[int, float] = {}
        memory: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    if sample.name.startswith(_PREFIX) and sample.name.endswith("_total"):
                        name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                        sums[name] = sums.get(name, 0) + sample.value
                        if name == "accepted_tokens_per_pos":
                            place = int(sample.labels["position"])
                            if not 0 <= place < _DEEPEST:
                                return None
                            places[place] = places.get(place, 0) + sample.value
                    elif sample.name == "outrider_memory_bytes":
                        memory[sample.labels.get("purpose", "")] = sample.value
                    elif sample.name == "process_resident_memory_bytes":
                        memory["process"] = sample.value
        except (ValueError, KeyError):
            return None
        if not sums or not all(math.isfinite(value) for value in (*sums.values(), *memory.values())):
            return None
        return cls(sums.get("drafts", 0), sums.get("draft_tokens", 0), sums.get("accepted_tokens", 0), places, memory)

    def since(self, earlier: Counters) -> Counters:
        """What was added. Memory is that of now."""
        return Counters(
            self.drafts - earlier.drafts,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            {place: value - earlier.accepted_at.get(place, 0) for place, value in self.accepted_at.items()},
            self.memory_bytes,
        )

    def summary(self) -> dict[str, Any] | None:
        """Acceptance in the report's words; None if nothing was drafted."""
        if self.drafts <= 0:
            return None
        deepest = max((place for place, value in self.accepted_at.items() if value > 0), default=-1)
        return {
            "source": "the server's counters",
            "mean_acceptance_length": 1 + self.accepted / self.drafts,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "acceptance_by_position": [self.accepted_at.get(i, 0) / self.drafts for i in range(deepest + 1)],
        }
