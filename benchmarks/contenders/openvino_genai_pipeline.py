"""OpenVINO GenAI's LLMPipeline, which reads GGUF files by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from contenders.base import Absent, Generation, Setup, Spec, lookup_settings, source

__all__ = ["create"]

LONGEST_NGRAM = 3
# What the CPU plugin chooses by itself on this machine, for the report.
DEFAULTS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


def create(spec: Spec, setup: Setup) -> OpenVino:
    try:
        import numpy
        import openvino
        import openvino_genai
    except ImportError as error:
        raise Absent(f"openvino-genai is not installed ({error})") from None
    return OpenVino(numpy, openvino, openvino_genai, spec, setup)


class OpenVino:
    def __init__(self, numpy: Any, openvino: Any, genai: Any, spec: Spec, setup: Setup) -> None:
        self.numpy, self.openvino, self.genai = numpy, openvino, genai
        path = source(spec, setup)
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # each prompt is to be computed
        scheduler.cache_size = 1  # GiB
        scheduler.max_num_batched_tokens = setup.context
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
        if spec.decoding != "plain":
            options["prompt_lookup"] = True
        try:
            self.pipeline = genai.LLMPipeline(str(path), "CPU", scheduler_config=scheduler, **options)
        except RuntimeError as error:
            raise Absent(f"openvino-genai does not load {path.name}: {str(error).strip().splitlines()[-1]}") from None
        self.ahead = 0 if spec.decoding == "plain" else lookup_settings(spec.decoding, 5)
        core = openvino.Core()
        self.settings = {
            "version": genai.__version__,
            "file": path.name,
            "threads": setup.threads,
            "prefix_caching": False,
            **{name.lower(): str(core.get_property("CPU", name)) for name in DEFAULTS},
            "draft": f"lookup of {self.ahead} tokens, n-grams to {LONGEST_NGRAM}" if self.ahead else "none",
        }

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        if self.ahead:
            config.num_assistant_tokens = self.ahead
            config.max_ngram_size = LONGEST_NGRAM
        ids = self.numpy.array([list(prompt)], dtype=self.numpy.int64)
        mask = self.numpy.ones_like(ids)
        began = time.perf_counter()
        inputs = self.genai.TokenizedInputs(self.openvino.Tensor(ids), self.openvino.Tensor(mask))
        result = self.pipeline.generate(inputs, config)
        seconds = time.perf_counter() - began
        return Generation(list(result.tokens[0]), result.perf_metrics.get_ttft().mean / 1000, seconds)

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        raise Absent("openvino-genai has no public call for one forward of M rows")
