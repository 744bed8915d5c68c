"""The target writes the answers that its drafters learn from: jobs, and the two writers.

A head has to agree with what the target says, not with what people say, so its texts are the target's own. Each job is
one prompt at one temperature with one seed; which of them are done is told by the shards alone, so a writer that was
killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.core.noise import TARGET, uniforms
from outrider.train.errors import TrainError
from outrider.train.prompts import Prompt
from outrider.train.shards import Answer, Shards

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.models.load import ModelFiles
    from outrider.models.tokenizer import Tokenizer

__all__ = ["AnswerSettings", "Job", "Writer", "engine_writer", "make_jobs", "torch_writer", "write_answers"]

MANIFEST = "answers.json"


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What is written: together with target and prompts, all that the answers depend on."""

    samples: int = field(default=1, metadata={"help": "answers per prompt"})
    greedy: float = field(default=0.6, metadata={"help": "share of answers at temperature 0"})
    temperatures: tuple[float, ...] = field(default=(0.7, 0.8, 1.0), metadata={"help": "temperatures of the others"})
    max_tokens: int = field(default=192, metadata={"help": "longest answer"})
    longest_prompt: int = field(default=640, metadata={"help": "longer prompts are left out"})
    seed: int = field(default=0, metadata={"help": "of order, temperatures and draws"})


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to write. `number` is its key in the shards."""

    number: int
    prompt: list[int]
    temperature: float
    seed: int


class Writer(Protocol):
    """Writes many answers at once; each comes when it is done."""

    def __call__(self, jobs: Iterator[Job], max_tokens: int) -> Iterator[Answer]: ...


def make_jobs(prompts: Sequence[Prompt], tokenizer: Tokenizer, settings: AnswerSettings) -> list[Job]:
    """All jobs, in a shuffled order, so that every part of the list holds every kind of prompt.

    Raises TrainError if no prompt is short enough.
    """
    rng = np.random.default_rng(settings.seed)
    order = rng.permutation(len(prompts) * settings.samples)
    jobs: list[Job] = []
    encoded = [encode(prompt, tokenizer) for prompt in prompts]
    for number, index in enumerate(order.tolist()):
        prompt, sample = index % len(prompts), index // len(prompts)
        greedy = rng.random() < settings.greedy and sample == 0
        temperature = 0.0 if greedy else float(rng.choice(settings.temperatures))
        if 0 < len(encoded[prompt]) <= settings.longest_prompt:
            jobs.append(Job(number, encoded[prompt], temperature, settings.seed * 2**32 + number))
    if not jobs:
        raise TrainError(f"no prompt has at most {settings.longest_prompt} tokens: raise longest_prompt")
    return jobs


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt: raw text as it is, messages through the chat template where the model has one."""
    if isinstance(prompt.content, str):
        return tokenizer.prompt(prompt.content)
    if tokenizer.template is None:
        return tokenizer.prompt(prompt.content[-1]["content"])
    return tokenizer.chat(prompt.content)


def write_answers(
    folder: Path,
    jobs: Sequence[Job],
    writer: Writer,
    settings: AnswerSettings,
    *,
    target: str,
    part: tuple[int, int] = (0, 1),
    tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda answers, tokens: None,
) -> int:
    """Writes the answers that are missing in `folder`, and returns how many answer tokens this part then has.

    `part` is (i, n): this writer takes every n-th job, from the i-th. It ends early once its part has `tokens`.
    `target` is the target's sha256: a folder of another target, or of other jobs, is refused with TrainError.
    """
    _check_manifest(folder, jobs, settings, target)
    index, parts = part
    shards = Shards(folder, index)
    missing = (job for job in jobs if job.number % parts == index and job.number not in shards.jobs)
    unsynced = 0
    try:
        if tokens is None or shards.tokens < tokens:
            for answer in writer(missing, settings.max_tokens):
                shards.append(answer)
                unsynced += 1
                if unsynced >= 64:
                    shards.sync()
                    unsynced = 0
                progress(len(shards.jobs), shards.tokens)
                if tokens is not None and shards.tokens >= tokens:
                    break
    finally:
        shards.close()
    return shards.tokens


def _check_manifest(folder: Path, jobs: Sequence[Job], settings: AnswerSettings, target: str) -> None:
    digest = hashlib.sha256()
    for job in jobs:
        digest.update(np.array([job.number, len(job.prompt), *job.prompt], "<i8").tobytes())
    wanted = {
        "target_sha256": target,
        "jobs_sha256": digest.hexdigest(),
        "settings": json.loads(json.dumps(asdict(settings))),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST
    if path.exists():
        found = json.loads(path.read_text())
        for key, value in wanted.items():
            if found.get(key) != value:
                raise TrainError(
                    f"{folder}: holds answers with another {key}: give another folder, or the same prompts and settings"
                )
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(wanted, indent=1) + "\n")
    part.replace(path)


# -- the two writers -----------------------------------------------------------------------------------------------


def engine_writer(engine: Engine, batch: int) -> Writer:
    """Answers through an engine that steps `batch` sequences at once, kept full."""
    from outrider.core.params import SamplingParams

    def write(jobs: Iterator[Job], max_tokens: int) -> Iterator[Answer]:
        running: dict[int, Job] = {}
        for job in jobs:
            params = SamplingParams(temperature=job.temperature, max_tokens=max_tokens, seed=job.seed)
            running[engine.add(job.prompt, params)] = job
            while len(running) >= batch:
                yield from _step(engine, running)
        while running:
            yield from _step(engine, running)

    return write


def _step(engine: Engine, running: dict[int, Job]) -> Iterator[Answer]:
    for delta in engine.step():
        if delta.finish_reason is not None:
            job = running.pop(delta.id)
            result = engine.result(delta.id)
            yield Answer(
                job.number,
                job.temperature,
                np.array(job.prompt, np.int32),
                np.array(result.tokens, np.int32),
                result.finish_reason == "stop",
            )


@dataclass(slots=True)
class _Slot:
    job: Job
    tokens: list[int]


