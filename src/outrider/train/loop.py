"""The loop that every drafter is trained by: batches in a fixed order, checkpoints safe against a kill, early stop.

All that happens depends on the seed: the order of an epoch is a function of (seed, epoch), and nothing is drawn while a
batch is computed. So a run that was killed and resumed ends with the weights of one that was not.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from outrider.train.errors import TrainError
from outrider.train.settings import TrainSettings

__all__ = ["DRAFT_TOKENS", "RUN", "Acceptance", "Pupil", "Report", "batches", "begin_with", "fit", "save_tensors"]

RUN = "run"  # the folder in which the state of a training lies, beside the drafter that it makes
PAUSE = 5.0  # times the usual time of a step; the rest of a longer one was a pause of the process
CHECKPOINT = "checkpoint.safetensors"
DRAFT_TOKENS = "draft_tokens.json"
LOG = "log.jsonl"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW, and of Muon
TABLES = {"embed", "head", "heads"}  # their rows stand for tokens: no maps between states, which is what Muon is for


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often a greedy chain of guesses agrees with the target's own text, on prompts that were held out."""

    by_depth: tuple[float, ...]  # share of positions where the guesses 1 ... d are all right
    length: float  # tokens per step of a chain decoder that walks the texts, the target's own token included
    top: tuple[float, ...] = ()  # share of positions where the right token is among the best k = 1 ... at depth 1
    loss: float = 0.0

    def line(self) -> str:
        return f"acceptance {' '.join(f'{value:.3f}' for value in self.by_depth)}, length {self.length:.3f}"


@dataclass(frozen=True, slots=True)
class Report:
    """How a training went."""

    steps: int
    tokens: int  # answer tokens learnt from, each pass counted
    seconds: float
    best: Acceptance | None
    best_step: int


class Pupil(Protocol):
    """What is trained. Its `module` has the parameters; frozen ones have no gradient."""

    @property
    def module(self) -> nn.Module: ...

    def loss(self, batch: Sequence[int]) -> tuple[Tensor, int]:
        """The loss over these answers, and how many answer tokens it is of."""
        ...

    def validate(self) -> Acceptance: ...

    def export(self, folder: Path, report: Report) -> None:
        """Write the drafter as its users read it."""
        ...


