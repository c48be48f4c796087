"""Line and bar charts as inline SVG, which need no scripts and no network and use the page's colours.

The units are chosen for a page 400 to 800 pixels wide: the widest label fits next to the chart in both cases, in the
page style's font sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from offload_trainer.units import format_count, format_seconds

Point = tuple[float, float]

_MOST_POINTS = 800  # about one per pixel: even a run of a million steps makes a page of some kilobytes
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 640, 280, 92, 34, 14
_LONGEST = 48  # maximum length of a bar's name; the end is kept, since it says most
COLOURS = 6  # number of colours in the page's style


@dataclass(frozen=True)
class Series:
    """A line of (step, value) points."""

    name: str
    points: Sequence[Point]
    dots: bool = False  # draw each point, for series of few and distant points


def thinned(points: Sequence[Point], *, most: int) -> list[Point]:
    """Return at most `most` points, each the mean of a group of neighbours; the last group may be smaller."""
    group = math.ceil(len(points) / most)
    chunks = [points[start : start + group] for start in range(0, len(points), group or 1)]
    return [(fmean(x for x, _ in chunk), fmean(y for _, y in chunk)) for chunk in chunks]


def ticks(low: float, high: float, *, about: int) -> list[float]:
    """Return about `about` round numbers in ``low..high``, spaced 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    gap = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    return [round(i * gap, 12) for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def lines(
    given: Sequence[Series], *, label: str, text: Callable[[float], str] = "{:g}".format, from_zero: bool = False
) -> str:
    """Return a chart of the series over steps on one scale, with a legend; "" if no series has a point."""
    series = [Series(one.name, thinned(one.points, most=_MOST_POINTS), one.dots) for one in given if one.points]
    if not series:
        return ""
    xs, ys = zip(*(point for one in series for point in one.points), strict=True)
    (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (0.0 if from_zero else min(ys), max(ys))
    air = 0.05 * (y_high - y_low) or 0.5  # gives a flat curve a scale too
    y_low, y_high = 0.0 if from_zero else y_low - air, y_high + air

    def place(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        down = (y_high - y) / (y_high - y_low)
        return _LEFT + (_WIDTH - _LEFT - 3 * _MARGIN) * across, _MARGIN + (_HEIGHT - _MARGIN - _BOTTOM) * down

    parts = [_rule(place(x_low, tick)[1], text(tick)) for tick in ticks(y_low, y_high, about=5)]
    for tick in ticks(x_low, x_high, about=5):
        if tick == int(tick):  # label whole steps only
            x = place(tick, 0)[0]
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{format_count(tick)}</text>')
    for number, one in enumerate(series):
        placed = [(x, y, place(x, y)) for x, y in one.points]
        corners = " ".join(f"{x:.1f},{y:.1f}" for _, _, (x, y) in placed)
        parts.append(f'<polyline class="line" style="stroke: var(--c{number % COLOURS})" points="{corners}"/>')
        if one.dots or len(placed) == 1:  # a single point draws no line
            parts += [_dot(number, *at, f"step {x:.0f}: {text(y)}") for x, y, at in placed]
    key = _key((one.name, f"--c{number % COLOURS}") for number, one in enumerate(series))
    return key + _svg(parts, height=_HEIGHT, label=label)


def bars(rows: Mapping[str, Mapping[str, float]], *, label: str) -> str:
    """Return a chart of seconds by phase, one stacked bar per row, on one scale; "" if all are 0."""
    rows = {title: seconds for title, seconds in rows.items() if sum(seconds.values())}
    if not rows:
        return ""
    longest = max(sum(seconds.values()) for seconds in rows.values())
    names = list(dict.fromkeys(name for seconds in rows.values() for name, took in seconds.items() if took))
    colours = {name: f"--c{index % COLOURS}" for index, name in enumerate(names)}
    right, thick, high, parts = 112, 24, 58, []
    for row, (title, seconds) in enumerate(rows.items()):
        top, x = row * high + 24, 0.0
        parts.append(f'<text x="0" y="{top - 6}">{escape(title[-_LONGEST:])}</text>')
        for name in (name for name in names if seconds.get(name)):
            wide = (_WIDTH - right) * seconds[name] / longest
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{thick}" '
                f'style="fill: var({colours[name]})">'
                f"<title>{escape(name)}: {escape(format_seconds(seconds[name]))}</title></rect>"
            )
            x += wide
        total = format_seconds(sum(seconds.values()))
        parts.append(f'<text x="{x + 8:.1f}" y="{top + 18}">{escape(total)}</text>')
    return _key(colours.items()) + _svg(parts, height=len(rows) * high, label=label)


def _rule(y: float, text: str) -> str:
    line = f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}\n<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _dot(number: int, x: float, y: float, text: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: var(--c{number % COLOURS})"'
    return f"<circle {place}><title>{escape(text)}</title></circle>"


def _key(entries: Iterable[tuple[str, str]]) -> str:
    marks = (f'<span><i style="background: var({colour})"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="key">{"".join(marks)}</div>'


def _svg(parts: Sequence[str], *, height: int, label: str) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
