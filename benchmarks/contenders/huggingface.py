"""transformers' generate on torch, from the weights of the GGUF file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from contenders.base import Absent, Generation, Setup, Spec, in_turns, lookup_settings

__all__ = ["create"]

KINDS = {"fp32": "float32", "bf16": "bfloat16"}


def create(spec: Spec, setup: Setup) -> Transformers:
    os.environ["TQDM_DISABLE"] = "1"  # its bars would be drawn over ours
    try:
        import torch
        import transformers
    except ImportError as error:
        raise Absent(f"transformers and torch are not installed ({error})") from None
    if spec.kind not in KINDS:
        raise Absent(f"transformers computes in {' or '.join(KINDS)}, not in {spec.kind}")
    return Transformers(torch, transformers, spec, setup)


class Transformers:
    def __init__(self, torch: Any, transformers: Any, spec: Spec, setup: Setup) -> None:
        self.torch, self.transformers = torch, transformers
        torch.set_num_threads(setup.threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                str(setup.model.parent), gguf_file=setup.model.name, dtype=getattr(torch, KINDS[spec.kind])
            )
        except (ImportError, ValueError, OSError) as error:
            raise Absent(f"transformers does not load {setup.model.name}: {str(error).splitlines()[0]}") from None
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.options: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
        if spec.decoding != "plain":
            self.options["prompt_lookup_num_tokens"] = lookup_settings(spec.decoding, 10)
        self.settings = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": KINDS[spec.kind],
            "threads": setup.threads,
            "attention": self.model.config._attn_implementation,
            "draft": f"prompt_lookup_num_tokens={self.options.get('prompt_lookup_num_tokens', 'none')}",
        }

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        ids = self.torch.tensor([list(prompt)])
        clock = _Clock()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=None,
                streamer=clock,
                **self.options,
            )
        end = time.perf_counter()
        tokens = out[0, len(prompt) :].tolist()
        return Generation(tokens, clock.first - clock.began, end - clock.began, clock.calls - 1)

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        out: dict[int, list[float]] = {number: [] for number in rows}
        with self.torch.inference_mode():
            cache = self.transformers.DynamicCache(config=self.model.config)
            self.model(self.torch.tensor([list(context)]), None, None, cache, logits_to_keep=1)
            for number in in_turns(rows, repeats):
                ids = self.torch.tensor([list(context[:number])])
                began = time.perf_counter()
                self.model(ids, None, None, cache)  # by place: the parameter's name differs between releases
                out[number].append(1000 * (time.perf_counter() - began))
                cache.crop(-number)
        return out


class _Clock:
    """A streamer that notes when the first token comes. generate hands it the prompt before anything is computed."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first = 0.0
        self.calls = -1  # the prompt is no step

    def put(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass
