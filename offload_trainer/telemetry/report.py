"""report.html: a run on one page that needs no network and no scripts. Its frame: report.html beside this.

metrics.jsonl, evaluations.jsonl ── read_* ── records ─┐
the plan's tiers and seconds, and the measured ones ───┴─ write_report ── report.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any, TypeVar

from offload_trainer.storage.durable import write_text
from offload_trainer.telemetry.meters import PHASES
from offload_trainer.telemetry.record import EvalRecord, StepRecord
from offload_trainer.units import format_bytes, format_count, format_seconds

Point = tuple[float, float]
_Record = TypeVar("_Record")

_MOST_POINTS = 800  # about one a pixel: a run of a million steps still makes a page of kilobytes


def read_metrics(path: Path) -> list[StepRecord]:
    """The whole lines of a metrics.jsonl; a torn one is left out, and no file is no records."""
    return _read(path, StepRecord.from_json)


def read_evaluations(path: Path) -> list[EvalRecord]:
    """The same of an evaluations.jsonl."""
    return _read(path, EvalRecord.from_json)


def steady(rows: Sequence[StepRecord]) -> list[StepRecord]:
    """Without the first two steps (allocators and caches fill in them), where there are more than four."""
    return list(rows[2:] if len(rows) > 4 else rows)


def median_phases(rows: Sequence[StepRecord]) -> dict[str, float]:
    """Median seconds of each phase over the steady steps. A phase that a step lacks took 0 s in it."""
    counted = steady(rows)
    names = dict.fromkeys(name for row in counted for name in row.phases)
    return {name: median(row.phases.get(name, 0.0) for row in counted) for name in names}


def thinned(points: Sequence[Point], *, most: int) -> list[Point]:
    """At most `most` points: each the mean of as many neighbours as needed, the last perhaps of fewer."""
    group = math.ceil(len(points) / most)
    chunks = [points[start : start + group] for start in range(0, len(points), group or 1)]
    return [(fmean(x for x, _ in chunk), fmean(y for _, y in chunk)) for chunk in chunks]


def ticks(low: float, high: float, *, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within ``low..high``, about `about` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    gap = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    return [round(i * gap, 12) for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def write_report(
    path: Path,
    *,
    title: str,
    rows: list[StepRecord],
    evaluations: list[EvalRecord],
    plan: dict[str, Any],
    measured: dict[str, Any],
    notes: list[str],
) -> None:
    """Write the page, all at once: a reader never sees half of it.

    `plan`: ``{"tiers": {name: {"need": bytes, "have": bytes}}, "seconds": {phase: seconds or None}}``.
    `measured`: ``{"tiers": {name: bytes or None}, "seconds": {phase: median seconds}}``.
    `seconds` holds phases only, no total: the page adds them up.
    """
    page = Template((files(__package__) / "report.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        facts=_facts(rows, evaluations),
        loss=_loss_chart(rows, evaluations),
        phases=_phase_bars(plan["seconds"], measured["seconds"]),
        comparison=_comparison(plan, measured),
        evaluations=_evaluations(evaluations),
        notes=_notes(notes),
    )
    write_text(path, page)


def _read(path: Path, parse: Callable[[str], _Record]) -> list[_Record]:
    records = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            records.append(parse(line))
        except ValueError:  # torn by a kill
            continue
    return records


def _facts(rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord]) -> str:
    facts = {}
    if rows:
        last, counted = rows[-1], steady(rows)
        facts["steps"] = str(last.step)
        facts["tokens"] = format_count(last.tokens)
        facts["training loss"] = _number(last.loss)
        facts["a step (median)"] = format_seconds(median(row.seconds for row in counted))
        facts["tokens a second (median)"] = format_count(median(row.tokens_per_second for row in counted))
        utilisation = [row.mfu for row in counted if row.mfu is not None]
        if utilisation:
            facts["MFU (median)"] = f"{100 * median(utilisation):.1f} %"
        facts["host memory, peak"] = format_bytes(last.host_rss_bytes)
        if last.device_peak_bytes:
            facts["GPU memory, peak"] = format_bytes(last.device_peak_bytes)
        if any(row.hidden for row in counted):
            facts["update hidden behind the forward (median)"] = format_seconds(median(row.hidden for row in counted))
        skipped = sum(row.skipped for row in rows)
        if skipped:
            facts["steps skipped"] = str(skipped)
    if evaluations:
        facts["validation loss"] = _number(evaluations[-1].validation_loss)
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())


def _loss_chart(rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord]) -> str:
    """Training and validation loss over the steps, as inline SVG."""
    train = [(float(row.step), row.loss) for row in rows if row.loss is not None]
    validation = [(float(e.step), e.validation_loss) for e in evaluations if e.validation_loss is not None]
    if not train + validation:
        return "<p>No finished step has a loss.</p>"
    train = thinned(train, most=_MOST_POINTS)
    width, height, left, bottom, margin = 800, 300, 48, 28, 10
    xs, ys = zip(*train, *validation, strict=True)
    (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (min(ys), max(ys))
    air = 0.05 * (y_high - y_low) or 0.5  # so that a flat curve still has a scale
    y_low, y_high = y_low - air, y_high + air

    def x_at(step: float) -> float:
        return left + (width - left - margin) * ((step - x_low) / (x_high - x_low) if x_high > x_low else 0.5)

    def y_at(loss: float) -> float:
        return margin + (height - margin - bottom) * (y_high - loss) / (y_high - y_low)

    parts = []
    for tick in ticks(y_low, y_high, about=5):
        y = y_at(tick)
        parts.append(f'<line class="rule" x1="{left}" x2="{width - margin}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(x_low, x_high, about=6):
        if tick == int(tick):  # there is no half step
            text = format_count(tick)
            parts.append(f'<text x="{x_at(tick):.1f}" y="{height - 8}" text-anchor="middle">{text}</text>')
    for series, colour in ((train, "--c0"), (validation, "--c1")):
        line = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in series)
        parts.append(f'<polyline class="line" style="stroke: var({colour})" points="{line}"/>')
    # Few and far apart: each a point of its own. So is a training curve of one step, which has no line.
    for series, colour in ((train if len(train) == 1 else [], "--c0"), (validation, "--c1")):
        parts += [
            f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="4" style="fill: var({colour})">'
            f"<title>step {x:.0f}: {y:.4f}</title></circle>"
            for x, y in series
        ]
    key = _key([("training", "--c0"), ("validation", "--c1")] if validation else [("training", "--c0")])
    return f"{key}{_svg(parts, width=width, height=height, label='loss over steps')}"


def _phase_bars(predicted: Mapping[str, float | None], measured: Mapping[str, float]) -> str:
    """The seconds of a step end to end: predicted above, measured below, on one scale."""
    bars = {
        "predicted": {name: s for name, s in predicted.items() if s is not None},
        "measured": dict(measured),
    }
    longest = max(sum(seconds.values()) for seconds in bars.values())
    if longest == 0:
        return "<p>No step was timed.</p>"
    names = list(dict.fromkeys([*PHASES, *predicted, *measured]))
    colours = {name: f"--c{min(index, 4)}" for index, name in enumerate(names)}
    width, left, right, thick = 800, 96, 80, 26
    parts = []
    for row, (label, seconds) in enumerate(bars.items()):
        top, x = row * (thick + 10), float(left)
        middle = top + thick / 2 + 4
        parts.append(f'<text x="0" y="{middle}">{label}</text>')
        for name in (name for name in names if name in seconds):
            wide = (width - left - right) * seconds[name] / longest
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{thick}" '
                f'style="fill: var({colours[name]})">'
                f"<title>{escape(name)}: {escape(format_seconds(seconds[name]))}</title></rect>"
            )
            x += wide
        total = format_seconds(sum(seconds.values())) if seconds else "not known"
        parts.append(f'<text x="{x + 8:.1f}" y="{middle}">{escape(total)}</text>')
    label = "seconds of a step by phase"
    key = _key((name, colours[name]) for name in names if any(name in seconds for seconds in bars.values()))
    return f"{key}{_svg(parts, width=width, height=2 * thick + 10, label=label)}"


def _comparison(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    lines = []
    for tier in dict.fromkeys([*plan["tiers"], *measured["tiers"]]):
        planned = plan["tiers"].get(tier, {})
        lines.append(
            _compared(tier, planned.get("need"), measured["tiers"].get(tier), planned.get("have"), format_bytes)
        )
    guessed, taken = plan["seconds"], measured["seconds"]
    phases = list(dict.fromkeys([*guessed, *taken]))
    lines += [_compared(phase, guessed.get(phase), taken.get(phase), None, format_seconds) for phase in phases]
    if phases and all(guessed.get(phase) is not None and phase in taken for phase in phases):  # else no fair ratio
        total = sum(guessed.values()), sum(taken.values())
        lines.append(_compared("all phases", *total, None, format_seconds))
    told = [line for line in lines if any(cell != "-" for cell in line[2:])]
    return _table(("", "there is", "predicted", "measured", "measured / predicted"), told)


def _compared(
    name: str,
    predicted: float | None,
    measured: float | None,
    available: float | None,
    text: Callable[[float], str],
) -> tuple[str, ...]:
    shown = [text(number) if number else "-" for number in (available, predicted, measured)]  # of 0 there is nothing
    return name, *shown, f"{measured / predicted:.2f}" if measured is not None and predicted else "-"


def _evaluations(evaluations: Sequence[EvalRecord]) -> str:
    if not evaluations:
        return ""
    lines = [
        (str(e.step), _number(e.validation_loss), _number(e.perplexity), _number(e.bits_per_byte))
        for e in evaluations[-20:]
    ]
    heading = "Validation" if len(evaluations) <= 20 else "Validation, the last 20"
    return f"<h2>{heading}</h2>" + _table(("after step", "loss", "perplexity", "bits a byte"), lines)


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if notes else ""


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>\n" for line in lines)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _key(entries: Iterable[tuple[str, str]]) -> str:
    marks = (f'<span><i style="background: var({colour})"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="key">{"".join(marks)}</div>'


def _svg(parts: Sequence[str], *, width: int, height: int, label: str) -> str:
    body = "\n".join(parts)
    return (
        f'<div class="wide"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n{body}\n</svg></div>'
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
