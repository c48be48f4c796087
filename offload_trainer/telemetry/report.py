"""HTML reports of one run, or of several runs side by side, on a single page without network access or scripts.

Charts are inline SVG. Their units suit a page 400 to 800 pixels wide: the widest number fits.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, NamedTuple

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import file_bytes
from offload_trainer.common.units import format_bytes, format_count, format_seconds
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord, median_phases, median_speed, steady

Point = tuple[float, float]
Rows = Sequence[Sequence[str]]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 640, 280, 92, 34, 14
RELOAD = '<meta http-equiv="refresh" content="10">'  # reloads the page while the run is running


class Series(NamedTuple):
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

    `progress`: the whole run's steps, and while it is running the seconds left. `predicted`: rows of `predicted_row`.
    """
    train = [(float(row.step), row.loss) for row in rows if row.loss is not None]
    validation = [(float(e.step), e.validation_loss) for e in evaluations if e.validation_loss is not None]
    losses = lines([Series("training", train), Series("validation", validation, dots=True)], label="loss over steps")
    head = ("", "available", "predicted", "measured", "measured / predicted")
    points = "".join(f"<li>{escape(note)}</li>" for note in notes)
    found, (total, left) = results(rows, evaluations), progress
    facts = {label: in_words(label, value) for label, value in found.items() if value is not None}
    if rows:
        facts["steps"] += f" of {total}"
    if rows and left is not None:
        facts["time left"] = format_seconds(left)
    if written := found.get("written to drives, a step"):
        facts["steps that wear 1 TB of a drive's endurance (TBW)"] = format_count(1e12 / written)
    sections = {
        "Loss": losses or "<p>No finished step has a loss.</p>",
        "Predicted and measured": _table([head, *predicted]) if predicted else "",
        "Notes": f"<ul>{points}</ul>" if notes else "",
        "Memory": _memory(rows),
    }
    return _page(title, facts, sections, live=left is not None)


def predicted_row(
    name: str, predicted: float | None, measured: float | None, text: Callable[[float], str], available: Any = None
) -> list[tuple[str, ...]]:
    """Return a row of predicted and measured numbers, with a dash for None and 0; none if it would have dashes only."""
    shown = [text(number) if number else "-" for number in (available, predicted, measured)]
    ratio = f"{measured / predicted:.2f}" if measured is not None and predicted else "-"
    return [(name, *shown, ratio)] if {*shown[1:], ratio} != {"-"} else []


def comparison_page(losses: Sequence[Series], table: Rows) -> str:
    chart, beside = lines(losses, label="loss over steps"), f'<div class="names">{_table(table)}</div>'
    return _page("Runs side by side", {}, {"Loss": chart, "Side by side": beside})


def refuse_foreign(path: Path) -> None:
    """Raise UserError if `path` exists and is not a page written by this program."""
    try:
        if b'<meta name="generator" content="offload-trainer">' in file_bytes(path)[:4096]:
            return
    except FileNotFoundError:
        return
    except ValueError:
        pass
    raise UserError(f"{path}: already exists, but is not a report of this program; name another file")


def _page(title: str, facts: Mapping[str, str], sections: Mapping[str, str], *, live: bool = False) -> str:
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    head = f"<dl>{entries}</dl>" if entries else ""
    if live:
        head += f"\n<p>The run goes on. Written at {time.strftime('%Y-%m-%d %H:%M:%S')}; reloads itself.</p>"
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections.items() if content)
    frame = Template((files(__package__) / "report.html").read_text(encoding="utf-8"))
    return frame.substitute(reload=RELOAD if live else "", title=escape(title), facts=head, body=body)


