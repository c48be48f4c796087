"""HTML reports of one run, or of several runs side by side, on a single page without network access or scripts.

    StepRecord, EvalRecord ─┐
    what was predicted ─────┴─ report_page, write_comparison ── report.html (the template)

Charts are inline SVG in the page's colours. Their units are chosen for a page 400 to 800 pixels wide: the widest label
fits next to the chart in both cases, in the page style's font sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import is_there, open_file
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord, median_speed, steady
from offload_trainer.units import format_bytes, format_count, format_seconds

Point = tuple[float, float]
Rows = Sequence[Sequence[str]]

_PEAKS: dict[str, Callable[[StepRecord], int] | None] = {  # tiers in StepRecord.memory; drives have no peak
    "ram": lambda row: row.host_rss_bytes,
    "gpu": lambda row: row.device_peak_bytes,
    "drives": None,
}
_LOGS = 10**6  # bytes a step; a run that writes less writes logs only, no page files
_HEAD = 4096  # bytes in which a page's generator tag is searched
_MOST_POINTS = 800  # about one per pixel: even a run of a million steps makes a page of some kilobytes
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 640, 280, 92, 34, 14
_BESIDE, _LONGEST_BESIDE, _GAP = 170, 12, 22  # room for the names beside lines, their length, and a name's height
_COLOURS = 8  # number of colours in the page's style
_DASHES = ("none", "7 4", "2 3")  # of the first eight lines, the next eight, ...
_HEAD_OF_PREDICTED = ("", "available", "predicted", "measured", "measured / predicted")
RELOAD = '<meta http-equiv="refresh" content="10">'  # in the page of a run that goes on


# -- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A line of (step, value) points."""

    name: str
    points: Sequence[Point]
    dots: bool = False  # draw each point, for series of few and distant points


def report_page(
    *,
    title: str,
    rows: Sequence[StepRecord],
    evaluations: Sequence[EvalRecord],
    progress: tuple[int, float | None],
    predicted: Rows,
    notes: Sequence[str] = (),
) -> str:
    """Return the report of one run.

    `progress`: the steps of the whole run, and the seconds to its end while it goes on; its page reloads itself then.
    `predicted`: rows that `predicted_row` has made.
    """
    train = [(float(row.step), row.loss) for row in rows if row.loss is not None]
    validation = [(float(e.step), e.validation_loss) for e in evaluations if e.validation_loss is not None]
    losses = [Series("training", train), Series("validation", validation, dots=True)]
    points = "".join(f"<li>{escape(note)}</li>" for note in notes)
    sections = [
        ("Loss", lines(losses, label="loss over steps") or "<p>No finished step has a loss.</p>"),
        ("Predicted and measured", _table([_HEAD_OF_PREDICTED, *predicted] if predicted else ())),
        ("Notes", f"<ul>{points}</ul>" if notes else ""),
        ("Memory", _memory(rows)),
    ]
    facts = _facts(rows, evaluations, progress)
    return _page(title=title, facts=facts, sections=sections, live=progress[1] is not None)


def predicted_row(
    name: str, predicted: float | None, measured: float | None, text: Callable[[float], str], available: Any = None
) -> list[tuple[str, ...]]:
    """Return a row of predicted and measured numbers, with a dash for None and 0; none if it would have dashes only."""
    shown = [text(number) if number else "-" for number in (available, predicted, measured)]
    ratio = f"{measured / predicted:.2f}" if measured is not None and predicted else "-"
    return [(name, *shown, ratio)] if {*shown[1:], ratio} != {"-"} else []


def write_comparison(path: Path, *, title: str, losses: Sequence[Series], table: Rows) -> None:
    """Write a page that compares runs: their losses in one chart, and a table of the rest."""
    sections = [
        ("Loss", lines(losses, label="loss over steps")),
        ("Side by side", f'<div class="names">{_table(table)}</div>'),
    ]
    write_text(path, _page(title=title, facts={}, sections=sections))


def refuse_foreign(path: Path) -> None:
    """Raise UserError if `path` exists and is not a page written by this program."""
    if not is_there(path):
        return
    try:
        with open(open_file(path), "rb") as file:
            ours = b'<meta name="generator" content="offload-trainer">' in file.read(_HEAD)
    except ValueError:
        ours = False
    if not ours:
        raise UserError(f"{path}: already exists, but is not a report of this program; name another file")


def _page(*, title: str, facts: Mapping[str, str], sections: Sequence[tuple[str, str]], live: bool = False) -> str:
    """Return the page from the template. Sections without content are left out."""
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections if content)
    frame = Template((files(__package__) / "report.html").read_text(encoding="utf-8"))
    facts_list = f"<dl>{entries}</dl>" if entries else ""
    if live:
        facts_list += f"\n<p>The run goes on. Written at {time.strftime('%Y-%m-%d %H:%M:%S')}; reloads itself.</p>"
    return frame.substitute(reload=RELOAD if live else "", title=escape(title), facts=facts_list, body=body)


# -- parts of a page --------------------------------------------------------------------------------------------------


