"""Ranks the methods for a model, a device, a load and a kind of work, from a stated model or from a measured profile.

By the stated model: tokens per step from published acceptance (acceptance.json) and Leviathan's formula or its tree
form, costs from the roofline of the device and its software. From a profile: tokens per step as counted on the built-in
texts of the workload, costs as measured here. Both rank expected tokens per second against plain decoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from outrider.advise.commands import Names, commands
from outrider.advise.expected import break_even, equivalent, tokens, tree_tokens
from outrider.advise.methods import Draft, extra_bytes, speedup, step_seconds
from outrider.advise.predict import chain_cost, predict
from outrider.advise.roofline import Roofline
from outrider.advise.shape import Shape, known
from outrider.engine.profile import Drafting, Profile

__all__ = ["MOST", "Advice", "Load", "LoadError", "Row", "by_figures", "by_profile"]

_CHAINS = (1, 2, 3, 4, 5, 6, 7, 8)
_LOOKUPS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
_TREES = (4, 8, 16, 24, 32, 48, 63)
_DEPTH = 6  # of trees
_MEDUSA_DEPTH = 5
_BATCHES = tuple(2**n for n in range(11))
_RESERVE = 0.9  # of a device's memory that models and caches may take
_PAYS = 1.05  # below this, a gain is no reason to run one thing more

_TREE_STACKS = ("sglang", "transformers")  # whose EAGLE checks trees; the others' chains


MOST = 10_000_000  # of any figure of a load


class LoadError(ValueError):
    """A load that makes no sense: names the figure."""


@dataclass(frozen=True, slots=True)
class Load:
    """What has to be served: `batch` sequences side by side, or `rate` requests per second."""

    batch: int = 1
    rate: float | None = None
    prompt_tokens: int = 512
    output_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.batch),
            ("prompt tokens", self.prompt_tokens),
            ("output tokens", self.output_tokens),
            ("rate", 1.0 if self.rate is None else self.rate),
        ):
            if not 0 < value <= MOST:
                raise LoadError(f"{name} {value} is not above 0 and at most {MOST:,}")

    @property
    def context(self) -> int:
        """Cached tokens of a sequence, on the average of its life."""
        return self.prompt_tokens + self.output_tokens // 2


@dataclass(slots=True)
class Row:
    """One method."""

    method: str
    low: float  # speed-up over plain decoding
    usual: float
    high: float
    acceptance: float | None  # of a guess whose ancestors were right, usual
    tokens_per_step: float
    guesses: int  # per step
    depth: int  # of a tree; 0: a chain
    memory: int  # bytes beside the target's
    fits: bool
    break_even: float | None  # acceptance below which it loses with this many guesses
    harmful_batch: int | None  # smallest measured or computed batch at which it loses
    use: str = ""
    average: bool = False  # `guesses` were counted: drafts are cut to what pays, step by step

    @property
    def draft(self) -> str:
        """The recommended length or tree, in words."""
        if not self.guesses:
            return "-"
        if self.average:
            return f"about {self.guesses} a step"
        return f"tree of {self.guesses}, {self.depth} deep" if self.depth else f"{self.guesses} in a row"


@dataclass(slots=True)
class Advice:
    """The decision matrix and what it rests on."""

    model: str
    hardware: str
    software: str
    basis: str  # what the figures come from
    workload: str
    batch: int
    memory_left: int | None  # bytes, the target and its cache set aside
    rows: list[Row]  # best first
    reasons: list[str]
    measure: list[str]
    commands: dict[str, dict[str, str]] = field(default_factory=dict)  # by method, by engine; none if nothing fits

    @property
    def best(self) -> Row:
        return self.rows[0]

    def ready(self, engine: str) -> tuple[str, str]:
        """The best method that the engine has, and its command; if it has none that is worth it, why not the best."""
        ranked = [row.method for row in self.rows if row.method in self.commands]
        worth = ranked[: ranked.index("none") + 1]
        made = {method: self.commands[method][engine] for method in worth}
        method = next((method for method, command in made.items() if not command.startswith("#")), self.best.method)
        return method, made[method]


@cache
def _acceptance() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((Path(__file__).parent / "acceptance.json").read_text("utf-8"))
    return stored


# -- by figures ------------------------------------------------------------------------------------------------------


def by_figures(
    machine: Roofline,
    target: Shape,
    load: Load,
    workload: str,
    *,
    draft: Shape | None = None,
    memory_gb: float | None = None,
    acceptance: Mapping[str, float] | None = None,
    local: str | None = None,
) -> Advice:
    """From public figures alone. `acceptance` are measured rates, by method, in place of the published ones."""
    draft = draft or _partner(target)
    batch = load.batch if load.rate is None else _concurrency(machine, target, load)
    total = machine.device.memory * 1e9 * machine.devices if memory_gb is None else memory_gb * 1e9
    left = total * _RESERVE - target.weight_bytes - batch * load.context * target.kv_bytes
    rows = [_plain(left)]
    for method in ("ngram", "suffix", "draft_model", "medusa", "eagle"):
        given = (acceptance or {}).get(method)
        rates = [given] * 3 if given is not None else _acceptance()["methods"][method][workload]
        rows.append(_best_row(machine, target, method, rates, batch, load.context, left, draft))
    _judge(rows)
    names = Names(local, target.hub, draft.hub or draft.name, target.eagle3, target.medusa)
    return Advice(
        model=f"{target.name}, {target.parameters / 1e9:.2g} B parameters, {target.bits:g} bits per weight",
        hardware=machine.device.title + (f" x {machine.devices}" if machine.devices > 1 else ""),
        software=machine.stack.title,
        basis="stated model: roofline of public figures, published acceptance; nothing was measured",
        workload=workload,
        batch=batch,
        memory_left=round(left),
        rows=rows,
        reasons=_reasons_by_figures(machine, target, rows, batch, load.context, left),
        measure=_measure(rows, names),
        commands=_commands(rows, names),
    )


def _best_row(
    machine: Roofline,
    target: Shape,
    method: str,
    rates: Sequence[float],
    batch: int,
    context: int,
    left: float,
    draft: Shape,
) -> Row:
    """The method with the number of guesses that is usually best."""
    low, usual, high = rates
    options = list(_drafts(method, machine.stack.name, draft))
    drawn = max(options, key=lambda d: _speedup(machine, target, d, usual, batch, context))
    memory = extra_bytes(target, drawn, batch, context)
    cost = _cost(machine, target, drawn, batch, context)
    losing = [b for b in _BATCHES if b >= batch and _speedup(machine, target, drawn, usual, b, context) < 1]
    return Row(
        method=method,
        low=_speedup(machine, target, drawn, low, batch, context),
        usual=_speedup(machine, target, drawn, usual, batch, context),
        high=_speedup(machine, target, drawn, high, batch, context),
        acceptance=usual,
        tokens_per_step=_tokens(drawn, usual),
        guesses=drawn.nodes,
        depth=drawn.passes if drawn.tree and drawn.method != "medusa" else _MEDUSA_DEPTH if drawn.tree else 0,
        memory=round(memory),
        fits=memory <= left,
        break_even=_least(lambda a: _tokens(drawn, a) >= cost),
        harmful_batch=losing[0] if losing else None,
    )


def _drafts(method: str, stack: str, draft: Shape) -> list[Draft]:
    if method in ("ngram", "suffix"):
        return [Draft(method, k, 0) for k in _LOOKUPS]
    if method == "draft_model":
        return [Draft(method, k, k, model=draft) for k in _CHAINS]
    trees = stack in _TREE_STACKS
    if method == "medusa":
        if trees:
            return [Draft(method, n, 1, tree=True) for n in _TREES]
        return [Draft(method, k, 1) for k in _CHAINS[:_MEDUSA_DEPTH]]
    chains = [Draft(method, k, k) for k in _CHAINS]
    return chains + [Draft(method, n, d, tree=True) for n in _TREES for d in (4, _DEPTH)] if trees else chains


def _tokens(draft: Draft, a: float) -> float:
    if not draft.tree:
        return tokens(a, draft.nodes)
    shares = _acceptance()["ranks"]["shares"]
    ranks = [a * share for share in shares]
    depth = _MEDUSA_DEPTH if draft.method == "medusa" else draft.passes
    return tree_tokens(ranks, draft.nodes, depth)


def _speedup(machine: Roofline, target: Shape, draft: Draft, a: float, batch: int, context: int) -> float:
    return speedup(machine, target, draft, _tokens(draft, a), batch=batch, context=context)


def _cost(machine: Roofline, target: Shape, draft: Draft, batch: int, context: int) -> float:
    plain = step_seconds(machine, target, None, batch, context)
    return step_seconds(machine, target, draft, batch, context) / plain


def _least(holds: Any) -> float | None:
    steps = [n / 200 for n in range(201)]
    return next((a for a in steps if holds(a)), None)


def _partner(target: Shape) -> Shape:
    """The usual draft of a known model; of any other, one of a twelfth of its size."""
    if target.draft is not None:
        return known()[target.draft].at(_dtype_of(target.bits))
    factor = 12 ** (1 / 3)
    return Shape(
        name=f"a draft of {target.parameters / 12e9:.2g} B",
        vocabulary=target.vocabulary,
        hidden=round(target.hidden / factor),
        layers=max(1, round(target.layers / factor)),
        heads=max(1, round(target.heads / factor)),
        kv_heads=max(1, round(target.kv_heads / factor)),
        head_dim=target.head_dim,
        intermediate=round(target.intermediate / factor),
        tied=True,
        bits=target.bits,
    )


def _dtype_of(bits: float) -> str:
    from outrider.advise.shape import BITS

    return min(BITS, key=lambda name: abs(BITS[name] - bits))


def _concurrency(machine: Roofline, target: Shape, load: Load) -> int:
    """Sequences side by side at a rate of requests: Little's law, plain decoding, the fixed point from below."""
    assert load.rate is not None
    batch = 1.0
    for _ in range(100):
        step = machine.forward(target, round(batch), max(1, round(batch)), load.context)
        prompt = machine.forward(target, load.prompt_tokens, 1, load.prompt_tokens)
        wanted = load.rate * (prompt + load.output_tokens * step)
        if wanted > _BATCHES[-1]:
            raise LoadError(
                f"{load.rate:g} requests per second are more than one {machine.device.title} can serve: "
                "spread them over several, or lower the rate"
            )
        if abs(wanted - batch) < 0.5:
            break
        batch = max(1.0, wanted)
    return max(1, round(batch))