def results(rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord]) -> dict[str, Any]:
    """Return the results of a run by label, None if unknown or not used. Times and traffic are medians."""
    if not rows:
        return {}
    last, counted, evaluation = rows[-1], steady(rows), evaluations[-1] if evaluations else None
    written = median(row.nvme_written_bytes or 0 for row in rows)
    utilisation = [row.mfu for row in counted if row.mfu is not None]
    return {
        "steps": last.step,
        "tokens": last.tokens,
        "training loss": last.loss,
        "validation loss": evaluation.validation_loss if evaluation else None,
        "a step": median(row.seconds for row in counted),
        **{f"a step, {name}": took or None for name, took in median_phases(rows).items()},
        "a step, update hidden": median(row.hidden for row in counted) or None,
        "tokens a second": median_speed(counted),
        "MFU": median(utilisation) if utilisation else None,
        "host memory, peak": max(row.host_rss_bytes for row in rows),
        "GPU memory, peak": max(row.device_peak_bytes for row in rows) or None,
        "on drives": max(row.memory.get("drives", 0) for row in rows) or None,
        "written to drives, a step": written if written >= 10**6 else None,  # less is logs only, no page files
    }


_FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("tokens a step", "tokens", "tokens a second"), format_count),
    **dict.fromkeys(("training loss", "validation loss"), "{:.4f}".format),
    **dict.fromkeys(("host memory, peak", "GPU memory, peak", "on drives", "written to drives, a step"), format_bytes),
    "MFU": "{:.1%}".format,
}


def in_words(label: str, value: Any) -> str:
    """Format a fact of a run, with a dash for None."""
    if value is None:
        return "-"
    if label in _FORMATS or label.startswith("a step"):
        return _FORMATS.get(label, format_seconds)(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _memory(rows: Sequence[StepRecord]) -> str:
    charts = []
    for tier, peak in (("ram", "host_rss_bytes"), ("gpu", "device_peak_bytes"), ("drives", "")):
        name = tier if tier == "drives" else tier.upper()
        if ends := [(float(row.step), float(row.memory[tier])) for row in rows if row.memory.get(tier)]:
            series = [Series(f"{name} now", ends)]
            if peak:
                series.append(Series(f"{name} peak", [(float(row.step), float(getattr(row, peak))) for row in rows]))
            charts.append(lines(series, label=f"{name} over steps", text=format_bytes, from_zero=True))
    return "\n".join(charts)


def _table(rows: Rows) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def colour(number: int) -> str:
    """Return the colour of a chart's line, to be read on light and dark pages; the golden angle keeps hues apart."""
    return f"oklch(0.62 0.14 {250 + 137.5 * number:g}deg)"


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in ``low..high``, spaced 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    gap = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    return [round(i * gap, 12) for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def lines(
    series: Sequence[Series], *, label: str, text: Callable[[float], str] = "{:g}".format, from_zero: bool = False
) -> str:
    """Return a chart of the series over steps on one scale, with their names below it; "" if none has a point."""
    if not (series := [one for one in series if one.points]):
        return ""
    series = [one._replace(points=one.points[:: 1 + len(one.points) // 800]) for one in series]  # about one a pixel
    xs, ys = zip(*(point for one in series for point in one.points), strict=True)
    (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (0.0 if from_zero else min(ys), max(ys))
    air = 0.05 * (y_high - y_low) or 0.5  # gives a flat curve a scale too
    y_low, y_high = 0.0 if from_zero else y_low - air, y_high + air
    right = _WIDTH - _LEFT // 2

    def place(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        down = (y_high - y) / (y_high - y_low)
        return _LEFT + (right - _LEFT) * across, _MARGIN + (_HEIGHT - _MARGIN - _BOTTOM) * down

    parts, names = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'], []
    for tick in _ticks(y_low, y_high):
        y = place(x_low, tick)[1]
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text(tick)}</text>')
    for tick in _ticks(x_low, x_high):
        if tick == int(tick):  # label whole steps only
            x = place(tick, 0)[0]
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{format_count(tick)}</text>')
    for number, (name, points, dots) in enumerate(series):
        corners = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        line = f'<polyline class="line" style="stroke: {colour(number)}" points="{corners}">'
        parts.append(f"{line}<title>{escape(name)}</title></polyline>")
        names.append(f'<span style="color: {colour(number)}">{escape(name)}</span>')
        for step, value in points if dots or len(points) == 1 else ():  # a single point draws no line
            x, y = place(step, value)
            title = escape(f"step {step:.0f}: {text(value)}")
            circle = f'cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: {colour(number)}"'
            parts.append(f"<circle {circle}><title>{title}</title></circle>")
    return "\n".join([*parts, "</svg>", f'<p class="key">{" ".join(names)}</p>'])