def _facts(
    rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord], progress: tuple[int, float | None]
) -> dict[str, str]:
    facts = {}
    if rows:
        last, counted = rows[-1], steady(rows)
        facts["steps"] = f"{last.step} of {progress[0]}"
        facts["time left"] = "-" if progress[1] is None else format_seconds(progress[1])
        facts["tokens"] = format_count(last.tokens)
        facts["training loss"] = _number(last.loss)
        facts["validation loss"] = _number(evaluations[-1].validation_loss if evaluations else None)
        facts["time per step (median)"] = format_seconds(median(row.seconds for row in counted))
        facts["tokens/s (of that step)"] = format_count(median_speed(counted))
        if utilisation := [row.mfu for row in counted if row.mfu is not None]:
            facts["MFU (median)"] = f"{100 * median(utilisation):.1f} %"
        facts["host memory, peak"] = format_bytes(last.host_rss_bytes)
        if last.device_peak_bytes:
            facts["GPU memory, peak"] = format_bytes(last.device_peak_bytes)
        if (written := median(row.nvme_written_bytes or 0 for row in rows)) >= _LOGS:
            facts["written to drives, a step (median)"] = format_bytes(written)
            facts["steps that wear 1 TB of a drive's endurance (TBW)"] = format_count(1e12 / written)
        if any(row.hidden for row in counted):
            facts["update overlapped with computation (median)"] = format_seconds(median(row.hidden for row in counted))
    return {name: text for name, text in facts.items() if text != "-"}


def _memory(rows: Sequence[StepRecord]) -> str:
    """Return a chart per tier in use: bytes at the end of each step, and the peak so far where it is recorded."""
    charts = []
    for tier, peak in _PEAKS.items():
        name = tier if tier == "drives" else tier.upper()
        ends = [(float(row.step), float(row.memory[tier])) for row in rows if row.memory.get(tier)]
        if ends:
            series = [Series(f"{name} now", ends)]
            series += [Series(f"{name} peak", [(float(row.step), float(peak(row))) for row in rows])] if peak else []
            charts.append(lines(series, label=f"{name} over steps", text=format_bytes, from_zero=True))
    return "\n".join(charts)


def _table(rows: Rows) -> str:
    """Return a table whose first row is its head; "" without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# -- charts -----------------------------------------------------------------------------------------------------------


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


def spread(heights: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move heights as little as needed to be at least `gap` apart and within ``low..high``, in the same order."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved = list(heights)
    for number in order:
        moved[number] = low = max(moved[number], low)
        low += gap
    for number in reversed(order):
        moved[number] = high = min(moved[number], high)
        high -= gap
    return moved


def lines(
    given: Sequence[Series], *, label: str, text: Callable[[float], str] = "{:g}".format, from_zero: bool = False
) -> str:
    """Return a chart of the series over steps on one scale, with their names beside them; "" if none has a point."""
    series = [Series(one.name, thinned(one.points, most=_MOST_POINTS), one.dots) for one in given if one.points]
    if not series:
        return ""
    xs, ys = zip(*(point for one in series for point in one.points), strict=True)
    (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (0.0 if from_zero else min(ys), max(ys))
    air = 0.05 * (y_high - y_low) or 0.5  # gives a flat curve a scale too
    y_low, y_high = 0.0 if from_zero else y_low - air, y_high + air
    right, height = _WIDTH - _BESIDE, max(_HEIGHT, _MARGIN + _GAP * len(series) + _BOTTOM)

    def place(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        down = (y_high - y) / (y_high - y_low)
        return _LEFT + (right - _LEFT) * across, _MARGIN + (height - _MARGIN - _BOTTOM) * down

    parts = []
    for tick in ticks(y_low, y_high, about=5):
        y = place(x_low, tick)[1]
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text(tick)}</text>')
    for tick in ticks(x_low, x_high, about=5):
        if tick == int(tick):  # label whole steps only
            x = place(tick, 0)[0]
            parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{format_count(tick)}</text>')
    ends = [place(*one.points[-1]) for one in series]
    middles = spread([y for _, y in ends], gap=_GAP, low=_MARGIN, high=height - _BOTTOM)
    for number, (one, (x, y), middle) in enumerate(zip(series, ends, middles, strict=True)):
        colour, dashes = f"var(--c{number % _COLOURS})", _DASHES[number // _COLOURS % len(_DASHES)]
        placed = [place(*point) for point in one.points]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        style = f"stroke: {colour}; stroke-dasharray: {dashes}"
        parts.append(f'<polyline class="line" style="{style}" points="{corners}"><title>{escape(one.name)}</title>')
        parts.append("</polyline>")
        to = f'x1="{x:.1f}" y1="{y:.1f}" x2="{right + 12}" y2="{middle:.1f}"'
        parts.append(f'<line class="rule" {to} style="stroke: {colour}; stroke-dasharray: 1 3"/>')
        name = one.name if len(one.name) <= _LONGEST_BESIDE else f"…{one.name[1 - _LONGEST_BESIDE :]}"
        at = f'x="{right + 16}" y="{middle + 5:.1f}" style="fill: {colour}"'
        parts.append(f"<text {at}>{escape(name)}</text>")
        if one.dots or len(placed) == 1:  # a single point draws no line
            for (step, value), (x, y) in zip(one.points, placed, strict=True):
                title = escape(f"step {step:.0f}: {text(value)}")
                circle = f'cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: {colour}"'
                parts.append(f"<circle {circle}><title>{title}</title></circle>")
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
