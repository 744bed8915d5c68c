"""What the target usually writes after its last two tokens, learnt from its own answers, under what this text repeats.

An n-gram model (`models.ngrams`, made by `outrider train ngram-model`) is the last of the lengths that `suffix`
interpolates: matches of the text itself come first, and what they leave goes to the model. So there is a guess at every
place, it costs no pass of any network, and it says how sure it is. (Stewart et al. 2024, The N-Grammys: n-grams of the
context and of the model together; He et al. 2024, REST: a datastore of the model's answers.)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from outrider.drafters.base import Context, DrafterError
from outrider.drafters.suffix import Suffix, SuffixOptions
from outrider.models.digest import sha256_of_weights
from outrider.models.errors import ModelError
from outrider.models.ngrams import KIND, Ngrams, read_ngrams
from outrider.models.shipped import find_shipped

__all__ = ["DRAFTER", "open_ngrams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramModelOptions(SuffixOptions):
    table: str = field(
        default="", metadata={"help": "folder of an n-gram model; empty = the one shipped for this target"}
    )


class NgramModel(Suffix):
    name = "ngram_model"
    summary = "n-grams of the target's own answers, under the suffix matches of this text"
    needs = "an n-gram model: shipped for smollm2-135m, or --drafter-option table=FOLDER"
    helps = "new text, and text that repeats, alike: its guesses cost no network"
    Options = NgramModelOptions

    def __init__(self, options: NgramModelOptions, context: Context) -> None:
        self._ngrams = open_ngrams(options.table, context)
        super().__init__(options, context, self._ngrams)

    @classmethod
    def forecast(cls, options: NgramModelOptions, context: Context) -> dict[str, int]:  # type: ignore[override]
        return {"n-grams": open_ngrams(options.table, context).bytes}

    def memory(self) -> dict[str, int]:
        return {"n-grams": self._ngrams.bytes, **super().memory()}


def open_ngrams(folder: str, context: Context) -> Ngrams:
    """The model in `folder`; the one shipped for this target where that is empty.

    Raises DrafterError where there is none that can be read.
    """
    path = Path(folder) if folder else find_shipped(KIND, context.files.sha256())
    if path is None:
        raise DrafterError(
            f"ngram_model: none comes with the package for {context.files.name}: train one "
            "(`outrider train ngram-model`) and pass --drafter-option table=FOLDER, or use --drafter suffix"
        )
    try:
        found = read_ngrams(path, context.config.vocabulary)
    except ModelError as error:
        raise DrafterError(f"ngram_model: {error}") from None
    context.opened[path.resolve().name] = partial(sha256_of_weights, path)
    if found.target_sha256 is not None and folder and found.target_sha256 != context.files.sha256():
        warnings.warn(
            f"{path}: counted for the target with SHA-256 {found.target_sha256}, and this one has "
            f"{context.files.sha256()}: its guesses may be worse",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


DRAFTER = NgramModel
