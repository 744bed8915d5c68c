"""From a row of logits to the target's own token: shaping, law and draw. The oracle of every runner's own version.

    shape:  logits -> candidates and their values     (bias, min_tokens, mask, penalties; min_p, top_k, top_p)
    draw:   argmax over candidates of values + T * gumbel(seed, position, token)
    law:    softmax over candidates of values / T

Letters: V vocabulary, C candidates, T temperature.

Every choice is deterministic. Equal values count as ordered by token id, lower first. Sums that decide something are
sums of whole numbers (top_p) or follow one fixed order (`noise.total`), so that any implementation gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core import noise
from outrider.core.shaping import Draw, Shaping

__all__ = [
    "DrawError",
    "adjust",
    "check_logits",
    "describe",
    "draft_law",
    "draw",
    "law",
    "log_softmax",
    "pick",
    "ranked",
    "shape",
    "top",
]

Logits = NDArray[np.float32]  # [V]
Tokens = NDArray[np.int32]

_RUNNERS = 16  # draws over which a draft's confidence is shared out at T > 0
_FAR = 8.0  # times T: what is so far behind a draft's highest value, 3e-4 of its chance, is not guessed
_MASS = 2.0**44  # top_p counts probability in whole units of the likeliest token's 2**-44: whole numbers have no order


class DrawError(ValueError):
    """No token can be drawn: the logits are broken, or everything is kept out. Says which."""


def check_logits(logits: Logits, position: int | None = None) -> None:
    """Raise DrawError unless every logit is finite or -inf (= impossible), and one is finite."""
    where = "" if position is None else f" for position {position}"
    for name, bad in (("NaN", np.isnan(logits)), ("+inf", np.isposinf(logits))):
        if bad.any():
            raise DrawError(f"the model's logit of token {int(bad.argmax())}{where} is {name}")
    if not np.isfinite(logits).any():
        raise DrawError(f"all {len(logits):,} of the model's logits{where} are -inf")


def adjust(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> Logits:
    """Logits after bias, min_tokens, mask and penalties; -inf = kept out. The arithmetic is float64, rounded once. [V]

    History is `shaping.tokens + path`. Ids outside the row are skipped: a draft's vocabulary may be padded differently.
    Raises DrawError if nothing is left.
    """
    params, size = shaping.params, len(logits)
    position = len(shaping.tokens) + len(path)
    check_logits(logits, position)
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        if token < size:
            values[token] += bias
    ends = position - shaping.prompt_length < params.min_tokens
    if ends:
        values[[token for token in shaping.ends if token < size]] = -np.inf
    mask = shaping.mask_after(path)
    if mask is not None:
        values[~_allowed(mask, size)] = -np.inf
    if params.penalised:
        _penalise(values, shaping, path)
    with np.errstate(over="ignore"):
        row = values.astype(np.float32)
    if (row == np.inf).any():
        token = int((row == np.inf).argmax())
        raise DrawError(
            f"the logit of token {token} for position {position} is infinite after bias and penalties: "
            f"repetition_penalty {params.repetition_penalty!r} is too small"
        )
    if (row == -np.inf).all():
        raise DrawError(nothing_left(position, masked=mask is not None, ends=ends and bool(shaping.ends)))
    return row


def nothing_left(position: int, *, masked: bool, ends: bool) -> str:
    """The message for a position at which every token is kept out."""
    causes = ["the mask (grammar)"] * masked + ["min_tokens (it keeps out the ends of text)"] * ends
    return f"no token is left for position {position}: kept out by {' and '.join(causes) or 'logits of -inf'}"


def _allowed(mask: NDArray[np.uint32], size: int) -> NDArray[np.bool_]:
    octets = mask.astype("<u4", copy=False).view(np.uint8)
    allowed = np.zeros(size, np.bool_)  # tokens behind the mask's end are kept out
    allowed[: 8 * len(octets)] = np.unpackbits(octets, bitorder="little")[:size]
    return allowed


def _penalise(values: NDArray[np.float64], shaping: Shaping, path: Sequence[int]) -> None:
    params, size = shaping.params, len(values)
    history = np.fromiter((*shaping.tokens, *path), np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(history)
        seen = seen[seen < size]
        old = values[seen]
        values[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    written, counts = np.unique(history[shaping.prompt_length :], return_counts=True)
    written, counts = written[written < size], counts[written < size]
    values[written] -= params.frequency_penalty * counts
    values[written] -= params.presence_penalty


def shape(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> tuple[Tokens, NDArray[np.float64]]:
    """The candidates, ascending, and their adjusted logits (not divided by T). [C], [C]

    At T = 0 nothing is filtered: min_p, top_k and top_p never remove the likeliest token. Each filter keeps the first
    tokens in the order (value descending, id ascending):
    - min_p: value >= highest + T * log(min_p);
    - top_k: the first k of those;
    - top_p: of those, each token before which the mass is below top_p of their whole mass.
    """
    params = shaping.params
    row = adjust(logits, shaping, path)
    ids = np.flatnonzero(row > -np.inf).astype(np.int32)
    values = row[ids].astype(np.float64)
    if params.temperature == 0.0:
        return ids, values
    highest = values.max()
    if params.min_p > 0.0:
        keep = values >= highest + params.temperature * _log(params.min_p)
        ids, values = ids[keep], values[keep]
    if not 0 < params.top_k < len(ids) and params.top_p == 1.0:
        return ids, values
    order = np.argsort(-values, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = np.rint(noise.exp(_scaled(values[order], highest, params.temperature)) * _MASS).astype(np.uint64)
        before = np.cumsum(mass) - mass
        order = order[before.astype(np.float64) < params.top_p * float(mass.sum())]
    order.sort()
    return ids[order], values[order]


def _scaled(values: NDArray[np.float64], highest: float, temperature: float) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # a temperature near 0 makes all but the highest -inf, which is what it means
        return (values - highest) / temperature


def _log(x: float) -> float:
    return float(noise.log(np.array([max(x, np.finfo(np.float64).tiny)]))[0])


def _scores(
    ids: Tokens, values: NDArray[np.float64], shaping: Shaping, path: Sequence[int], stream: int
) -> NDArray[np.float64]:
    """What the draw takes the argmax of: values + T * gumbel. At T = 0 the noise would be multiplied by 0. [C]"""
    temperature = shaping.params.temperature
    if temperature == 0.0:
        return values
    return values + temperature * noise.gumbel(shaping.seed, len(shaping.tokens) + len(path), ids, stream)


def draw(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> Draw:
    """The target's own token after this row, at position len(shaping.tokens) + len(path). Raises DrawError."""
    ids, values = shape(logits, shaping, path)
    token = int(ids[np.argmax(_scores(ids, values, shaping, path, noise.TARGET))])
    return describe(logits, token, shaping.params.logprobs)


