"""What a server counts, read from its page of Prometheus metrics. vLLM's names; Outrider has the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Counters", "Guesses"]

_SPEC = "vllm:spec_decode_num_"
# samples of other metrics are not even parsed: a page has thousands of them
_WANTED = (
    _SPEC,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "outrider_cache_pages",
)


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts that were checked, and what came of their guesses."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()  # accepted guesses, by their place in the draft

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None if nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def since(self, before: Guesses) -> Guesses:
        """The growth since an earlier reading; all of it where the server has begun to count anew."""
        if self.drafts < before.drafts or self.accepted < before.accepted or self.drafted < before.drafted:
            return self
        places = before.by_position + (0,) * (len(self.by_position) - len(before.by_position))
        return Guesses(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(new - old for new, old in zip(self.by_position, places, strict=False)),
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading. Sums over the server's engines; what it does not tell is None, or 0 of counters."""

    guesses: Guesses = field(default_factory=Guesses)
    speculates: bool = False  # whether it counts guesses at all
    running: int | None = None
    waiting: int | None = None
    preemptions: int = 0
    pages: int = 0  # of the cache; 0 if not told
    page_size: int = 0
    free: int = 0

    @classmethod
    def read(cls, page: str) -> Counters:
        """Raises ValueError for a page that is not of Prometheus' form."""
        lines = [line for line in page.splitlines() if line.startswith(_WANTED)]
        sums: dict[str, float] = {}
        places: dict[int, float] = {}
        config: Mapping[str, str] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = sample.name
                if name.endswith("_created"):
                    continue
                if "position" in sample.labels:
                    place = int(sample.labels["position"])
                    places[place] = places.get(place, 0.0) + sample.value
                elif name == "vllm:cache_config_info":
                    config = sample.labels
                elif name == "outrider_cache_pages":
                    key = f"pages {sample.labels.get('state')}"
                    sums[key] = sums.get(key, 0.0) + sample.value
                else:
                    sums[name] = sums.get(name, 0.0) + sample.value
        return _counters(sums, places, config)


def _counters(sums: Mapping[str, float], places: Mapping[int, float], config: Mapping[str, str]) -> Counters:
    def count(name: str) -> int:
        return round(sums.get(name, sums.get(f"{name}_total", 0.0)))

    def optional(name: str) -> int | None:
        return round(sums[name]) if name in sums else None

    told = any(name.startswith(_SPEC) for name in sums)
    free = count("pages free") + count("pages cached")
    pages, size = free + count("pages used"), 0
    if not pages and config.get("num_gpu_blocks", "").isdigit():
        pages, size = int(config["num_gpu_blocks"]), int(config.get("block_size", "0"))
        free = round(pages * (1 - sums.get("vllm:kv_cache_usage_perc", 0.0)))
    return Counters(
        guesses=Guesses(
            drafts=count(f"{_SPEC}drafts"),
            drafted=count(f"{_SPEC}draft_tokens"),
            accepted=count(f"{_SPEC}accepted_tokens"),
            by_position=tuple(round(places.get(place, 0.0)) for place in range(max(places, default=-1) + 1)),
        ),
        speculates=told,
        running=optional("vllm:num_requests_running"),
        waiting=optional("vllm:num_requests_waiting"),
        preemptions=count("vllm:num_preemptions"),
        pages=pages,
        page_size=size,
        free=free,
    )
