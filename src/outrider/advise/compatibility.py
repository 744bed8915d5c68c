"""Whether a draft can serve a target at all, from the two files alone: nothing is loaded, nothing runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.advise.shape import from_config
from outrider.drafters.draft_model import difference
from outrider.models.digest import sha256_of_folder
from outrider.models.heads import Eagle, EagleConfig, is_draft, is_head, read_draft, read_head
from outrider.models.load import ModelFiles, open_model
from outrider.models.registry import resolve
from outrider.models.safetensors_folder import read_json

if TYPE_CHECKING:
    from outrider.models.tokenizer import Tokenizer

__all__ = ["Compatibility", "Finding", "Level", "Method", "compare"]

Level = Literal["ok", "note", "warning", "drift", "refused"]
Method = Literal["draft_model", "eagle", "medusa"]
_USUAL = (0.05, 0.20)  # of the target's parameters: where drafts pay most often
_HALF = 0.5
# what tokenizers of one vocabulary cut differently if their rules differ
_CUTS = (
    "The year 1984, 12345 and 3.14",
    "  two spaces,\ttab\n\n\nnew lines  ",
    "don't  I'LL  l'été  naïve  straße",
    "def f(x):\n    return x**2  # note\n",
    "日本語と한국어 и русский 😀",
    '{"key": [1, 2, null]}',
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    told: str


@dataclass(slots=True)
class Compatibility:
    """What the files say. `method` is the drafter that would run the draft."""

    method: Method
    name: str
    path: str
    sha256: str
    tokenizer: str  # fingerprint of the draft's; heads and drafts of reduced vocabulary share the target's
    parameters: int
    findings: list[Finding] = field(default_factory=list)
    foreign: bool = False  # another tokenizer: it could only draft by its text, cut anew

    @property
    def refused(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.level == "refused"), None)

    def allow_foreign(self) -> None:
        """Let a draft of another tokenizer guess by its text: what refused it becomes what it costs."""
        self.findings = [
            Finding(
                "warning", f.what, "another one: its text is cut anew in each step, and the last guess of each is lost"
            )
            if f.level == "refused"
            else f
            for f in self.findings
        ]

    def add(self, level: Level, what: str, told: str) -> None:
        self.findings.append(Finding(level, what, told))


def compare(target: ModelFiles, draft: str) -> Compatibility:
    """What stands between the target and a draft model or head, given by name or path. Raises ModelError."""
    path = resolve(draft)
    if path.is_dir() and is_draft(path):
        return _reduced(target, path)
    if path.is_dir() and is_head(path):
        return _head(target, path)
    return _model(target, open_model(path))


def _model(target: ModelFiles, draft: ModelFiles) -> Compatibility:
    found = _started("draft_model", target, draft)
    _tokenizers(found, target.tokenizer, draft.tokenizer)
    if not found.foreign:
        _padding(found, target, draft)
        _specials(found, target.tokenizer, draft.tokenizer)
    _sizes(found, target, draft)
    return found


def _reduced(target: ModelFiles, path: Path) -> Compatibility:
    draft = read_draft(path, target)
    found = _started("draft_model", target, draft)
    found.parameters = sum(math.prod(part.shape) for name, part in draft.tensors.items() if name != "embed")
    found.add("ok", "tokenizer", "the target's own: the draft was made for it")
    assert draft.tokens is not None, "a reduced vocabulary without its tokens"
    found.add("note", "vocabulary", f"guesses among {len(draft.tokens):,} of {target.config.vocabulary:,} tokens")
    _made_for(found, _recorded(path), target)
    _sizes(found, target, draft)
    return found


def _head(target: ModelFiles, path: Path) -> Compatibility:
    head = read_head(path, target.config)  # refuses what does not fit the target's shapes
    parameters = sum(math.prod(tensor.shape) for tensor in head.tensors.values())
    found = Compatibility(
        "eagle" if isinstance(head, Eagle) else "medusa",
        path.resolve().name,
        str(path),
        sha256_of_folder([path / "config.json", *path.glob("*.safetensors")]),
        target.tokenizer.fingerprint(),
        parameters,
    )
    found.add("ok", "tokenizer", "a head has none of its own")
    reads = ", ".join(map(str, head.config.wants))
    kind = (
        f"EAGLE-{head.config.version}" if isinstance(head.config, EagleConfig) else f"{head.config.heads} Medusa heads"
    )
    found.add("ok", "shapes", f"{kind}: reads states of layers {reads} of the target's {target.config.layers}")
    size = head.config.draft_vocabulary
    if size < target.config.vocabulary:
        found.add("note", "vocabulary", f"guesses among {size:,} of {target.config.vocabulary:,} tokens")
    _made_for(found, head.config.target_sha256, target)
    _ratio(found, target)
    return found


def _started(method: Method, target: ModelFiles, draft: ModelFiles) -> Compatibility:
    return Compatibility(
        method,
        draft.name,
        str(draft.path),
        draft.sha256(),
        draft.tokenizer.fingerprint(),
        from_config(draft.config, draft.name).parameters,
    )


def _tokenizers(found: Compatibility, target: Tokenizer, draft: Tokenizer) -> None:
    """Same tokens, same merges, and the same rules of where a text is cut before them."""
    differing = difference(target, draft)
    if differing is not None:
        found.foreign = True
        found.add(
            "refused",
            "tokenizer",
            f"{differing}: use a draft of the target's family, or --retokenise to let it guess by its text",
        )
        return
    found.add("ok", "tokenizer", f"the same {target.vocabulary:,} tokens and merges")
    cut = next((text for text in _CUTS if target.encode(text) != draft.encode(text)), None)
    if cut is not None:
        found.add(
            "warning",
            "pre-tokenizer",
            f"{cut!r} is cut into {len(target.encode(cut))} tokens by the target and {len(draft.encode(cut))} by the "
            "draft: it was trained on texts that were cut otherwise",
        )


def _padding(found: Compatibility, target: ModelFiles, draft: ModelFiles) -> None:
    ours, theirs = target.config.vocabulary, draft.config.vocabulary
    used = min(target.tokenizer.vocabulary, draft.tokenizer.vocabulary)
    if ours == theirs:
        found.add("ok", "vocabulary", f"{ours:,} rows in both")
    elif min(ours, theirs) >= used:
        found.add(
            "ok", "vocabulary", f"{ours:,} rows here, {theirs:,} in the draft: the rest is padding, which is fine"
        )
    else:
        found.add("warning", "vocabulary", f"the draft has rows for {theirs:,} tokens and the target for {ours:,}")


def _specials(found: Compatibility, target: Tokenizer, draft: Tokenizer) -> None:
    for what, ours, theirs in (("start of text", target.bos, draft.bos), ("end of text", target.eos, draft.eos)):
        if ours != theirs:
            found.add("note", what, f"{ours} here and {theirs} in the draft; the target's count")
    if target.template is None or draft.template is None:
        missing = "target" if target.template is None else "draft"
        found.add("note", "chat template", f"the {missing} has none; the target's is used")
    elif target.template.source != draft.template.source:
        found.add("note", "chat template", "they differ: the draft reads the target's, which it was not trained with")
    else:
        found.add("ok", "chat template", "the same")


def _sizes(found: Compatibility, target: ModelFiles, draft: ModelFiles) -> None:
    ours, theirs = target.config, draft.config
    if theirs.context < ours.context:
        found.add(
            "warning",
            "context",
            f"the draft reads {theirs.context:,} tokens, the target {ours.context:,}: behind them nothing is guessed",
        )
    else:
        found.add("ok", "context", f"{theirs.context:,} tokens, the target {ours.context:,}")
    if ours.architecture == theirs.architecture:
        found.add("ok", "family", ours.architecture)
    else:
        found.add("note", "family", f"the target is {ours.architecture}, the draft {theirs.architecture}")
    _ratio(found, target)


def _ratio(found: Compatibility, target: ModelFiles) -> None:
    whole = from_config(target.config, target.name).parameters
    share = found.parameters / whole
    told = f"{found.parameters / 1e6:,.1f} M parameters, {share:.0%} of the target's {whole / 1e6:,.1f} M"
    if share > _HALF:
        found.add("warning", "size", f"{told}: a guess costs more than half a token of the target's own")
    elif share > _USUAL[1]:
        found.add("note", "size", f"{told}; {_USUAL[0]:.0%} to {_USUAL[1]:.0%} is usual")
    else:
        found.add("ok", "size", told)


def _made_for(found: Compatibility, recorded: str | None, target: ModelFiles) -> None:
    ours = target.sha256()
    if recorded is None:
        found.add("note", "target", "the draft does not say which target it was trained for")
    elif recorded == ours:
        found.add("ok", "target", f"trained for this target, SHA-256 {ours[:12]}...")
    else:
        found.add(
            "drift",
            "target",
            f"trained for the target with SHA-256 {recorded[:12]}..., and this one has {ours[:12]}...: another "
            "model, or this one before it was changed",
        )


def _recorded(path: Path) -> str | None:
    stored = read_json(path / "config.json").get("outrider")
    found = stored.get("target_sha256") if isinstance(stored, dict) else None
    return found if isinstance(found, str) else None
