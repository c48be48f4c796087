"""HTML reports of one run, or of several runs side by side, on a single page without network access or scripts.

metrics.jsonl, evaluations.jsonl ── read_* ── records ─┐ the plan's tiers and seconds, and the measured ones ───┼─
write_report, write_comparison ── a page what other plans would gain ───────────────────────────┘  (template:
report.html in this directory)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, TypeVar

from offload_trainer.errors import UserError
from offload_trainer.safe_files import is_there, open_file
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.telemetry.charts import Series, bars, lines
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord
from offload_trainer.units import format_bytes, format_count, format_seconds

_Record = TypeVar("_Record")

_TIERS = {"ram": "RAM", "gpu": "GPU", "drives": "drives"}  # keys of StepRecord.memory and their labels
_HEAD = 4096  # bytes in which a page's generator tag is searched


def read_metrics(path: Path) -> list[StepRecord]:
    """Return the records of a metrics.jsonl without torn lines, or no records if the file does not exist."""
    return _read(path, StepRecord.from_json)


def read_evaluations(path: Path) -> list[EvalRecord]:
    """Return the records of an evaluations.jsonl in the same way."""
    return _read(path, EvalRecord.from_json)


def steady(rows: Sequence[StepRecord]) -> list[StepRecord]:
    """Leave out the first two of more than four steps, during which allocators and caches fill."""
    return list(rows[2:] if len(rows) > 4 else rows)


def median_speed(rows: Sequence[StepRecord]) -> float:
    """Return tokens per second of a step of median duration, so that it agrees with the median of seconds."""
    return median(row.tokens_per_second * row.seconds for row in rows) / median(row.seconds for row in rows)


def median_phases(rows: Sequence[StepRecord]) -> dict[str, float]:
    """Return the median seconds of each phase over the steady steps. A phase missing from a step took 0 s in it."""
    counted = steady(rows)
    names = dict.fromkeys(name for row in counted for name in row.phases)
    return {name: median(row.phases.get(name, 0.0) for row in counted) for name in names}


def write_report(
    path: Path,
    *,
    title: str,
    rows: list[StepRecord],
    evaluations: list[EvalRecord],
    plan: dict[str, Any],
    measured: dict[str, Any],
    said: Sequence[tuple[str, Sequence[str]]],
) -> None:
    """Write the report of one run, atomically, so that a reader never sees half of it.

    `plan`: ``{"tiers": {name: {"need": bytes, "have": bytes}}, "seconds": {phase: seconds or None}}``. `measured`:
    ``{"tiers": {name: bytes or None}, "seconds": {phase: median seconds}}``. `seconds` contains phases only; the page
    computes the total. `said`: headings with lines of text.
    """
    predicted = {name: seconds for name, seconds in plan["seconds"].items() if seconds is not None}
    loss = lines(_losses(rows, evaluations), label="loss over steps")
    phases = bars({"predicted": predicted, "measured": measured["seconds"]}, label="seconds of a step by phase")
    sections = [
        ("Loss", loss or "<p>No finished step has a loss.</p>"),
        ("Where a step's time goes", phases or "<p>No step was timed.</p>"),
        ("Predicted and measured", _comparison(plan, measured)),
        *((heading, _list(told)) for heading, told in said),
        ("Memory", _memory(rows)),
        ("Validation" if len(evaluations) <= 20 else "Validation, the last 20", _evaluations(evaluations)),
    ]
    _write(path, title=title, facts=_facts(rows, evaluations), sections=sections)


def write_comparison(
    path: Path, *, title: str, losses: Sequence[Series], phases: Mapping[str, Mapping[str, float]], table: Rows
) -> None:
    """Write a page that compares runs: their losses in one chart, their steps as bars, and a table of the rest."""
    sections = [
        ("Loss", lines(losses, label="loss over steps")),
        ("Where a step's time goes", bars(phases, label="seconds of a step by phase")),
        ("Side by side", f'<div class="names">{_table(table[0], table[1:])}</div>'),
    ]
    _write(path, title=title, facts={}, sections=sections)


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


Rows = Sequence[Sequence[str]]


def _write(path: Path, *, title: str, facts: Mapping[str, str], sections: Sequence[tuple[str, str]]) -> None:
    """Write the page from the template. Sections without content are left out."""
    told = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections if content)
    frame = Template((files(__package__) / "report.html").read_text(encoding="utf-8"))
    write_text(path, frame.substitute(title=escape(title), facts=f"<dl>{told}</dl>" if told else "", body=body))


def _read(path: Path, parse: Callable[[str], _Record]) -> list[_Record]:
    records = []
    try:
        with open(open_file(path, links=True), "rb") as file:
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for line in text.splitlines():
        try:
            records.append(parse(line))
        except ValueError:  # torn by a kill
            continue
    return records


def _facts(rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord]) -> dict[str, str]:
    facts = {}
    if rows:
        last, counted = rows[-1], steady(rows)
        facts["steps"] = str(last.step)
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
        if skipped:
            facts["skipped steps"] = str(skipped)
    if evaluations:
        facts["validation loss"] = _number(evaluations[-1].validation_loss)
    return {name: text for name, text in facts.items() if text != "-"}


def _losses(rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord]) -> list[Series]:
    train = [(float(row.step), row.loss) for row in rows if row.loss is not None]
    validation = [(float(e.step), e.validation_loss) for e in evaluations if e.validation_loss is not None]
    return [Series("training", train), Series("validation", validation, dots=True)]


def _memory(rows: Sequence[StepRecord]) -> str:
    """Return a chart per tier in use: bytes at the end of each step, and the peak so far where it is recorded."""
    peaks: dict[str, Callable[[StepRecord], int]] = {
        "ram": lambda row: row.host_rss_bytes,
        "gpu": lambda row: row.device_peak_bytes,
    }
    told = []
    for tier, name in _TIERS.items():
        ends = [(float(row.step), float(row.memory[tier])) for row in rows if row.memory.get(tier)]
        if not ends:
            continue
        series = [Series(f"{name} at the end of a step", ends)]
        if peak := peaks.get(tier):
            series.append(Series(f"{name}, peak so far", [(float(row.step), float(peak(row))) for row in rows]))
        told.append(lines(series, label=f"{name} over steps", text=format_bytes, from_zero=True))
    return "\n".join(told)


def _comparison(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    rows = []
    for tier in dict.fromkeys([*plan["tiers"], *measured["tiers"]]):
        planned = plan["tiers"].get(tier, {})
        rows.append(
            _compared(tier, planned.get("need"), measured["tiers"].get(tier), planned.get("have"), format_bytes)
        )
    guessed, taken = plan["seconds"], measured["seconds"]
    phases = list(dict.fromkeys([*guessed, *taken]))
    rows += [_compared(phase, guessed.get(phase), taken.get(phase), None, format_seconds) for phase in phases]
    # only if complete, otherwise the ratio would mislead
    if phases and all(guessed.get(phase) is not None and phase in taken for phase in phases):
        total = sum(guessed.values()), sum(taken.values())
        rows.append(_compared("all phases", *total, None, format_seconds))
    told = [line for line in rows if any(cell != "-" for cell in line[2:])]
    return _table(("", "available", "predicted", "measured", "measured / predicted"), told) if told else ""


def _compared(
    name: str,
    predicted: float | None,
    measured: float | None,
    available: float | None,
    text: Callable[[float], str],
) -> tuple[str, ...]:
    # a dash for None and for 0
    shown = [text(number) if number else "-" for number in (available, predicted, measured)]
    return name, *shown, f"{measured / predicted:.2f}" if measured is not None and predicted else "-"


def _evaluations(evaluations: Sequence[EvalRecord]) -> str:
    if not evaluations:
        return ""
    head = ("after step", "loss", "perplexity", "bits a byte")
    told = [
        (str(e.step), _number(e.validation_loss), _number(e.perplexity), _number(e.bits_per_byte))
        for e in evaluations[-20:]
    ]
    columns = [column for column in zip(head, *told, strict=True) if any(cell != "-" for cell in column[1:])]
    table = list(zip(*columns, strict=True))
    return _table(table[0], table[1:])


def _list(told: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in told)
    return f"<ul>{items}</ul>" if items else ""


def _table(head: Sequence[str], rows: Rows) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>\n" for line in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
