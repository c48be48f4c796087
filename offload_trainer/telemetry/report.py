"""HTML reports of one run, or of several runs side by side, on a single page without network access or scripts.

    StepRecord, EvalRecord ─────────────────────────┐
    the plan's tiers and seconds, and the measured ─┼─ report_page, write_comparison ── report.html (the template)
    what other plans would gain ────────────────────┘  lines, bars: inline SVG in the page's colours

The units of charts are chosen for a page 400 to 800 pixels wide: the widest label fits next to the chart in both cases,
in the page style's font sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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

_TIERS = {"ram": "RAM", "gpu": "GPU", "drives": "drives"}  # keys of StepRecord.memory and their labels
_PEAKS: dict[str, Callable[[StepRecord], int]] = {
    "ram": lambda row: row.host_rss_bytes,
    "gpu": lambda row: row.device_peak_bytes,
}
_HEAD = 4096  # bytes in which a page's generator tag is searched
_MOST_POINTS = 800  # about one per pixel: even a run of a million steps makes a page of some kilobytes
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 640, 280, 92, 34, 14
_LONGEST = 48  # maximum length of a bar's name; the end is kept, since it says most
_BESIDE, _LONGEST_BESIDE, _GAP = 170, 12, 22  # room for the names beside lines, their length, and a name's height
_COLOURS = 8  # number of colours in the page's style
_DASHES = ("none", "7 4", "2 3")  # of the first eight lines, the next eight, ...
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
    plan: dict[str, Any],
    measured: dict[str, Any],
    advice: Sequence[tuple[str, Sequence[str]]],
    progress: tuple[int, float | None],
) -> str:
    """Return the report of one run.

    `progress`: the steps of the whole run, and the seconds to its end while it goes on; its page reloads itself then.
    `plan`: ``{"tiers": {name: {"need": bytes, "have": bytes}}, "seconds": {phase: seconds or None}}``. `measured`:
    ``{"tiers": {name: bytes or None}, "seconds": {phase: median seconds}}``. `seconds` contains phases only; the page
    computes the total. `advice`: headings with lines of text.
    """
    predicted = {name: seconds for name, seconds in plan["seconds"].items() if seconds is not None}
    train = [(float(row.step), row.loss) for row in rows if row.loss is not None]
    validation = [(float(e.step), e.validation_loss) for e in evaluations if e.validation_loss is not None]
    losses = [Series("training", train), Series("validation", validation, dots=True)]
    loss = lines(losses, label="loss over steps")
    phases = bars({"predicted": predicted, "measured": measured["seconds"]}, label="seconds of a step by phase")
    sections = [
        ("Loss", loss or "<p>No finished step has a loss.</p>"),
        ("Where a step's time goes", phases or "<p>No step was timed.</p>"),
        ("Predicted and measured", _comparison(plan, measured)),
        *(
            (heading, "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in points) + "</ul>" if points else "")
            for heading, points in advice
        ),
        ("Memory", _memory(rows)),
        ("Validation" if len(evaluations) <= 20 else "Validation, the last 20", _evaluations(evaluations)),
    ]
    return _page(
        title=title, facts=_facts(rows, evaluations, progress), sections=sections, live=progress[1] is not None
    )


def write_comparison(
    path: Path, *, title: str, losses: Sequence[Series], phases: Mapping[str, Mapping[str, float]], table: Rows
) -> None:
    """Write a page that compares runs: their losses in one chart, their steps as bars, and a table of the rest."""
    sections = [
        ("Loss", lines(losses, label="loss over steps", beside=True)),
        ("Where a step's time goes", bars(phases, label="seconds of a step by phase")),
        ("Side by side", f'<div class="names">{_table(table[0], table[1:])}</div>'),
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
        facts["time per step (median)"] = format_seconds(median(row.seconds for row in counted))
        facts["tokens/s (of that step)"] = format_count(median_speed(counted))
        utilisation = [row.mfu for row in counted if row.mfu is not None]
        if utilisation:
            facts["MFU (median)"] = f"{100 * median(utilisation):.1f} %"
        facts["host memory, peak"] = format_bytes(last.host_rss_bytes)
        if last.device_peak_bytes:
            facts["GPU memory, peak"] = format_bytes(last.device_peak_bytes)
        if any(row.hidden for row in counted):
            facts["update overlapped with computation (median)"] = format_seconds(median(row.hidden for row in counted))
        skipped = sum(row.skipped for row in rows)
        if skipped and progress[1] is None:  # while a run goes on, `rows` are only some of its steps
            facts["skipped steps"] = str(skipped)
    if evaluations:
        facts["validation loss"] = _number(evaluations[-1].validation_loss)
    return {name: text for name, text in facts.items() if text != "-"}


def _memory(rows: Sequence[StepRecord]) -> str:
    """Return a chart per tier in use: bytes at the end of each step, and the peak so far where it is recorded."""
    charts = []
    for tier, name in _TIERS.items():
        ends = [(float(row.step), float(row.memory[tier])) for row in rows if row.memory.get(tier)]
        if not ends:
            continue
        series = [Series(f"{name} at the end of a step", ends)]
        if peak := _PEAKS.get(tier):
            series.append(Series(f"{name}, peak so far", [(float(row.step), float(peak(row))) for row in rows]))
        charts.append(lines(series, label=f"{name} over steps", text=format_bytes, from_zero=True))
    return "\n".join(charts)


def _comparison(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    table: list[tuple[str, ...]] = []

    def compare(
        name: str, predicted: float | None, measured: float | None, text: Callable[[float], str], available: Any = None
    ) -> None:
        """Add a row, with a dash for None and for 0, unless nothing was predicted or measured."""
        shown = [text(number) if number else "-" for number in (available, predicted, measured)]
        ratio = f"{measured / predicted:.2f}" if measured is not None and predicted else "-"
        if any(cell != "-" for cell in (*shown[1:], ratio)):
            table.append((name, *shown, ratio))

    for tier in dict.fromkeys([*plan["tiers"], *measured["tiers"]]):
        planned = plan["tiers"].get(tier, {})
        compare(tier, planned.get("need"), measured["tiers"].get(tier), format_bytes, planned.get("have"))
    guessed, taken = plan["seconds"], measured["seconds"]
    phases = list(dict.fromkeys([*guessed, *taken]))
    for phase in phases:
        compare(phase, guessed.get(phase), taken.get(phase), format_seconds)
    # only if complete, otherwise the ratio would mislead
    if phases and all(guessed.get(phase) is not None and phase in taken for phase in phases):
        compare("all phases", sum(guessed.values()), sum(taken.values()), format_seconds)
    return _table(("", "available", "predicted", "measured", "measured / predicted"), table) if table else ""


def _evaluations(evaluations: Sequence[EvalRecord]) -> str:
    if not evaluations:
        return ""
    head = ("after step", "loss", "perplexity", "bits a byte")
    cells = [
        (str(e.step), _number(e.validation_loss), _number(e.perplexity), _number(e.bits_per_byte))
        for e in evaluations[-20:]
    ]
    columns = [column for column in zip(head, *cells, strict=True) if any(cell != "-" for cell in column[1:])]
    table = list(zip(*columns, strict=True))
    return _table(table[0], table[1:])


def _table(head: Sequence[str], rows: Rows) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>\n" for line in rows)
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
    given: Sequence[Series],
    *,
    label: str,
    text: Callable[[float], str] = "{:g}".format,
    from_zero: bool = False,
    beside: bool = False,
) -> str:
    """Return a chart of the series over steps on one scale, with a legend; "" if no series has a point.

    `beside`: write the name of each series at the end of its line too.
    """
    series = [Series(one.name, thinned(one.points, most=_MOST_POINTS), one.dots) for one in given if one.points]
    if not series:
        return ""
    xs, ys = zip(*(point for one in series for point in one.points), strict=True)
    (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (0.0 if from_zero else min(ys), max(ys))
    air = 0.05 * (y_high - y_low) or 0.5  # gives a flat curve a scale too
    y_low, y_high = 0.0 if from_zero else y_low - air, y_high + air

    right = _WIDTH - (_BESIDE if beside else 3 * _MARGIN)
    height = max(_HEIGHT, _MARGIN + _GAP * len(series) + _BOTTOM) if beside else _HEIGHT

    def place(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        down = (y_high - y) / (y_high - y_low)
        return _LEFT + (right - _LEFT) * across, _MARGIN + (height - _MARGIN - _BOTTOM) * down

    parts = []
    for tick in ticks(y_low, y_high, about=5):
        y = place(x_low, tick)[1]
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text(tick)}</text>')
    for tick in ticks(x_low, x_high, about=5):
        if tick == int(tick):  # label whole steps only
            x = place(tick, 0)[0]
            parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{format_count(tick)}</text>')
    ends = [place(*one.points[-1]) for one in series]
    middles = spread([y for _, y in ends], gap=_GAP, low=_MARGIN, high=height - _BOTTOM)
    for number, one in enumerate(series):
        colour, placed = f"var(--c{number % _COLOURS})", [place(*point) for point in one.points]
        dashes = _DASHES[number // _COLOURS % len(_DASHES)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        line = f'<polyline class="line" style="stroke: {colour}; stroke-dasharray: {dashes}" points="{corners}">'
        parts.append(f"{line}<title>{escape(one.name)}</title></polyline>")
        if beside:
            name = one.name if len(one.name) <= _LONGEST_BESIDE else f"…{one.name[1 - _LONGEST_BESIDE :]}"
            (x, y), middle = ends[number], middles[number]
            to = f'x1="{x:.1f}" y1="{y:.1f}" x2="{right + 12}" y2="{middle:.1f}"'
            parts.append(f'<line class="rule" {to} style="stroke: {colour}; stroke-dasharray: 1 3"/>')
            at = f'x="{right + 16}" y="{middle + 5:.1f}" style="fill: {colour}"'
            parts.append(f"<text {at}>{escape(name)}</text>")
        if one.dots or len(placed) == 1:  # a single point draws no line
            for (step, value), (x, y) in zip(one.points, placed, strict=True):
                title = escape(f"step {step:.0f}: {text(value)}")
                at = f'cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: {colour}"'
                parts.append(f"<circle {at}><title>{title}</title></circle>")
    key = _key((one.name, f"--c{number % _COLOURS}") for number, one in enumerate(series))
    return key + _svg(parts, height=height, label=label)


def bars(rows: Mapping[str, Mapping[str, float]], *, label: str) -> str:
    """Return a chart of seconds by phase, one stacked bar per row, on one scale; "" if all are 0."""
    rows = {title: seconds for title, seconds in rows.items() if sum(seconds.values())}
    if not rows:
        return ""
    longest = max(sum(seconds.values()) for seconds in rows.values())
    names = list(dict.fromkeys(name for seconds in rows.values() for name, took in seconds.items() if took))
    colours = {name: f"--c{index % _COLOURS}" for index, name in enumerate(names)}
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


def _key(entries: Iterable[tuple[str, str]]) -> str:
    marks = (f'<span><i style="background: var({colour})"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="key">{"".join(marks)}</div>'


def _svg(parts: Sequence[str], *, height: int, label: str) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
