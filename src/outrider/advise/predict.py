"""Seconds from counts: what texts will take whose acceptance is known, on a machine whose costs are known.

Counts say how many steps checked how many guesses, a profile what such a step costs. Neither knows the speed: so what
comes out can be held against a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.profile import Counts, Drafting, Profile, ProfileError

__all__ = ["Prediction", "chain_cost", "predict"]

# Methods whose guesses come from a model: more sequences share its weights' way through the memory.
_MODELS = ("draft_model", "medusa", "eagle", "layer_skip")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a method on the texts that were counted. Seconds for all of them."""

    plain: float
    drafted: float
    plain_prompt: float  # of these, up to the first token of each text
    drafted_prompt: float

    @property
    def speedup(self) -> float:
        """Over plain decoding, prompts included."""
        return self.plain / self.drafted

    @property
    def decoding_speedup(self) -> float:
        """Behind the first token of each text."""
        return (self.plain - self.plain_prompt) / (self.drafted - self.drafted_prompt)


def predict(profile: Profile, method: str, counts: Counts, *, batch: int = 1) -> Prediction:
    """What texts of these counts take with the method and plainly, `batch` of them side by side.

    A batch is taken to check the same trees as one text alone. Raises ProfileError where the profile lacks the method.
    """
    plain, drafting = _of(profile, "none"), _of(profile, method)
    texts = len(counts.prompt_tokens)
    context = round(sum(counts.prompt_tokens) / texts + counts.tokens / texts / 2) if texts else profile.context
    one = profile.seconds(batch, batch, context) + plain.none * batch
    shared = _shared(profile, drafting, batch)
    steps = sum(
        count * (profile.seconds(batch * (1 + guesses), batch, context) + drafting.extra(guesses) * shared)
        for guesses, count in counts.steps.items()
    )
    steps += counts.rested * (plain.none * batch - drafting.none * shared)  # those steps were plain ones
    prompts = [sum(d.prompt + n * d.prompt_token for n in counts.prompt_tokens) for d in (plain, drafting)]
    return Prediction(counts.tokens * one / batch + prompts[0], steps / batch + prompts[1], prompts[0], prompts[1])


def chain_cost(profile: Profile, method: str, guesses: int, *, batch: int = 1) -> float:
    """Of a step that checks chains of so many guesses of the method, in plain steps."""
    plain, drafting = _of(profile, "none"), _of(profile, method)
    if not guesses:
        return 1.0
    one = profile.seconds(batch, batch) + plain.none * batch
    extra = drafting.extra_of_chain(guesses) * _shared(profile, drafting, batch)
    return (profile.seconds(batch * (1 + guesses), batch) + extra) / one


def _shared(profile: Profile, drafting: Drafting, batch: int) -> float:
    """How often the cost of drafting for one text is paid for a batch."""
    shared = profile.seconds(batch, batch) / profile.seconds(1) if drafting.method in _MODELS else float(batch)
    return min(shared, batch)


def _of(profile: Profile, method: str) -> Drafting:
    found = profile.drafting(method)
    if found is None:
        known = ", ".join(d.method for d in profile.draftings)
        raise ProfileError(
            f"the profile of {profile.name} has no {method!r} (it has {known}): run `outrider profile` with it"
        )
    return found
