"""Charts as SVG text: no script, no font and no network; colours come from the page's style.

Series are told apart without colour too: each bar and line carries its name, lines have markers of their own shape.
Sizes are in the units of the view box, which are pixels at full width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

__all__ = ["Line", "bars", "lines"]

_WIDTH = 760
_BAR, _BAR_GAP, _GROUP_GAP = 15, 3, 14
_CHARACTER = 6.6  # the usual width of one, at 12 pixels
_HEIGHT = 300  # of the plot of a line chart
_MOST_TICKS = 16  # numbers along an axis
_LABEL_STEP = 15  # between two labels at the ends of lines


@dataclass(frozen=True, slots=True)
class Line:
    """A named series. A y of None is a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


def bars(
    title: str,
    groups: Sequence[str],
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    axis: str,
    unit: str = "",
    reference: float | None = None,
    intervals: Sequence[Sequence[Sequence[float] | None]] | None = None,
) -> str:
    """Horizontal bars: `values[series][group]`, with their 95 % `intervals` where there are some.

    `reference` is drawn as a line across; `unit` follows each figure.
    """
    reach = [value for row in values for value in row if value is not None]
    reach += [edge for row in intervals or () for pair in row if pair is not None for edge in pair]
    ticks = _ticks(0.0, max([*reach, reference or 0.0, 1e-9]))
    left = 12 + _CHARACTER * max(map(len, groups))
    right = 16 + _CHARACTER * (max(map(len, names)) + 9 if len(names) > 1 else 9)
    wide = _WIDTH - left - right

    def x(value: float) -> float:
        return left + wide * value / ticks[-1]

    parts: list[str] = []
    y = 8.0
    for group, label in enumerate(groups):
        top = y
        for series, name in enumerate(names):
            value = values[series][group]
            if value is None:
                continue
            told = f"{value:.2f}{unit}" if value < 100 else f"{value:,.0f}{unit}"
            end = x(value)
            parts.append(
                f'<rect class="f{series % 8}" x="{left:.1f}" y="{y:.1f}" width="{end - left:.1f}" height="{_BAR}"/>'
            )
            interval = intervals[series][group] if intervals is not None else None
            if interval is not None:
                parts += _whisker(x(interval[0]), x(interval[1]), y + _BAR / 2)
                end = max(end, x(interval[1]) + 2)
            text = f"{told} {name}" if len(names) > 1 else told
            parts.append(_text(end + 5, y + _BAR - 3, text))
            y += _BAR + _BAR_GAP
        parts.append(_text(left - 6, (top + y - _BAR_GAP) / 2 + 4, label, anchor="end", kind="name"))
        y += _GROUP_GAP
    bottom = y - _GROUP_GAP + 4
    grid = [f'<path class="grid" d="M{x(tick):.1f} 4V{bottom:.1f}"/>' for tick in ticks]
    grid += [_text(x(tick), bottom + 15, _short(tick), anchor="middle") for tick in ticks]
    if reference is not None:
        parts.append(f'<path class="reference" d="M{x(reference):.1f} 4V{bottom:.1f}"/>')
    parts.append(_text(left + wide / 2, bottom + 33, axis, anchor="middle", kind="axis"))
    return _svg(title, bottom + 42, [*grid, *parts])


