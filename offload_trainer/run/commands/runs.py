"""The `runs` and `report` commands: list the runs below a directory, and compare runs by settings and results.

config.yaml, plan.json, metrics.jsonl, evaluations.jsonl of each run ──> a table, JSON, or an HTML page
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.retention import complete_checkpoints, step_of
from offload_trainer.safe_files import file_bytes, one_line, parsed, read_yaml
from offload_trainer.storage.locks import NoLocks, open_lock, try_lock
from offload_trainer.storage.scratch_dir import PAGES, folders_in
from offload_trainer.telemetry.metrics import (
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


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format the rows of a table as text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Summary of one run directory."""

    directory: str
    step: int  # last step in metrics.jsonl
    steps: int | None  # steps of the whole run in its configuration; None: not readable
    loss: float | None
    validation_loss: float | None
    saved: int | None  # step of the newest checkpoint
    state: str  # short description: running, done, or how it would resume

    @property
    def progress(self) -> str:
        """The last step, and the steps of the whole run."""
        return f"{self.step}/{'?' if self.steps is None else self.steps}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def runs_in(directory: Path) -> list[Run]:
    """Return the runs at or below `directory`, sorted by path. Raises UserError if no run is found."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; a run is in the directory given by its --output")
    found = []
    for place, folders, files in os.walk(directory):
        if "config.yaml" in files and "metrics.jsonl" in files:
            try:
                found.append(_summary(Path(place)))
            except UserError as error:  # one unreadable run must not hide the others
                found.append(
                    Run(place, step=0, steps=None, loss=None, validation_loss=None, saved=None, state=str(error))
                )
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    if not found:
        raise UserError(f"{directory} holds no run: none of its directories has a config.yaml and a metrics.jsonl")
    return found


def _summary(directory: Path) -> Run:
    metrics, validations = read_metrics(directory / "metrics.jsonl"), read_evaluations(directory / "evaluations.jsonl")
    checkpoints = complete_checkpoints(directory / "checkpoints")
    try:
        steps = read_yaml(directory / "config.yaml")["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        steps = None
    steps = steps if isinstance(steps, int) else None
    saved = step_of(checkpoints[-1]) if checkpoints else None
    return Run(
        directory=str(directory),
        step=metrics[-1].step if metrics else 0,
        steps=steps,
        loss=metrics[-1].loss if metrics else None,
        validation_loss=validations[-1].validation_loss if validations else None,
        saved=saved,
        state=state_of(directory, steps=steps, saved=saved),
    )


def state_of(directory: Path, *, steps: int | None, saved: int | None) -> str:
    """Return a short description: running, done, or how the run would resume."""
    if is_alive(directory):
        return "is running"
    try:
        has_page_files = bool(folders_in(directory / PAGES))
    except (OSError, ValueError):  # resuming the run reports the error
        has_page_files = False
    if (saved is None or saved != steps) and has_page_files:
        return "resumes from its page files"  # a newer checkpoint takes precedence
    if saved is None:
        exported = (directory / "export").is_dir()
        return "exported, cannot resume" if exported else "no checkpoint: starts from step 0"
    if steps is not None and saved >= steps:
        return "done"
    return f"resumes from step {saved}"


def is_alive(directory: Path) -> bool:
    """Return True if a process holds the lock of the run."""
    try:
        lock = open_lock(directory / ".lock")
    except OSError:
        return False
    try:
        try_lock(lock, shared=True)
    except BlockingIOError:
        return True
    except NoLocks:
        return False
    finally:
        os.close(lock)
    return False


def run_table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return table rows: a header, then one row for each run."""
    rows: list[tuple[str, ...]] = [("run", "step", "loss", "validation", "")]
    for one in runs:
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (one.loss, one.validation_loss))
        rows.append((one.directory, one.progress, *losses, one.state))
    return rows


# -- report ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSummary:
    """Settings and results of one run. `facts` maps labels to values; unknown values are left out."""

    directory: Path
    name: str  # path relative to the runs' common parent directory
    facts: dict[str, Any]
    rows: list[StepRecord]

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


def comparison(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return table rows: a header, then one row for each fact that at least one run has."""
    names = list(dict.fromkeys(name for run in runs for name in run.facts))
    names.sort(key=lambda name: list(_TEXT).index(name) if name in _TEXT else -1)  # settings first, then results
    rows = [(name, *(_shown(name, run.facts.get(name)) for run in runs)) for name in names]
    return [("", *(run.name for run in runs)), *(row for row in rows if any(cell != "-" for cell in row[1:]))]


def write_page(path: Path, runs: Sequence[RunSummary]) -> None:
    """Write the comparison as an HTML page with a chart of losses and bars of step times.

    Raises UserError if `path` exists and was not written by this program.
    """
    refuse_foreign(path)
    losses = [
        Series(run.name, [(float(row.step), row.loss) for row in run.rows if row.loss is not None]) for run in runs
    ]
    phases = {run.name: median_phases(run.rows) for run in runs}
    write_comparison(path, title="Runs side by side", losses=losses, phases=phases, table=comparison(runs))


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


def _compared(directory: Path, name: str, settings: dict[str, Any], plan: dict[str, Any]) -> RunSummary:
    rows, evaluations = read_metrics(directory / "metrics.jsonl"), read_evaluations(directory / "evaluations.jsonl")
    homes = {f"plan: {home}": plan.get(home) for home in _HOMES}
    if plan["on_cpu"]:  # the CPU computes, so "gpu" and "cpu" are both RAM
        homes |= {name: "RAM" for name, home in homes.items() if home in ("gpu", "cpu")}
        on_gpu, in_ram = (homes.pop(f"plan: {name}") for name in ("gpu_fraction", "ram_fraction"))
        homes["plan: ram_fraction"] = None if on_gpu is None or in_ram is None else round(on_gpu + in_ram, 9)
    if "overlap" in plan:
        homes["plan: tiered.overlap"] = "backward" if plan.get("ahead") else "forward" if plan["overlap"] else "off"
    seconds = list(plan["plan"]["seconds"].values())
    predicted = None if None in seconds else sum(seconds) - plan["plan"].get("hidden", 0.0)
    facts = {**settings, **homes, "tokens a step": plan["tokens_per_step"], "a step, predicted": predicted}
    facts |= _of_rows(rows)
    if evaluations:
        facts["validation loss"] = evaluations[-1].validation_loss
        facts["bits a byte"] = evaluations[-1].bits_per_byte
    known = {what: value for what, value in facts.items() if value is not None}
    return RunSummary(directory, name, known, rows)


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