def torch_writer(files: ModelFiles, *, device: str = "cpu", batch: int = 48, dtype: str = "bf16") -> Writer:
    """Answers through the decoder in torch: for GPUs, and for CPUs without the native runner.

    Draws by inverting the cumulative distribution at one uniform number per (seed, position), so that an answer does
    not depend on its neighbours but for rounding.
    """
    import torch
    from torch.nn import functional

    from outrider.train.decoder import Decoder, rotary

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = Decoder.of(files.config, files.tensors, kind, device)
    config = files.config
    ends = set(config.eos)
    group = config.heads // config.kv_heads

    @torch.inference_mode()
    def write(jobs: Iterator[Job], max_tokens: int) -> Iterator[Answer]:
        waiting: list[Job] = []  # by length, so that those prefilled together need little padding
        slots: list[_Slot | None] = [None] * batch
        cosines, sines = rotary(config, 64, device)
        cache = torch.zeros(config.layers, 2, batch, config.kv_heads, 0, config.head_dim, dtype=kind, device=device)
        lengths = torch.zeros(batch, dtype=torch.long, device=device)
        last = torch.zeros(batch, dtype=torch.long, device=device)

        def grow(rows: int) -> None:
            nonlocal cache, cosines, sines
            if rows > cache.shape[4]:
                rows = -(-rows // 128) * 128
                cache = functional.pad(cache, (0, 0, 0, rows - cache.shape[4]))
                cosines, sines = rotary(config, rows, device)

        def draw(logits: torch.Tensor, owners: Sequence[int]) -> list[int]:
            """[n, V] -> n tokens, those of the slots `owners`"""
            chosen = logits.argmax(-1).tolist()
            for row, owner in enumerate(owners):
                slot = slots[owner]
                if slot is not None and slot.job.temperature > 0:
                    position = len(slot.job.prompt) + len(slot.tokens)
                    u = float(uniforms(slot.job.seed % 2**64, position, 1, TARGET)[0])
                    law = torch.softmax(logits[row].float() / slot.job.temperature, -1).cumsum(-1)
                    chosen[row] = min(int(torch.searchsorted(law, u * float(law[-1]), right=True)), len(law) - 1)
            return chosen

        def begin(free: Sequence[int]) -> None:
            """Prefill one waiting job into each free slot."""
            taken, waiting[: len(free)] = waiting[: len(free)], []
            width = max(len(job.prompt) for job in taken)
            grow(width + max_tokens)
            tokens = torch.zeros(len(free), width, dtype=torch.long, device=device)
            for row, (job, index) in enumerate(zip(taken, free, strict=True)):
                tokens[row, : len(job.prompt)] = torch.tensor(job.prompt)
                slots[index] = _Slot(job, [])
            places = torch.tensor(free, device=device)
            x = functional.embedding(tokens, model.embed).float()
            for number, layer in enumerate(model.layers):

                def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int = number) -> torch.Tensor:
                    cache[number, 0, places, :, :width] = k
                    cache[number, 1, places, :, :width] = v
                    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)

                x = layer(x, cosines[:width], sines[:width], attend)
            ends_at = torch.tensor([len(job.prompt) - 1 for job in taken], device=device)
            accept(free, draw(_final(model, x[torch.arange(len(free)), ends_at]), free))
            for job, index in zip(taken, free, strict=True):
                lengths[index] = len(job.prompt)

        def accept(owners: Sequence[int], tokens: Sequence[int]) -> None:
            for owner, token in zip(owners, tokens, strict=True):
                slot = slots[owner]
                if slot is not None:
                    slot.tokens.append(token)
                    last[owner] = token

        def step() -> None:
            """One token more for every slot; empty ones are computed and not looked at."""
            grow(int(lengths.max()) + 1)
            rows = int(lengths.max()) + 1
            seen = torch.arange(rows, device=device)[None, :] <= lengths[:, None]  # [B, S]
            mask = seen[:, None, None, :]
            every = torch.arange(batch, device=device)
            turn = (cosines[lengths][:, None, None], sines[lengths][:, None, None])
            x = functional.embedding(last[:, None], model.embed).float()
            for number, layer in enumerate(model.layers):

                def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int = number) -> torch.Tensor:
                    cache[number, 0, every, :, lengths] = k[:, :, 0]
                    cache[number, 1, every, :, lengths] = v[:, :, 0]
                    # the heads that share a key are rows of one query block: no copy of the keys
                    grouped = q.view(batch, config.kv_heads, group, config.head_dim)
                    out = functional.scaled_dot_product_attention(
                        grouped, cache[number, 0, :, :, :rows], cache[number, 1, :, :, :rows], attn_mask=mask
                    )
                    return out.flatten(1, 2).unsqueeze(2)

                x = layer(x, *turn, attend)
            lengths.add_(1)
            owners = [index for index, slot in enumerate(slots) if slot is not None]
            accept(owners, draw(_final(model, x[owners, 0]), owners))

        def finished() -> Iterator[Answer]:
            for index, slot in enumerate(slots):
                if slot is None:
                    continue
                ended = slot.tokens[-1] in ends
                full = len(slot.tokens) >= max_tokens or len(slot.job.prompt) + len(slot.tokens) >= config.context
                if ended or full:
                    slots[index] = None
                    lengths[index] = 0
                    yield Answer(
                        slot.job.number,
                        slot.job.temperature,
                        np.array(slot.job.prompt, np.int32),
                        np.array(slot.tokens, np.int32),
                        ended,
                    )

        while True:
            while len(waiting) < batch and (job := next(jobs, None)) is not None:
                insort(waiting, job, key=lambda job: len(job.prompt))
            free = [index for index, slot in enumerate(slots) if slot is None][: len(waiting)]
            busy = any(slot is not None for slot in slots)
            # a prefill of a few rows alone is dear: wait until several slots are free
            if free and (not busy or len(free) >= min(8, math.ceil(batch / 4)) or len(free) == len(waiting)):
                begin(free[:16])
                yield from finished()
            elif busy:
                step()
                yield from finished()
            else:
                return

    return write


def _final(model: Any, x: Any) -> Any:
    """Logits of rows of the residual stream. [n, D] -> [n, V], float32"""
    from outrider.train.decoder import rms_norm

    return model.logits(rms_norm(x, model.norm, model.config.norm_eps)).float()