def law(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> NDArray[np.float64]:
    """The distribution of `draw` over seeds; a point mass at T = 0. [V]"""
    ids, values = shape(logits, shaping, path)
    p = np.zeros(len(logits))
    if shaping.params.temperature == 0.0:
        p[ids[np.argmax(values)]] = 1.0
        return p
    p[ids] = noise.exp(_scaled(values, values.max(), shaping.params.temperature))
    p /= noise.total(p)
    return p


def top(
    logits: Logits, k: int, shaping: Shaping | None = None, path: Sequence[int] = ()
) -> tuple[Tokens, NDArray[np.float32]]:
    """The k tokens that `draw` would give first, second ..., and the log-probability of each under the law (at
    temperature 1 if T is 0). Without shaping: by plain logits. Best first, fewer than k if fewer are left. [k], [k]"""
    if shaping is None:
        check_logits(logits)
        ids = np.flatnonzero(logits > -np.inf).astype(np.int32)
        scores = values = logits[ids].astype(np.float64)
        temperature = 1.0
    else:
        ids, values = shape(logits, shaping, path)
        scores = _scores(ids, values, shaping, path, noise.TARGET)
        temperature = shaping.params.temperature or 1.0
    weights = np.zeros(len(logits))
    scaled = _scaled(values, values.max(), temperature)
    weights[ids] = noise.exp(scaled)
    order = np.argsort(-scores, kind="stable")[:k]
    with np.errstate(over="ignore"):
        return ids[order], (scaled[order] - _log(noise.total(weights))).astype(np.float32)


def ranked(
    logits: Logits,
    k: int,
    shaping: Shaping,
    path: Sequence[int] = (),
    known: Tokens | None = None,
    vocabulary: int | None = None,
) -> tuple[tuple[int, float], ...]:
    """What `draw` would give first, second ... if it saw this row of a draft, with the log of the draft's confidence.

    Output i of the row stands for token known[i] of the target's `vocabulary`; without `known`, for token i. At T = 0
    confidence is the softmax of the logits. Above, what the target adds to its logits is known, the same noise: with it
    added to the draft's, the softmax of the sums tells how sure a draw is: shared out over the 16 that come
    first. Tokens far behind the highest take no part, which saves most of the noise. Fewer than k if fewer are left.
    """
    if known is not None:
        wide = np.full(vocabulary or int(known.max()) + 1, -np.inf, np.float32)
        wide[known] = logits
        logits = wide
    if shaping.params.temperature == 0:
        tokens, logprobs = top(logits, k, shaping, path)
        return tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    ids, values = _near(logits, shaping, path)
    sums = _scores(ids, values, shaping, path, noise.TARGET)
    order = np.argsort(-sums, kind="stable")[: max(k, _RUNNERS)]
    best = sums[order] - sums[order[0]]
    sure = best - np.log(np.exp(best).sum())
    return tuple(zip(ids[order[:k]].tolist(), sure[:k].tolist(), strict=True))


def _near(logits: Logits, shaping: Shaping, path: Sequence[int]) -> tuple[Tokens, NDArray[np.float64]]:
    """The candidates that a draft considers: none far behind the highest. [C], [C]"""
    ids, values = shape(logits, shaping, path)
    near = values >= values.max() - _FAR * shaping.params.temperature
    return ids[near], values[near]


def draft_law(logits: Logits, shaping: Shaping, path: Sequence[int] = ()) -> NDArray[np.float64]:
    """The law from which a draft draws guesses under rejection: `law` without what is far behind the highest. [V]

    A draft may draw from any law, as long as it is the one that it tells.
    """
    p = law(logits, shaping, path)
    if shaping.params.temperature:
        ids, _ = _near(logits, shaping, path)
        kept = p[ids]
        p = np.zeros(len(p))
        p[ids] = kept / noise.total(kept)
    return p


def log_softmax(logits: Logits, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Natural-log probabilities of `tokens` under the plain logits. [len(tokens)]"""
    row = logits.astype(np.float64)
    highest = row.max()
    normaliser = _log(noise.total(noise.exp(row - highest)))
    out: NDArray[np.float64] = (row[list(tokens)] - highest) - normaliser
    return out


def describe(logits: Logits, token: int, k: int | None) -> Draw:
    """A token that comes after this row, by whatever rule, with its log-probability and the k likeliest; None: none."""
    if k is None:
        return Draw(token)
    best: list[int] = []
    if k:
        order = np.argsort(-logits.astype(np.float64), kind="stable")[:k]
        best = [int(t) for t in order if logits[t] > -np.inf]
    values = [float(x) for x in log_softmax(logits, [token, *best])]
    return Draw(token, values[0], tuple(zip(best, values[1:], strict=True)))


def pick(p: NDArray[np.float64], u: float) -> int:
    """The token at which the running sum of p passes u of the whole; p need not sum to one. u in (0, 1). [V]

    One number for the whole vocabulary: far cheaper than noise per token, where nothing has to agree with the draw.
    """
    sums = np.cumsum(p)
    if not sums[-1] > 0.0:
        raise DrawError("a law without mass")
    token = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return token if token < len(p) else int(np.flatnonzero(p)[-1])