def _reasons_by_figures(
    machine: Roofline, target: Shape, rows: Sequence[Row], batch: int, context: int, left: float
) -> list[str]:
    plain = step_seconds(machine, target, None, batch, context)
    eight = machine.forward(target, 8 * batch, batch, context) / machine.forward(target, batch, batch, context)
    best = rows[0]
    out = [
        f"A plain step of {batch} text{'s' if batch > 1 else ''} takes {plain * 1e3:.2f} ms, "
        f"{batch / plain:.0f} tokens/s in all; checking 8 rows per text instead of one takes {eight:.2f}x as long.",
    ]
    if left < 0:
        caches = f"{batch} caches" if batch > 1 else "a cache"
        out.append(f"The model and {caches} of {context} tokens do not fit: {-left / 1e9:.1f} GB are missing.")
    else:
        out.append(_why(best))
    out += [f"{row.method} does not fit into the memory that is left." for row in rows if not row.fits and left >= 0]
    return out


# -- by a profile ----------------------------------------------------------------------------------------------------


def by_profile(
    profile: Profile,
    workload: str,
    *,
    batch: int = 1,
    memory_left: int | None = None,
    local: str | None = None,
    methods: Sequence[str] | None = None,
) -> Advice:
    """From what was measured on this machine; the acceptance is that of the profile's texts of the workload."""
    chosen = [d for d in profile.draftings if d.method != "none" and (methods is None or d.method in methods)]
    rows = [_plain(None), *(_profiled_row(profile, drafting, workload, batch, memory_left) for drafting in chosen)]
    _judge(rows)
    names = Names(local, None, None, None, None)
    one, eight = profile.seconds(batch, batch), profile.seconds(8 * batch, batch)
    return Advice(
        model=profile.name,
        hardware=f"this machine: {profile.key['machine']['cpu']}, {profile.key['threads']} threads",
        software=f"outrider, {', '.join(sorted(set(profile.key['formats'].values()) or {'fp32'}))}",
        basis=f"profile measured here on {profile.made[:10]}, acceptance counted on its texts",
        workload=workload,
        batch=batch,
        memory_left=memory_left,
        rows=rows,
        reasons=[
            f"A plain step of {batch} text{'s' if batch > 1 else ''} takes {one * 1e3:.2f} ms; checking 8 rows per "
            f"text instead of one takes {eight / one:.2f}x as long.",
            _why(rows[0]),
        ],
        measure=_measure(rows, names),
        commands=_commands(rows, names),
    )


