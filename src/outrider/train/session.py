"""One training from prompts to a drafter on disk: answers, states, lessons."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from outrider.models.heads import EagleConfig, MedusaConfig, write_draft, write_eagle, write_medusa
from outrider.models.ngrams import write_ngrams
from outrider.train import ngram_model
from outrider.train.card import write_card
from outrider.train.decoder import Decoder
from outrider.train.draft import DraftPupil, cut_layers, make_draft
from outrider.train.eagle import EagleModule, EaglePupil
from outrider.train.errors import TrainError
from outrider.train.features import FeatureStore, Reader, runner_reader, torch_reader
from outrider.train.layer_skip import search, write_skip
from outrider.train.loop import DRAFT_TOKENS, RUN, Pupil, Report, begin_with, fit
from outrider.train.medusa import MedusaModule, MedusaPupil
from outrider.train.recipe import Recipe
from outrider.train.settings import (
    DraftSettings,
    EagleSettings,
    LayerSkipSettings,
    MedusaSettings,
    NgramModelSettings,
    TrainSettings,
)
from outrider.train.shards import Answer, read_answers
from outrider.train.target import Target
from outrider.train.texts import split
from outrider.train.vocabulary import choose_tokens, coverage, draft_index

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles

__all__ = [
    "Session",
    "count_ngrams",
    "early_middle_late",
    "find_layer_skip",
    "train_draft",
    "train_eagle",
    "train_medusa",
]

Tokens = NDArray[np.int64]
Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Session:
    """What a training needs besides its settings."""

    files: ModelFiles
    answers: Sequence[Path]  # folders of shards; the states are kept in the first
    out: Path
    recipe: Recipe
    device: str = "cpu"
    runner: str = "native"  # who computes the states: native, reference or torch
    dtype: str = "auto"
    threads: int | None = None
    resume: bool = False
    start: Path | None = None  # a training of the same drafter whose weights this one begins with
    say: Callable[[str], None] = lambda line: None
    progress: Progress = lambda step, steps, note: None
    command: str = ""  # how this training was called, for the model card
    tokens: int = 0  # answer tokens on disk, once they were read
    before: dict[str, int | float] | None = None  # steps, tokens and seconds of `start`, once it was read

    def read(self) -> tuple[list[Answer], list[int], list[int]]:
        """All answers, and the indexes of those to learn from and those held out."""
        answers = [answer for folder in self.answers for answer in read_answers(folder)]
        learn, held = split(answers, self.recipe.data().held, self.recipe.data().validate)
        self.tokens = tokens = sum(len(answers[i].answer) for i in learn)
        self.say(f"{len(answers):,} answers; {tokens:,} tokens to learn from, {len(held)} answers held out")
        return answers, learn, held

    def store(self, answers: Sequence[Answer], wants: Sequence[int]) -> FeatureStore:
        """The states of the answers, computed when they are first wanted."""
        return FeatureStore(
            self.answers[0],
            answers,
            wants,
            self.files.config.hidden,
            self._reader(wants, max(len(answer.prompt) + len(answer.answer) for answer in answers)),
            target=f"{self.files.sha256()} {self.runner} {self.dtype}",
            limit=int(self.recipe.data().store_gb * 2**30),
        )

    def _reader(self, wants: Sequence[int], longest: int) -> Reader:
        if self.runner == "torch":
            return torch_reader(
                self.files, wants, device=self.device, dtype="bf16" if self.dtype == "auto" else self.dtype
            )
        from outrider.runtime.load import load

        loaded = load(self.files, runner=self.runner, dtype=self.dtype, threads=self.threads, cache_tokens=longest + 64)
        return runner_reader(loaded.runner, wants)

    def draft_tokens(self, answers: Sequence[Answer], learn: Sequence[int], held: Sequence[int], size: int) -> Tokens:
        """The draft vocabulary, chosen once: a run that is resumed keeps its own."""
        config = self.files.config
        path = self.out / RUN / DRAFT_TOKENS
        if self.resume and path.exists():
            tokens = np.array(json.loads(path.read_text()), np.int64)
        else:
            tokens = choose_tokens((answers[i] for i in learn), config.vocabulary, size, config.eos)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(tokens.tolist()) + "\n")
        inside = coverage((answers[i] for i in held), draft_index(tokens, config.vocabulary))
        self.say(f"{len(tokens):,} draft tokens, {inside:.1%} of the held-out tokens")
        return tokens

    def target(self, tokens: Tokens) -> Target:
        return Target.of(self.files, tokens, device=self.device)

    def begin(self, module: nn.Module, tokens: Tokens) -> None:
        """Bring `module` to where the training began that this one goes on with, and to the device."""
        if self.start is not None:
            self.before = begin_with(self.start, module, tokens.tolist())
            self.say(f"begins with {self.start}: {self.before['step']:,} steps, {self.before['tokens']:,} tokens")
        module.to(self.device)

    def fit(self, pupil: Pupil, answers: Sequence[Answer], learn: Sequence[int], settings: TrainSettings) -> Report:
        lengths = [len(answers[i].prompt) + len(answers[i].answer) for i in learn]
        return fit(pupil, lengths, settings, self.out, resume=self.resume, progress=self.progress)

    def notes(self, report: Report, **settings: Any) -> dict[str, Any]:
        """What is recorded beside the weights: target, data, settings, steps, time and what came of it."""
        manifests = [folder / "answers.json" for folder in self.answers]
        return {
            "target": self.files.name,
            "tokens_on_disk": self.tokens,
            "answers": [json.loads(path.read_text()) for path in manifests if path.exists()],
            "settings": {name: asdict(values) for name, values in settings.items()},
            "steps": report.steps,
            "tokens": report.tokens,
            "seconds": round(report.seconds, 1),
            **({} if self.before is None else {"began_with": self.before}),
            "validation": None if report.best is None else asdict(report.best),
            "made": time.strftime("%Y-%m-%d", time.gmtime()),
        }

    def card(self, folder: Path, what: str, report: Report, found: str = "") -> None:
        """Write the model card beside the weights. `found`: what held-out answers showed, if it is no chain."""
        notes = {
            "target": self.files.name,
            "target_sha256": self.files.sha256(),
            "tokens_on_disk": self.tokens,
            "about": self.recipe.data().about,
            "licence": self.recipe.data().licence,
            "began_with": self.before,
            "found": found,
            "temperatures": ", ".join(f"{t:g}" for t in (0, *self.recipe.answers().temperatures)),
        }
        write_card(folder, f"{what} for {self.files.name}", CARDS[what], notes, report, self.command)


CARDS = {
    "EAGLE-3 head": "One decoder layer that reads three of the target's states and guesses the tokens after the next "
    "(Li et al. 2025), in the layout of the speculators library.",
    "Medusa heads": "Residual blocks on the target's last state, one per token ahead, with one projection for all "
    "(Cai et al. 2024), in FasterDecoding's layout.",
    "N-gram model": "Counts of what the target wrote after its last one and two tokens: likely next tokens with their "
    "probabilities.",
    "Draft model": "A small decoder cut from the target's layers and distilled; its embedding is the target's.",
}


def early_middle_late(layers: int) -> tuple[int, ...]:
    """The three target layers that an EAGLE-3 head reads by default (Li et al. 2025): early, middle and late."""
    if layers < 4:
        return tuple(range(layers))[-3:]
    return (1, layers // 2 - 1, layers - 4)


def train_eagle(session: Session) -> Report:
    """Trains an EAGLE-3 head into `session.out`, the best one in the speculators layout."""
    settings = session.recipe.settings("eagle", EagleSettings)
    schedule = session.recipe.settings("train", TrainSettings)
    config = session.files.config
    wants = settings.layers or early_middle_late(config.layers)
    if any(not 0 <= layer < config.layers for layer in wants):
        raise TrainError(f"eagle.layers {list(wants)}: the target has layers 0 to {config.layers - 1}")
    answers, learn, held = session.read()
    tokens = session.draft_tokens(answers, learn, held, settings.draft_vocabulary)
    target = session.target(tokens)
    head = EagleConfig(
        version=3,
        decoder=replace(
            config,
            layers=1,
            intermediate=settings.intermediate or config.intermediate,
            tied_embeddings=False,
            qkv_bias=False,
            qk_norm=False,
        ),
        draft_vocabulary=len(tokens),
        wants=tuple(wants),
        norm_before_residual=True,
        norm_before_fc=True,
        target_sha256=session.files.sha256(),
    )
    module = EagleModule(head)
    module.head.requires_grad_(settings.train_head)
    store = session.store(answers, (*wants, -1))
    some = [torch.from_numpy(bits).view(torch.bfloat16) for bits in store.get(learn[:32])]
    module.start(target, torch.cat([state[:, :-1] for state in some]), schedule.seed)
    session.begin(module, tokens)

    def export(folder: Path, report: Report) -> None:
        write_eagle(
            folder,
            head,
            module.values(),
            tokens,
            target=session.files.name,
            guesses=settings.steps,
            kind=session.recipe.data().kind,
            notes=session.notes(report, eagle=settings, train=schedule),
        )
        session.card(folder, "EAGLE-3 head", report)

    pupil = EaglePupil(module, target, store, learn, held, settings, export, session.device)
    return session.fit(pupil, answers, learn, schedule)


def train_medusa(session: Session) -> Report:
    """Trains Medusa heads into `session.out`, the best ones in FasterDecoding's layout."""
    settings = session.recipe.settings("medusa", MedusaSettings)
    schedule = session.recipe.settings("train", TrainSettings)
    config = session.files.config
    answers, learn, held = session.read()
    tokens = session.draft_tokens(answers, learn, held, settings.draft_vocabulary)
    target = session.target(tokens)
    heads = MedusaConfig(
        heads=settings.heads,
        blocks=settings.blocks,
        hidden=config.hidden,
        vocabulary=config.vocabulary,
        draft_vocabulary=len(tokens),
        shared_head=settings.shared_head,
        target_sha256=session.files.sha256(),
    )
    module = MedusaModule(heads)
    module.start(target)
    session.begin(module, tokens)

    def export(folder: Path, report: Report) -> None:
        write_medusa(
            folder,
            heads,
            module.values(),
            tokens,
            target=session.files.name,
            kind=session.recipe.data().kind,
            notes=session.notes(report, medusa=settings, train=schedule),
        )
        session.card(folder, "Medusa heads", report)

    store = session.store(answers, _states(session))
    pupil = MedusaPupil(module, target, store, learn, held, settings, export, session.device)
    return session.fit(pupil, answers, learn, schedule)


