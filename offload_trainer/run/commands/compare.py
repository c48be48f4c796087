"""The `report` command: compare runs by their differing settings, losses, speed and memory.

config.yaml, plan.json, metrics.jsonl, evaluations.jsonl of each ── compared ── a table, JSON, or an HTML page
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import file_bytes, one_line, parsed, read_yaml
from offload_trainer.telemetry.metrics import (
    EvalRecord,
    StepRecord,
    median_phases,
    median_speed,
    read_evaluations,
    read_metrics,
    steady,
)
from offload_trainer.telemetry.report import Series, refuse_foreign, write_comparison
from offload_trainer.units import format_bytes, format_count, format_seconds

_HOMES = ("params", "optimizer", "gpu_fraction", "ram_fraction", "gradients")
_TELLING = (
    "model.name",
    "model.dtype",
    "model.activation_checkpointing",
    "optim.name",
    "optim.moment_dtype",
    "optim.lr",
)
_NOT_TOLD = ("save.output", "save.resume", "placement.nvme", "data.cache")  # paths do not affect results


@dataclass(frozen=True)
class RunSummary:
    """Settings and results of one run. `facts` maps labels to values; unknown values are left out."""

    directory: Path
    name: str  # path relative to the runs' common parent directory
    facts: dict[str, Any]
    rows: list[StepRecord]
    evaluations: list[EvalRecord]

    def to_json(self) -> dict[str, Any]:
        return {"directory": str(self.directory), **self.facts}


def compared(directories: Sequence[Path]) -> list[RunSummary]:
    """Read the runs. Raises UserError for a directory that is not a run or whose files cannot be read."""
    read = [_read(directory) for directory in directories]
    configs = [config for _, config, _ in read]
    differ = {key for key in configs[0] if len({str(config.get(key)) for config in configs}) > 1}
    keys = [key for key in configs[0] if key in _TELLING or (key in differ and key not in _NOT_TOLD)]
    shared = Path(os.path.commonpath([directory.absolute().parent for directory in directories]))
    names = [str(directory.absolute().relative_to(shared)) for directory in directories]
    return [
        _compared(directory, name, {key: config.get(key) for key in keys}, plan)
        for name, (directory, config, plan) in zip(names, read, strict=True)
    ]


def table(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return table rows: a header, then one row for each fact that at least one run has."""
    names = list(dict.fromkeys(name for run in runs for name in run.facts))
    names.sort(key=lambda name: list(_TEXT).index(name) if name in _TEXT else -1)  # settings first, then results
    rows = [(name, *(_shown(name, run.facts.get(name)) for run in runs)) for name in names]
    return [("", *(run.name for run in runs)), *(row for row in rows if any(cell != "-" for cell in row[1:]))]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in told)


def write_page(path: Path, runs: Sequence[RunSummary]) -> None:
    """Write the comparison as an HTML page with a chart of losses and bars of step times.

    Raises UserError if `path` exists and was not written by this program.
    """
    refuse_foreign(path)
    losses = [
        Series(run.name, [(float(row.step), row.loss) for row in run.rows if row.loss is not None]) for run in runs
    ]
    phases = {run.name: median_phases(run.rows) for run in runs}
    write_comparison(path, title="Runs side by side", losses=losses, phases=phases, table=table(runs))


def _read(directory: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    try:
        sections = read_yaml(directory / "config.yaml")
        plan = parsed(file_bytes(directory / "plan.json"), dict)
        config = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
        chosen = {**plan["chosen"], **(plan["chosen"]["sizes"] or {}), "plan": plan, "on_cpu": _on_cpu(directory)}
        return directory, config, chosen
    except OSError as error:
        raise UserError(f"{directory} holds no run: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{directory}: its config.yaml or plan.json was not written by a run: {one_line(error)}"
        ) from error


def _on_cpu(directory: Path) -> bool:
    """Return True if machine.json says that the run's machine had no GPU; False if it cannot be read."""
    try:
        return parsed(file_bytes(directory / "machine.json"), dict).get("gpu", "") is None
    except (OSError, ValueError):
        return False


def _compared(directory: Path, name: str, wished: dict[str, Any], plan: dict[str, Any]) -> RunSummary:
    rows, evaluations = read_metrics(directory / "metrics.jsonl"), read_evaluations(directory / "evaluations.jsonl")
    homes = {f"plan: {home}": plan.get(home) for home in _HOMES}
    if plan["on_cpu"]:  # the CPU computes, so "gpu" and "cpu" are both RAM
        homes |= {name: "RAM" for name, home in homes.items() if home in ("gpu", "cpu")}
        on_gpu, in_ram = (homes.pop(f"plan: {name}") for name in ("gpu_fraction", "ram_fraction"))
        homes["plan: ram_fraction"] = None if on_gpu is None or in_ram is None else round(on_gpu + in_ram, 9)
    if "overlap" in plan:
        homes["plan: tiered.overlap"] = "backward" if plan.get("ahead") else "forward" if plan["overlap"] else "off"
    facts = {**wished, **homes, "tokens a step": plan["tokens_per_step"], **_of_plan(plan["plan"])}
    facts |= _of_rows(rows)
    if evaluations:
        facts["validation loss"] = evaluations[-1].validation_loss
        facts["bits a byte"] = evaluations[-1].bits_per_byte
    known = {what: value for what, value in facts.items() if value is not None}
    return RunSummary(directory, name, known, rows, evaluations)


def _of_plan(plan: dict[str, Any]) -> dict[str, Any]:
    seconds = list(plan["seconds"].values())
    known = None if None in seconds else sum(seconds) - plan.get("hidden", 0.0)
    return {"a step, predicted": known}


def _of_rows(rows: Sequence[StepRecord]) -> dict[str, Any]:
    if not rows:
        return {}
    counted, last = steady(rows), rows[-1]
    written = [row.nvme_written_bytes for row in rows]
    return {
        "steps": last.step,
        "tokens": last.tokens,
        "training loss": last.loss,
        "a step": median(row.seconds for row in counted),
        **{f"a step, {name}": took for name, took in median_phases(rows).items() if took},
        "hidden": median(row.hidden for row in counted) or None,
        "tokens a second": median_speed(counted),
        "host memory, peak": last.host_rss_bytes,
        "GPU memory, peak": last.device_peak_bytes or None,
        "on drives": max(row.memory.get("drives", 0) for row in rows) or None,
        "written to drives": sum(number for number in written if number is not None) or None,
        "steps skipped": sum(row.skipped for row in rows) or None,
    }


# Labels in the order of the table, with their format. All other labels come before them.
_TEXT: dict[str, Callable[[Any], str]] = {
    "tokens a step": format_count,
    "steps": str,
    "tokens": format_count,
    "training loss": "{:.4f}".format,
    "validation loss": "{:.4f}".format,
    "bits a byte": "{:.4f}".format,
    "a step, predicted": format_seconds,
    "a step": format_seconds,
    "a step, data": format_seconds,
    "a step, forward": format_seconds,
    "a step, backward": format_seconds,
    "a step, wait": format_seconds,
    "a step, update": format_seconds,
    "hidden": format_seconds,
    "tokens a second": format_count,
    "host memory, peak": format_bytes,
    "GPU memory, peak": format_bytes,
    "on drives": format_bytes,
    "written to drives": format_bytes,
    "steps skipped": str,
}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _TEXT:
        return _TEXT[name](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
