"""`--speculative-config`: vLLM's JSON for a drafter, as our own options."""

from __future__ import annotations

import json
from typing import Any

from outrider.cli.errors import CommandError
from outrider.cli.options import DEFAULT_DRAFTER, DraftOptions

__all__ = ["merged", "read_object"]

OPTION = "--speculative-config"
# what a method's own keys are called here; `model` is the draft model, or the folder of a head
_KEYS = {
    "ngram": {"prompt_lookup_min": "min_ngram", "prompt_lookup_max": "max_ngram"},
    "draft_model": {},
    "suffix": {},
    "eagle": {"model": "head"},
    "medusa": {"model": "head"},
}
_METHODS = {"eagle3": "eagle"}  # vLLM's names for ours


def merged(draft: DraftOptions, text: str | None) -> DraftOptions:
    """The options with what the JSON says. Raises CommandError that names the key."""
    if text is None:
        return draft
    if draft.drafter != DEFAULT_DRAFTER or draft.draft_model or draft.drafter_option or draft.max_draft_tokens:
        raise CommandError(f"{OPTION}: the drafter is chosen by other options too; leave out one of the two")
    config = read_object(text)
    method = config.pop("method", "draft_model" if "model" in config else None)
    if not isinstance(method, str) or _METHODS.get(method, method) not in _KEYS:
        raise CommandError(f"{OPTION}: method {method!r} is not one of {', '.join([*_KEYS, *_METHODS])}")
    name = _METHODS.get(method, method)
    tokens = config.pop("num_speculative_tokens", None)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
        raise CommandError(f"{OPTION}: num_speculative_tokens {tokens!r} is not a whole number")
    if "min_acceptance" in config and draft.min_acceptance is not None:
        raise CommandError(f"{OPTION}: min_acceptance is given by --min-acceptance too; leave out one of the two")
    floor = config.pop("min_acceptance", draft.min_acceptance)
    if floor is not None and (isinstance(floor, bool) or not isinstance(floor, int | float)):
        raise CommandError(f"{OPTION}: min_acceptance {floor!r} is not a number")
    model = config.pop("model", None) if name == "draft_model" else None
    if name == "draft_model" and not isinstance(model, str):
        raise CommandError(f"{OPTION}: model is missing, the draft model's name or path")
    options = []
    for key, value in config.items():
        if key not in _KEYS[name]:
            known = ", ".join(["method", "model", "num_speculative_tokens", "min_acceptance", *_KEYS[name]])
            raise CommandError(f"{OPTION}: {key!r} is not supported for {method}; there are {known}")
        wanted, what = (str, "a name or path") if key == "model" else (int, "a whole number")
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise CommandError(f"{OPTION}: {key} {value!r} is not {what}")
        options.append(f"{_KEYS[name][key]}={value}")
    return DraftOptions(
        drafter=name,
        draft_model=model,
        drafter_option=options or None,
        max_draft_tokens=tokens,
        verify=draft.verify,
        adapt=draft.adapt,
        min_acceptance=floor,
    )


def read_object(text: str) -> dict[str, Any]:
    """The option's JSON object. Raises CommandError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{OPTION}: it is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CommandError(f"{OPTION}: {text[:80]!r} is not a JSON object")
    return config