def train_draft(session: Session) -> Report:
    """Distils a draft model into `session.out`: a model of its own, or one that needs the target."""
    settings = session.recipe.settings("draft", DraftSettings)
    schedule = session.recipe.settings("train", TrainSettings)
    config = session.files.config
    layers = cut_layers(config.layers, settings)
    answers, learn, held = session.read()
    tokens = session.draft_tokens(answers, learn, held, settings.draft_vocabulary)
    target = session.target(tokens)
    module = make_draft(config, session.files.tensors, layers, target)
    session.begin(module, tokens)

    def export(folder: Path, report: Report) -> None:
        write_draft(
            folder,
            module.config,
            pupil.values(),
            tokens,
            target=session.files,
            kind=session.recipe.data().kind,
            notes=session.notes(report, draft=settings, train=schedule) | {"cut_from_layers": list(layers)},
        )
        session.card(folder, "Draft model", report)

    store = session.store(answers, _states(session))
    pupil = DraftPupil(module, target, store, learn, held, settings, export, session.device)
    return session.fit(pupil, answers, learn, schedule)


def find_layer_skip(session: Session) -> Report:
    """Searches layers to draft without, and writes `layer_skip.json` into `session.out`."""
    settings = session.recipe.settings("layer_skip", LayerSkipSettings)
    config = session.files.config
    answers, _, held = session.read()
    started = time.monotonic()
    kind = torch.bfloat16 if session.dtype == "auto" else torch.float32
    model = Decoder.of(config, session.files.tensors, kind, session.device)
    found = search(model, [answers[i] for i in held], settings, session.progress)
    best = max(found, key=lambda skip: skip.speedup)
    session.say(
        f"without layers {list(best.layers)}: {best.agreement:.3f} of the tokens agree, "
        f"{best.length:.2f} tokens per step with {best.guesses} guesses"
    )
    notes = {"target": session.files.name, "settings": asdict(settings)}
    write_skip(session.out, found, session.files.sha256(), notes)
    return Report(len(found), settings.tokens, time.monotonic() - started, None, 0)


def count_ngrams(session: Session) -> Report:
    """Counts an n-gram model of the answers into `session.out`: a few seconds, nothing is fed to the target."""
    settings = session.recipe.settings("ngram_model", NgramModelSettings)
    answers, learn, held = session.read()
    started = time.monotonic()
    rows = ngram_model.count((answers[i] for i in learn), settings)
    first, some = ngram_model.right((answers[i] for i in held), rows)
    found = f"the likeliest guess is right at {first:.1%} of the tokens, some guess at {some:.1%}"
    session.say(f"held out: {found}")
    report = Report(0, session.tokens, time.monotonic() - started, None, 0)
    notes = session.notes(report, ngram_model=settings) | {"validation": {"first_right": first, "some_right": some}}
    write_ngrams(session.out, rows, {"target_sha256": session.files.sha256(), **notes})
    session.card(session.out, "N-gram model", report, found)
    return report


def _states(session: Session) -> tuple[int, ...]:
    """What the store keeps: the states that an EAGLE head would read too, so that all drafters share them."""
    settings = session.recipe.settings("eagle", EagleSettings)
    return (*(settings.layers or early_middle_late(session.files.config.layers)), -1)