def batches(lengths: Sequence[int], rows: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch: texts of like length together, `rows` padded tokens at most, in a shuffled order."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths)).tolist()
    found: list[list[int]] = []
    for start in range(0, len(order), 512):
        pool = sorted(order[start : start + 512], key=lambda i: lengths[i])
        batch: list[int] = []
        for index in pool:
            if batch and lengths[index] * (len(batch) + 1) > rows:
                found.append(batch)
                batch = []
            batch.append(index)
        found.append(batch)
    return [found[i] for i in rng.permutation(len(found)).tolist()]


@dataclass(slots=True)
class _State:
    """Where a run is. Goes into the checkpoint with weights and moments."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: Acceptance | None = None
    best_step: int = 0
    stale: int = 0  # validations since the best one

    def report(self) -> Report:
        return Report(self.step, self.tokens, self.seconds, self.best, self.best_step)


def fit(
    pupil: Pupil,
    lengths: Sequence[int],
    settings: TrainSettings,
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[int, int, str], None] = lambda step, steps, note: None,
) -> Report:
    """Trains until the epochs, the minutes or the patience are over, and leaves the best drafter in `folder`.

    `lengths` are those of the texts, by index. Texts may have been added when a run is resumed. Raises TrainError if
    `folder` holds a run and `resume` is not set, or the run is of other settings.
    """
    _keep_memory()
    run = _Run(pupil, settings, folder, resume=resume)
    state = run.state
    per_epoch = [len(batches(lengths, settings.rows, settings.seed, e)) for e in range(math.ceil(settings.epochs))]
    total = max(1, round(sum(per_epoch) * settings.epochs / len(per_epoch)))
    schedule = _batches_from(lengths, settings, state.step)
    clock = saved = time.monotonic()
    usual = 0.0  # seconds of a step
    seen = state.tokens
    while state.step < total and state.stale < settings.patience and (share := _share(settings, state, total)) < 1.0:
        loss = run.learn(next(schedule), share)
        now = time.monotonic()
        taken = min(now - clock, PAUSE * usual) if usual else now - clock
        usual = 0.9 * usual + 0.1 * taken if usual else taken
        state.seconds += taken
        note = f"loss {loss:.3f}, {(state.tokens - seen) / max(1e-9, now - saved):,.0f} tokens/s"
        checked = state.step % settings.check == 0
        if checked:
            run.validate(loss)
        if checked or now - saved >= settings.save:
            run.save()
            saved, seen = time.monotonic(), state.tokens
        clock = time.monotonic()  # checks and checkpoints do not count as training
        progress(state.step, total, note if state.best is None else f"{note}, {state.best.line()}")
    if state.step % settings.check:
        run.validate(None)
    run.save()
    return state.report()


class _Run:
    """A training and all that its checkpoint holds."""

    def __init__(self, pupil: Pupil, settings: TrainSettings, folder: Path, *, resume: bool) -> None:
        self.pupil, self.settings, self.folder = pupil, settings, folder
        self.parameters = {name: p for name, p in pupil.module.named_parameters() if p.requires_grad}
        self.optimizers = _optimizers(self.parameters, settings)
        self.state = _State()
        self.path = folder / RUN / CHECKPOINT
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if not resume:
                raise TrainError(f"{folder} holds a training that was begun: add --resume, or give another folder")
            self.state = self._restore()

    def learn(self, batch: Sequence[int], share: float) -> float:
        """One step of descent over these texts; the loss before it."""
        rate = _rate(self.settings, self.state.step, share)
        loss, tokens = self.pupil.loss(batch)
        self.pupil.module.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.state.step += 1
        self.state.tokens += tokens
        return loss.item()

    def validate(self, loss: float | None) -> None:
        """Count the acceptance, write it down, and export the drafter if it is the best one."""
        state = self.state
        self.pupil.module.eval()
        found = self.pupil.validate()
        self.pupil.module.train()
        state.stale += 1
        if state.best is None or found.length > state.best.length:
            state.best, state.best_step, state.stale = found, state.step, 0
            self.pupil.export(self.folder, state.report())
        entry = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 1), "training_loss": loss}
        with (self.path.parent / LOG).open("a") as file:
            file.write(json.dumps(entry | asdict(found)) + "\n")

    def save(self) -> None:
        """Write the checkpoint."""
        tensors = {f"weight.{name}": p.detach() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            kept = self._optimizer_of(p).state[p]
            tensors |= {f"{moment}.{name}": kept[moment] for moment in MOMENTS if moment in kept}
        metadata = {"state": json.dumps(asdict(self.state)), "settings": json.dumps(_fixed(self.settings))}
        save_tensors(self.path, tensors, metadata)

    def _optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Which of the optimizers moves it."""
        return next(
            o for o in self.optimizers if any(p is parameter for group in o.param_groups for p in group["params"])
        )

    def _restore(self) -> _State:
        """Read the checkpoint into weights and moments. Raises TrainError if it is of another training."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            metadata = file.metadata()
            stored: dict[str, Any] = json.loads(metadata["state"])
            before = json.loads(metadata["settings"])
            for name, value in _fixed(self.settings).items():
                if before.get(name) != value:
                    raise TrainError(
                        f"{self.folder}: was begun with {name} = {before.get(name)}, not {value}: "
                        "give the same, or another folder"
                    )
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            wanted = {f"weight.{name}": tuple(p.shape) for name, p in self.parameters.items()}
            if {name: shape for name, shape in shapes.items() if name.startswith("weight.")} != wanted:
                raise TrainError(f"{self.folder}: holds a training of another drafter: give another folder")
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(file.get_tensor(f"weight.{name}"))
                    moments = {
                        m: file.get_tensor(f"{m}.{name}").to(p.device) for m in MOMENTS if f"{m}.{name}" in shapes
                    }
                    if moments:
                        step = {} if "momentum_buffer" in moments else {"step": torch.tensor(float(stored["step"]))}
                        self._optimizer_of(p).state[p] = {**step, **moments}
        best = stored.pop("best")
        if best is not None:
            best = Acceptance(tuple(best["by_depth"]), best["length"], tuple(best["top"]), best["loss"])
        return _State(**stored, best=best)


def _optimizers(parameters: Mapping[str, nn.Parameter], settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon (Jordan 2024) for the matrices that map states to states, at steps as large as AdamW's."""
    maps: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, p in parameters.items():
        table = not settings.muon or TABLES & set(name.split("."))
        (vectors if p.ndim < 2 else tables if table else maps).append(p)
    groups = [{"params": tables, "weight_decay": settings.decay}, {"params": vectors, "weight_decay": 0.0}]
    found: list[torch.optim.Optimizer] = []
    if tables or vectors:
        found.append(torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95)))
    if maps:
        muon = torch.optim.Muon(maps, settings.rate, settings.decay, adjust_lr_fn="match_rms_adamw")
        found.append(muon)
    return found