def _profiled_row(profile: Profile, drafting: Drafting, workload: str, batch: int, left: int | None) -> Row:
    counts = drafting.counts(workload)
    found = predict(profile, drafting.method, counts, batch=batch).decoding_speedup
    spread = 2 * counts.error / counts.tokens_per_step
    drafted = sum(count for guesses, count in counts.steps.items() if guesses)
    guesses = round(counts.drafted / drafted) if drafted else 0
    per_draft = 1 + sum(counts.right) / drafted if drafted else 1.0
    sizes = sorted({f.batch for f in profile.forwards if f.batch >= batch} | {batch})
    losing = [b for b in sizes if predict(profile, drafting.method, counts, batch=b).decoding_speedup < 1]
    return Row(
        method=drafting.method,
        low=found * (1 - spread),
        usual=found,
        high=found * (1 + spread),
        acceptance=equivalent(per_draft, guesses) if guesses else None,
        tokens_per_step=counts.tokens_per_step,
        guesses=guesses,
        depth=0,
        memory=drafting.memory,
        fits=left is None or drafting.memory <= left,
        break_even=break_even(guesses, lambda k: chain_cost(profile, drafting.method, k, batch=batch))
        if guesses
        else None,
        harmful_batch=losing[0] if losing else None,
        average=True,
    )


