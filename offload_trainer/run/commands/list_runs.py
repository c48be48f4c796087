"""The `runs` command: list the runs below a directory with their progress, losses and whether they can resume."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.retention import complete_checkpoints, step_of
from offload_trainer.safe_files import read_yaml
from offload_trainer.storage.locks import NoLocks, open_lock, take
from offload_trainer.storage.scratch_dir import PAGES, folders_in
from offload_trainer.telemetry.metrics import read_evaluations, read_metrics


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def runs_in(directory: Path) -> list[Run]:
    """Return the runs at or below `directory`, sorted by path. Raises UserError if no run is found."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; a run is in the directory given by its --output")
    found = []
    for place, folders, files in os.walk(directory):
        if "config.yaml" in files and "metrics.jsonl" in files:
            found.append(_run(Path(place)))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    if not found:
        raise UserError(f"{directory} holds no run: none of its directories has a config.yaml and a metrics.jsonl")
    return found


def _run(directory: Path) -> Run:
    try:
        return _read(directory)
    except UserError as error:  # one unreadable run must not hide the others
        return Run(str(directory), step=0, steps=None, loss=None, validation_loss=None, saved=None, state=str(error))


def _read(directory: Path) -> Run:
    metrics, validations = read_metrics(directory / "metrics.jsonl"), read_evaluations(directory / "evaluations.jsonl")
    checkpoints = complete_checkpoints(directory / "checkpoints")
    step, steps = metrics[-1].step if metrics else 0, _steps(directory / "config.yaml")
    saved = step_of(checkpoints[-1]) if checkpoints else None
    return Run(
        directory=str(directory),
        step=step,
        steps=steps,
        loss=metrics[-1].loss if metrics else None,
        validation_loss=validations[-1].validation_loss if validations else None,
        saved=saved,
        state=_state(directory, steps=steps, saved=saved),
    )


def _steps(config: Path) -> int | None:
    try:
        told = read_yaml(config)["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, int) else None


def _state(directory: Path, *, steps: int | None, saved: int | None) -> str:
    if _is_alive(directory):
        return "is running"
    if (saved is None or saved != steps) and _has_page_files(directory):
        return "resumes from its page files"  # a newer checkpoint takes precedence
    if saved is None:
        exported = (directory / "export").is_dir()
        return "exported, cannot resume" if exported else "no checkpoint: starts from step 0"
    if steps is not None and saved >= steps:
        return "done"
    return f"resumes from step {saved}"


def _has_page_files(directory: Path) -> bool:
    try:
        return bool(folders_in(directory / PAGES))
    except (OSError, ValueError):  # resuming the run reports the error
        return False


def _is_alive(directory: Path) -> bool:
    try:
        lock = open_lock(directory / ".lock")
    except OSError:
        return False
    try:
        take(lock, shared=True)
    except BlockingIOError:
        return True
    except NoLocks:
        return False
    finally:
        os.close(lock)
    return False


def table(runs: list[Run]) -> str:
    """Format the runs as an aligned table, one line each."""
    rows = [("run", "step", "loss", "validation", "")]
    rows += [
        (
            run.directory,
            f"{run.step}/{'?' if run.steps is None else run.steps}",
            _number(run.loss),
            _number(run.validation_loss),
            run.state,
        )
        for run in runs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
