"""Line charts as SVG, and pages that hold them: no script, no font and no file from elsewhere, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chart", "Series", "bar", "page", "svg"]

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 160, 16, 46  # of the plot within the picture; names stand at the right
_BLOCKS = " ▏▎▍▌▋▊▉█"
_COLOURS = 8  # classes c0 ... of the page's style

_THEME = """
:root { color-scheme: light dark; --text: #1d2329; --faint: #66707a; --line: #d5dbe1; --page: #ffffff;
  --c0: #0b62c4; --c1: #c2410c; --c2: #15803d; --c3: #9333ea;
  --c4: #b8860b; --c5: #0e7490; --c6: #be185d; --c7: #57606a; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --faint: #9aa4ae; --line: #3a424a; --page: #14181c;
  --c0: #6cb2ff; --c1: #ff9a62; --c2: #6fdc8c; --c3: #cfa3ff;
  --c4: #f0c24b; --c5: #5fd3e6; --c6: #ff8fc0; --c7: #a9b4be; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--faint); }
.grid { stroke: var(--line); stroke-width: 1; } .series { fill: none; stroke-width: 2; }
.dashed { stroke-dasharray: 5 4; } .faint { color: var(--faint); }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .75rem; text-align: right;
  border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; }
"""
_STYLE = _THEME + "\n".join(
    f".c{n} {{ stroke: var(--c{n}); }} circle.c{n} {{ fill: var(--c{n}); }} "
    f"svg text.c{n} {{ fill: var(--c{n}); stroke: none; }}"
    for n in range(_COLOURS)
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `colour` names one of the page's eight; series may share it and differ by dashes or dots."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    dots: bool = False  # marks without a line


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    y: str
    series: Sequence[Series]
    level: float | None = None  # a horizontal line, such as plain decoding's


def svg(chart: Chart, *, style: bool = False) -> str:
    """The chart as an SVG element; with `style` a file of its own, colours included."""
    points = [point for series in chart.series for point in series.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = _ticks(min(xs), max(xs))
    y_ticks = _ticks(min(0.0, *ys), max(*ys, chart.level or 0.0))
    plot = _Plot(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(chart.title)}">'
    ]
    if style:
        out.append(f"<style>{_STYLE}</style>")
        out.append(f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--page)"/>')
    for tick in y_ticks:
        y = plot.y(tick)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out += [
        f'<text x="{plot.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in x_ticks
    ]
    if chart.level is not None:
        y = plot.y(chart.level)
        out.append(f'<line class="c7 dashed" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(chart.x)}</text>')
    turned = f'transform="rotate(-90 14 {_HEIGHT / 2:.0f})"'
    out.append(f'<text x="14" y="{_HEIGHT / 2:.0f}" text-anchor="middle" {turned}>{html.escape(chart.y)}</text>')
    for series in chart.series:
        out += _line(series, plot)
    out += _names(chart.series, plot)
    return "\n".join([*out, "</svg>"])


def page(title: str, intro: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole HTML page: sections are (heading, inner HTML)."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{inner}" for heading, inner in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        f'<p class="faint">{html.escape(intro)}</p>\n{body}\n</body>\n</html>\n'
    )


def bar(value: float, most: float, width: int = 30) -> str:
    """A horizontal bar of block characters, an eighth of a character fine."""
    eighths = round(8 * width * max(0.0, min(1.0, value / most)))
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")


@dataclass(frozen=True, slots=True)
class _Plot:
    """Data to picture."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM)


def _line(series: Series, plot: _Plot) -> list[str]:
    placed = [(plot.x(x), plot.y(y)) for x, y in series.points]
    if series.dots:
        return [f'<circle class="c{series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dashed = " dashed" if series.dashed else ""
    return [f'<polyline class="series c{series.colour}{dashed}" points="{way}"/>']


def _names(series: Sequence[Series], plot: _Plot) -> list[str]:
    """Names beside the lines' ends, moved apart where they would lie on each other."""
    out, lowest = [], -math.inf
    for y, s in sorted(((plot.y(s.points[-1][1]), s) for s in series if s.name), key=lambda pair: pair[0]):
        lowest = max(y, lowest + 14)
        out.append(
            f'<text class="c{s.colour}" x="{_WIDTH - _RIGHT + 8}" y="{lowest + 4:.1f}">{html.escape(s.name)}</text>'
        )
    return out


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers around a range."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span))
    step = next(s for s in (0.1 * size, 0.2 * size, 0.5 * size, size, 2 * size) if span / s <= 8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]
