"""Our own engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from contenders.base import Absent, Generation, Setup, Spec, in_turns

__all__ = ["create"]


def create(spec: Spec, setup: Setup) -> Outrider:
    try:
        from outrider import Engine, SamplingParams
        from outrider.runtime.load import load
    except ImportError as error:
        raise Absent(f"outrider is not installed ({error})") from None
    return Outrider(Engine, SamplingParams, load, spec, setup)


class Outrider:
    def __init__(self, engine: Any, params: Any, load: Any, spec: Spec, setup: Setup) -> None:
        self.params = params
        drafter = "none" if spec.decoding == "plain" else spec.decoding
        self.loaded = load(
            setup.model, runner="native", dtype=spec.kind, threads=setup.threads, cache_tokens=2 * setup.context
        )
        self.engine = engine.from_loaded(
            self.loaded, drafter=drafter, batch_size=1, adapt=True, enable_prefix_caching=False
        )
        self.settings = {
            "dtype": spec.kind,
            "threads": setup.threads,
            "drafter": drafter,
            "memory": self.engine.memory(),
        }

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        params = self.params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        began = time.perf_counter()
        [result] = self.engine.generate([list(prompt)], params)
        seconds = time.perf_counter() - began
        return Generation(list(result.tokens), result.ttft, seconds, len(result.steps))

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        from outrider.core.cache import Rows
        from outrider.core.tree import Tree
        from outrider.runtime.runner import Feed

        runner = self.loaded.runner
        held = Rows(runner.pages)
        out: dict[int, list[float]] = {number: [] for number in rows}
        try:
            held.reserve(len(context) + max(rows))
            runner.forward([Feed(held, list(context))])
            held.commit(len(context))
            for number in in_turns(rows, repeats):
                feed = Feed(held, [context[0]], Tree.chain(context[0], context[1:number]))
                began = time.perf_counter()
                runner.forward([feed])
                out[number].append(1000 * (time.perf_counter() - began))
        finally:
            held.release()
        return out