def lines(
    title: str,
    series: Sequence[Line],
    *,
    x_axis: str,
    y_axis: str,
    even: bool = False,
    reference: float | None = None,
    top: float | None = None,
) -> str:
    """Lines with markers and their names at the end. `even`: the xs lie evenly, whatever their distance."""
    xs = sorted({x for line in series for x, _ in line.points})
    ys = [y for line in series for _, y in line.points if y is not None]
    ticks = _ticks(0.0, top if top is not None else max([*ys, reference or 0.0, 1e-9]))
    left, right = 58.0, 20 + _CHARACTER * max(len(line.name) for line in series)
    wide, high = _WIDTH - left - right, float(_HEIGHT)
    place = _evenly(xs) if even else _linearly(xs)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + 8 + (wide - 16) * place(x), 10 + high - high * y / ticks[-1]

    parts = []
    for tick in ticks:
        y = at(xs[0], tick)[1]
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{left + wide:.1f}"/>')
        parts.append(_text(left - 7, y + 4, _short(tick), anchor="end"))
    shown = xs[:: ceil(len(xs) / _MOST_TICKS)]
    parts += [_text(at(x, 0)[0], high + 27, _short(x), anchor="middle") for x in shown]
    if reference is not None:
        y = at(xs[0], reference)[1]
        parts.append(f'<path class="reference" d="M{left:.1f} {y:.1f}H{left + wide:.1f}"/>')
    ends: list[tuple[float, int]] = []
    for number, line in enumerate(series):
        parts += _drawn(number, line, at)
        last = [y for _, y in line.points if y is not None]
        if last:
            ends.append((at(xs[0], last[-1])[1], number))
    for y, number in _spread(ends):
        parts.append(_text(left + wide + 8, y + 4, series[number].name, kind=f"t{number % 8}"))
    parts.append(_text(left + wide / 2, high + 45, x_axis, anchor="middle", kind="axis"))
    turned = f'transform="translate(14 {10 + high / 2:.1f}) rotate(-90)"'
    parts.append(f'<text class="axis" {turned} text-anchor="middle">{escape(y_axis)}</text>')
    return _svg(title, high + 54, parts)


def _whisker(low: float, high: float, y: float) -> list[str]:
    """A line with ends, on a broader one of the paper's colour, so that it shows on any bar."""
    path = f"M{low:.1f} {y:.1f}H{high:.1f}M{low:.1f} {y - 3:.1f}v6M{high:.1f} {y - 3:.1f}v6"
    return [f'<path class="halo" d="{path}"/>', f'<path class="whisker" d="{path}"/>']


def _drawn(number: int, line: Line, at: Callable[[float, float], tuple[float, float]]) -> list[str]:
    """The line, broken at gaps, and its markers."""
    path, pen, marks = "", "M", []
    for x, y in line.points:
        if y is None:
            pen = "M"
            continue
        px, py = at(x, y)
        path += f"{pen}{px:.1f} {py:.1f}"
        pen = "L"
        marks.append(_marker(number, px, py))
    return [f'<path class="line s{number % 8}" d="{path}"/>', *marks]


def _marker(number: int, x: float, y: float) -> str:
    shapes = (
        "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
        "M-4-4H4V4H-4Z",
        "M0-5L5 4H-5Z",
        "M0-5L5 0L0 5L-5 0Z",
        "M0 5L5-4H-5Z",
    )
    return f'<path class="f{number % 8}" transform="translate({x:.1f} {y:.1f})" d="{shapes[number % len(shapes)]}"/>'


def _spread(ends: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Labels moved apart, downwards first and then up again from the bottom of the plot."""
    placed: list[tuple[float, int]] = []
    for y, number in sorted(ends):
        placed.append((max(y, placed[-1][0] + _LABEL_STEP) if placed else y, number))
    limit = 10.0 + _HEIGHT
    for index in range(len(placed) - 1, -1, -1):
        y, number = placed[index]
        placed[index] = (min(y, limit), number)
        limit = placed[index][0] - _LABEL_STEP
    return placed


def _evenly(xs: Sequence[float]) -> Callable[[float], float]:
    rank = {x: index / max(len(xs) - 1, 1) for index, x in enumerate(xs)}
    return rank.__getitem__


def _linearly(xs: Sequence[float]) -> Callable[[float], float]:
    low, high = xs[0], xs[-1]
    return lambda x: (x - low) / (high - low) if high > low else 0.5


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, four to seven of them."""
    raw = (high - low) / 5 or 1.0
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    styled = f' class="{kind}"' if kind else ""
    return f'<text{styled} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    name = escape(title)
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{name}">'
    return "\n".join([head, f"<title>{name}</title>", *parts, "</svg>"])
