"""All settings of a training but those of its answers: what a recipe may say, and what it says if it is silent.

They are read without torch, so that a recipe is refused before any work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "DataSettings",
    "DraftSettings",
    "EagleSettings",
    "LayerSkipSettings",
    "MedusaSettings",
    "NgramModelSettings",
    "TrainSettings",
]


@dataclass(frozen=True, slots=True)
class DataSettings:
    """How texts are shared out and kept."""

    tokens: int = field(default=0, metadata={"help": "answer tokens wanted; 0 is an answer to every prompt"})
    held: float = field(default=0.03, metadata={"help": "share of prompts that are held out for validation"})
    store_gb: float = field(default=16.0, metadata={"help": "gigabytes of states kept on disk"})
    validate: int = field(default=96, metadata={"help": "held-out answers that a validation looks at, at most"})
    about: str = field(default="", metadata={"help": "what kinds of prompts there were, for the model card"})
    licence: str = field(default="", metadata={"help": "of the weights, for the model card"})
    kind: str = field(default="Q8_0", metadata={"help": "format of the written weights: F32, BF16 or Q8_0"})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a drafter is trained, whatever it is."""

    epochs: float = field(default=4.0, metadata={"help": "passes over the texts at most"})
    muon: bool = field(default=False, metadata={"help": "matrices learn by Muon, but for embeddings and heads"})
    rate: float = field(default=1e-3, metadata={"help": "highest learning rate"})
    warmup: int = field(default=50, metadata={"help": "steps until it is reached"})
    final: float = field(default=0.05, metadata={"help": "share of it that is left at the end"})
    decay: float = field(default=0.01, metadata={"help": "weight decay, of matrices"})
    clip: float = field(default=1.0, metadata={"help": "largest norm of a gradient"})
    rows: int = field(default=6144, metadata={"help": "padded tokens per batch at most"})
    check: int = field(default=200, metadata={"help": "steps between two validations"})
    save: float = field(default=120.0, metadata={"help": "seconds between two checkpoints"})
    patience: int = field(default=6, metadata={"help": "validations without a better one before it ends"})
    minutes: float = field(
        default=0.0, metadata={"help": "end after so many minutes of training, pauses left out; 0 is never"}
    )
    seed: int = field(default=0, metadata={"help": "of the order and the first weights"})


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """What kind of head, and what it is trained for."""

    draft_vocabulary: int = field(default=8192, metadata={"help": "tokens that it can guess; 0 is all"})
    layers: tuple[int, ...] = field(
        default=(), metadata={"help": "target layers it reads; none given: early, middle, late"}
    )
    steps: int = field(default=3, metadata={"help": "guesses that the training unrolls"})
    stride: int = field(default=1, metadata={"help": "every so many roots unroll beyond their first guess"})
    step_decay: float = field(default=0.8, metadata={"help": "weight of each further step's loss"})
    others: int = field(default=0, metadata={"help": "tokens that guesses are told apart from, per batch; 0 is all"})
    loss: str = field(default="kl", metadata={"help": "kl, tv, ce or a mix such as 0.5*kl+0.5*tv"})
    train_head: bool = field(default=False, metadata={"help": "let its projection part from the target's"})
    intermediate: int = field(default=0, metadata={"help": "width of its MLP; 0 is the target's"})
    depth: int = field(default=6, metadata={"help": "guesses per chain in validation"})
    autocast: bool = field(default=True, metadata={"help": "matrix products in bfloat16"})


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    """How many heads, and what they are trained for."""

    heads: int = field(default=4, metadata={"help": "guesses ahead"})
    blocks: int = field(default=1, metadata={"help": "residual blocks per head"})
    draft_vocabulary: int = field(default=6144, metadata={"help": "tokens that they can guess; 0 is all"})
    shared_head: bool = field(default=True, metadata={"help": "one projection for all heads"})
    step_decay: float = field(default=0.8, metadata={"help": "weight of each further head's loss"})
    others: int = field(default=0, metadata={"help": "tokens that guesses are told apart from, per batch; 0 is all"})
    loss: str = field(default="kl", metadata={"help": "kl, tv, ce or a mix such as 0.5*kl+0.5*tv"})
    autocast: bool = field(default=True, metadata={"help": "matrix products in bfloat16"})


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Which layers the draft is cut from, and what it is trained for."""

    layers: tuple[int, ...] = field(default=(), metadata={"help": "target layers it begins with; none given: spread"})
    count: int = field(default=4, metadata={"help": "how many, where none are given"})
    draft_vocabulary: int = field(default=6144, metadata={"help": "tokens that it can guess; 0 is all"})
    others: int = field(default=0, metadata={"help": "tokens that guesses are told apart from, per batch; 0 is all"})
    loss: str = field(default="kl", metadata={"help": "kl, tv, ce or a mix such as 0.5*kl+0.5*tv"})
    depth: int = field(default=6, metadata={"help": "guesses per chain in validation"})
    autocast: bool = field(default=True, metadata={"help": "matrix products in bfloat16"})


@dataclass(frozen=True, slots=True)
class LayerSkipSettings:
    """How long is searched."""

    tokens: int = field(default=1200, metadata={"help": "answer tokens that each set is tried on"})
    most: float = field(default=0.7, metadata={"help": "largest share of layers left out"})
    depth: int = field(default=6, metadata={"help": "guesses per chain"})


@dataclass(frozen=True, slots=True)
class NgramModelSettings:
    """How many rows an n-gram model has, and how long they are."""

    guesses: int = field(default=8, metadata={"help": "guesses per row at most; below 256"})
    least_chance: float = field(default=0.02, metadata={"help": "a guess less likely than this is left out"})
    least_single: int = field(default=2, metadata={"help": "times that a token is seen before it has a row"})
    least_pair: int = field(default=4, metadata={"help": "times that a pair of tokens is seen before it has a row"})
    least_news: float = field(
        default=1.0, metadata={"help": "a row is left out whose times x difference to the shorter one's is below this"}
    )
    discount: float = field(default=0.7, metadata={"help": "what is taken off each count for what was not seen"})