def begin_with(folder: Path, module: nn.Module, tokens: Sequence[int]) -> dict[str, int | float]:
    """Take over what the training in `folder` has learnt; its steps, answer tokens and seconds so far are returned.

    `tokens` is the draft vocabulary now: rows of a learnt projection go to the tokens that they stand for, and tokens
    that are new keep the rows that they have. Raises TrainError if there is no training of the same drafter.
    """
    from safetensors import safe_open

    path = folder / RUN / CHECKPOINT
    if not path.exists():
        raise TrainError(f"{folder}: holds no training to begin with: {path} is missing")
    before = json.loads((folder / RUN / DRAFT_TOKENS).read_text())
    places = {token: row for row, token in enumerate(before)}
    kept = [(row, places[token]) for row, token in enumerate(tokens) if token in places]
    rows, sources = (torch.tensor(column) for column in zip(*kept, strict=True))
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, p in module.named_parameters():
            if not p.requires_grad:
                continue
            key = f"weight.{name}"
            stored = file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118
            if stored is not None and stored.shape[0] == len(before) and p.shape[0] == len(tokens) and p.ndim == 2:
                p[rows.to(p.device)] = stored[sources].to(p)
            elif stored is not None and stored.shape == p.shape:
                p.copy_(stored)
            else:
                raise TrainError(f"{folder}: holds a training of another drafter: {name} is not as it should be")
        state = json.loads(file.metadata()["state"])
    return {name: state[name] for name in ("step", "tokens", "seconds")}


def _keep_memory() -> None:
    """Tell glibc to keep what torch frees: fresh pages for every large tensor cost a fifth of a step on a CPU."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back


def _share(settings: TrainSettings, state: _State, total: int) -> float:
    """How much of the training is over: by steps, or by the clock where it is limited and runs out sooner."""
    steps = state.step / total
    return steps if not settings.minutes else max(steps, state.seconds / 60 / settings.minutes)


def _rate(settings: TrainSettings, step: int, share: float) -> float:
    """Linear warm-up, then a cosine down to `final`."""
    rise = min(1.0, (step + 1) / max(1, settings.warmup))
    fall = settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return settings.rate * rise * fall


def _batches_from(lengths: Sequence[int], settings: TrainSettings, step: int) -> Iterator[list[int]]:
    """The batches of all epochs, from the one after `step` done ones."""
    epoch = 0
    while True:
        found = batches(lengths, settings.rows, settings.seed, epoch)
        yield from found[step:]
        step = max(0, step - len(found))
        epoch += 1


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file that is either the old one or the new one, whenever the process dies."""
    from safetensors.torch import save_file

    part = path.with_suffix(".part")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, part, metadata)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)


def _fixed(settings: TrainSettings) -> dict[str, Any]:
    """What may not change between a run and its continuation. When to save or to end may."""
    kept = asdict(settings)
    for name in ("save", "patience", "minutes", "check", "epochs"):
        del kept[name]
    return kept
