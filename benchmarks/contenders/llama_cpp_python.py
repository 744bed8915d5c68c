"""llama.cpp through llama-cpp-python's C interface.

The loops here are leaner than `Llama.generate`, which copies all logits to Python at each step and, with a draft model,
computes the head for all tokens of the prompt: llama.cpp shall be seen at its best.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from contenders.base import Absent, Generation, Setup, Spec, in_turns, lookup_settings, source

__all__ = ["create"]

FLASH = {"off": 0, "on": 1}
MICRO_BATCH = 512


def create(spec: Spec, setup: Setup) -> LlamaCpp:
    try:
        import llama_cpp
    except ImportError as error:
        raise Absent(f"llama-cpp-python is not installed ({error})") from None
    return LlamaCpp(llama_cpp, spec, setup)


class LlamaCpp:
    def __init__(self, library: Any, spec: Spec, setup: Setup) -> None:
        import numpy as np

        self.library, self.numpy = library, np
        self._quiet = library.llama_log_callback(lambda *_: None)  # kept alive: C calls it
        library.llama_log_set(self._quiet, None)
        library.llama_backend_init()
        path = source(spec, setup)
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self.model:
            raise Absent(f"llama.cpp does not load {path}")
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self.batch = library.llama_batch_init(setup.context, 0, 1)
        self.draft = self._draft(spec)
        contexts = {name: self._context(setup, flag) for name, flag in FLASH.items()}
        flash = self._better(contexts)
        self.context = contexts[flash]
        self.memory = library.llama_get_memory(self.context)
        self.settings = {
            "version": library.__version__,
            "file": path.name,
            "threads": setup.threads,
            "flash_attention": f"{flash} (the quicker one at load)",
            "batch": f"{setup.context}, micro-batch {MICRO_BATCH}",
            "cache": "f16",
            "draft": f"LlamaPromptLookupDecoding, {self.draft.num_pred_tokens} tokens" if self.draft else "none",
            "system": library.llama_print_system_info().decode().strip(" |"),
        }

    def _draft(self, spec: Spec) -> Any:
        if spec.decoding == "plain":
            return None
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(num_pred_tokens=lookup_settings(spec.decoding, 10))

    def _context(self, setup: Setup, flash: int) -> Any:
        params = self.library.llama_context_default_params()
        params.n_ctx = params.n_batch = setup.context
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = setup.threads
        params.flash_attn_type = flash
        params.no_perf = True
        context = self.library.llama_init_from_model(self.model, params)
        if not context:
            raise Absent(f"llama.cpp makes no context of {setup.context} tokens")
        return context

    def _better(self, contexts: dict[str, Any]) -> str:
        """The name of the context that takes a single step in the shorter median time, after 256 tokens."""
        seconds: dict[str, list[float]] = {name: [] for name in contexts}
        for round_ in range(16):
            for name, context in contexts.items():
                self.context, self.memory = context, self.library.llama_get_memory(context)
                if round_ == 0:
                    self._forward(list(range(1000, 1256)), 0, last_only=True)
                began = time.perf_counter()
                self._forward([1000], 256 + round_)
                seconds[name].append(time.perf_counter() - began)
        best = min(seconds, key=lambda name: median(seconds[name]))
        for name, context in contexts.items():
            if name != best:
                self.library.llama_free(context)
        return best

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        began = time.perf_counter()
        self.library.llama_memory_clear(self.memory, True)
        self._forward(prompt, 0, last_only=True)
        tokens = [self._greedy(0)]
        ttft = time.perf_counter() - began
        steps = 0
        cached = len(prompt)
        while len(tokens) < new_tokens:
            guesses = self._guesses(prompt, tokens)
            self._forward([tokens[-1], *guesses], cached)
            steps += 1
            accepted = 0
            for row in range(len(guesses) + 1):
                tokens.append(self._greedy(row))
                if row == len(guesses) or guesses[row] != tokens[-1]:
                    break
                accepted += 1
            cached += 1 + accepted
            if guesses:
                self.library.llama_memory_seq_rm(self.memory, 0, cached, -1)
        return Generation(tokens[:new_tokens], ttft, time.perf_counter() - began, steps)

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        self.library.llama_memory_clear(self.memory, True)
        self._forward(context, 0, last_only=True)
        out: dict[int, list[float]] = {number: [] for number in rows}
        for number in in_turns(rows, repeats):
            began = time.perf_counter()
            self._forward(context[:number], len(context))
            out[number].append(1000 * (time.perf_counter() - began))
            self.library.llama_memory_seq_rm(self.memory, 0, len(context), -1)
        return out

    def _forward(self, tokens: Sequence[int], start: int, *, last_only: bool = False) -> None:
        batch, last = self.batch, len(tokens) - 1
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = not last_only or i == last
        code = self.library.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {len(tokens)} tokens at {start}")
        self.library.llama_synchronize(self.context)
        self._outputs = [last] if last_only else range(len(tokens))

    def _greedy(self, output: int) -> int:
        """The likeliest token after a row of the last forward's outputs. numpy's argmax beats llama.cpp's sampler."""
        logits = self.library.llama_get_logits_ith(self.context, self._outputs[output])
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(self.numpy.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).argmax())

    def _guesses(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        if self.draft is None:
            return []
        text = self.numpy.array([*prompt, *tokens], dtype=self.numpy.intc)
        return [int(token) for token in self.draft(text)]