# -- both ------------------------------------------------------------------------------------------------------------


def _plain(left: float | None) -> Row:
    return Row("none", 1, 1, 1, None, 1, 0, 0, 0, left is None or left >= 0, None, None)


def _judge(rows: list[Row]) -> None:
    """Best first, each with its use in a few words."""
    rows.sort(
        key=lambda row: (row.fits, row.usual if row.method == "none" or row.usual >= _PAYS else 0.0), reverse=True
    )
    if not any(row.fits for row in rows):  # then the model itself does not
        rows.sort(key=lambda row: row.method != "none")
    for place, row in enumerate(rows):
        if row.method == "none":
            row.use = "baseline, and the way back"
            if not row.fits:
                row.use = "the model itself does not fit: take more or larger devices, or fewer bits per weight"
            elif place == 0:
                row.use = "take this: nothing is ahead of it"
        elif not row.fits:
            row.use = "does not fit into memory"
        elif row.usual < 1:
            row.use = "harmful here"
        elif row.usual < _PAYS:
            row.use = "not worth it here"
        elif place == 0:
            row.use = "take this"
        elif row.high > rows[0].low:
            row.use = "as good by these figures: measure both"
        else:
            row.use = "second choice"


def _why(best: Row) -> str:
    if best.method == "none":
        return "No method is expected to gain 5 %: decode plainly."
    text = f"{best.method} brings {best.tokens_per_step:.2f} tokens per step with {best.draft}"
    if best.break_even is not None and best.acceptance is not None:
        text += f"; it pays above an acceptance of {best.break_even:.2f}, and {best.acceptance:.2f} is usual"
    if best.harmful_batch is not None:
        text += f"; from a batch of {best.harmful_batch} it loses"
    return text + "."


def _measure(rows: Sequence[Row], names: Names) -> list[str]:
    if not rows[0].fits:
        return []
    model = names.local or "MODEL"
    out = [
        f"acceptance and tokens per step on your own prompts: outrider check {model} --draft DRAFT --prompts FILE",
        f"tokens/s against plain decoding at your load: outrider bench --model {model} --prompts FILE --drafter "
        + (rows[0].method if rows[0].method != "none" else "auto"),
    ]
    if any(row.harmful_batch for row in rows[:2]):
        out.append("the batch at which it turns harmful: repeat the bench with --batch-size")
    return out


def _commands(rows: Sequence[Row], names: Names) -> dict[str, dict[str, str]]:
    return {row.method: commands(row.method, row.guesses, names, depth=row.depth) for row in rows if row.fits}
