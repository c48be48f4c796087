"""The `runs` and `report` commands: list the runs below a directory, and compare runs by settings and results."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, Number, as_kind, file_bytes, one_line, parsed, read_yaml
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.manifest import weights_alone
from offload_trainer.storage.retention import complete_checkpoints, step_of
from offload_trainer.storage.scratch_dir import PAGES, folders_in, is_alive
from offload_trainer.telemetry.metrics import read_evaluations, read_metrics
from offload_trainer.telemetry.report import Series, comparison_page, in_words, refuse_foreign, results

_ALWAYS = ("model.name", "model.dtype", "optim.name", "optim.moment_dtype", "optim.lr")  # settings shown if equal too
# settings that do not affect results, or with few templates
_NEVER = ("save.output", "save.resume", "placement.nvme", "data.cache", "data.template_date")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def runs_in(directory: Path) -> list[dict[str, Any]]:
    """Return what `runs --json` prints of the runs at or below `directory`, sorted by path.

    `state` says that a run is running, done, or how it would resume. Raises UserError if no run is found.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; `offload-train runs DIR` lists the runs in DIR")
    found = []
    for place, folders, files in os.walk(directory):
        if "config.yaml" in files and "metrics.jsonl" in files:
            found.append(_summary(Path(place)))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    if not found:
        raise UserError(f"{directory} holds no run: none of its directories has a config.yaml and a metrics.jsonl")
    return found


def _summary(directory: Path) -> dict[str, Any]:
    steps = saved = loss = validation_loss = None
    step = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        steps = as_kind(read_yaml(directory / "config.yaml")["train"]["steps"], Count)
    try:
        if metrics := read_metrics(directory / "metrics.jsonl"):
            step, loss = metrics[-1].step, metrics[-1].loss
        if validations := read_evaluations(directory / "evaluations.jsonl"):
            validation_loss = validations[-1].validation_loss
        if checkpoints := complete_checkpoints(directory / "checkpoints"):
            saved = step_of(checkpoints[-1])
        state = _state(directory, steps=steps, newest=checkpoints[-1] if checkpoints else None)
    except UserError as error:  # one unreadable run must not hide the others
        state = str(error)
    known = {"step": step, "steps": steps, "loss": loss, "validation_loss": validation_loss, "saved": saved}
    return {"directory": str(directory), "state": state, **known}


def _state(directory: Path, *, steps: int | None, newest: Path | None) -> str:
    saved = step_of(newest) if newest else None
    with suppress(UserError):  # it is not known whether the run is alive
        if is_alive(directory):
            return "is running"
    with suppress(OSError, ValueError):  # resuming the run reports the error
        if (saved is None or saved != steps) and folders_in(directory / PAGES):
            return "resumes from its page files"  # a newer checkpoint takes precedence
    if newest is None:
        return "no checkpoint: starts from step 0"
    if steps is not None and step_of(newest) >= steps:
        return "done"
    if weights_alone(newest):
        return f"holds the weights of step {saved} alone, cannot resume"
    return f"resumes from step {saved}"


def run_table(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("run", "step", "loss", "validation", "")]
    for run in runs:
        losses = ("-" if run[key] is None else f"{run[key]:.4f}" for key in ("loss", "validation_loss"))
        progress = f"{run['step']}/{'?' if run['steps'] is None else run['steps']}"
        rows.append((run["directory"], progress, *losses, run["state"]))
    return rows


class RunSummary(NamedTuple):
    """Settings and results of one run. `facts` maps labels to values, None if unknown or not used."""

    directory: Path
    name: str  # path relative to the runs' common parent directory
    facts: dict[str, Any]
    losses: Series

    def to_json(self) -> dict[str, Any]:
        known = {label: value for label, value in self.facts.items() if value is not None}
        return {"directory": str(self.directory), **known}


def compared(directories: Sequence[Path]) -> list[RunSummary]:
    """Read the runs. Raises UserError for a directory that is not a run or whose files cannot be read."""
    read = [_read(directory) for directory in directories]
    configs = [config for config, _ in read]
    differ = {key for key in configs[0] if len({str(config.get(key)) for config in configs}) > 1}
    keys = [key for key in configs[0] if key in _ALWAYS or (key in differ and key not in _NEVER)]
    shared = Path(os.path.commonpath([directory.absolute().parent for directory in directories]))
    runs = []
    for directory, (config, plan) in zip(directories, read, strict=True):
        rows, name = read_metrics(directory / "metrics.jsonl"), str(directory.absolute().relative_to(shared))
        found = results(rows, read_evaluations(directory / "evaluations.jsonl"))
        skipped = {"steps skipped": sum(row.skipped for row in rows) or None}
        facts = {**{key: config.get(key) for key in keys}, **plan, **found, **skipped}
        losses = Series(name, [(float(row.step), row.loss) for row in rows if row.loss is not None])
        runs.append(RunSummary(directory, name, facts, losses))
    return runs


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run's configuration by section.key, and the facts of its plan."""
    try:
        sections = read_yaml(run / "config.yaml")
        plan = parsed(file_bytes(run / "plan.json"), dict)
        seconds = plan["seconds"].values()
        facts = {
            "placement": plan["chosen"]["homes"],
            "tokens a step": as_kind(plan["chosen"]["tokens_per_step"], Count),
            "a step, predicted": None if None in seconds else as_kind(sum(seconds) - plan["hidden"], Number),
        }
        return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}, facts
    except OSError as error:
        raise UserError(f"{run} holds no run: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{run}: its config.yaml or plan.json was not written by a run: {one_line(error)}") from error


def comparison(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return table rows: a header, then one row for each fact that at least one run has."""
    labels = dict.fromkeys(label for run in runs for label in run.facts)
    rows = [(label, *(in_words(label, run.facts.get(label)) for run in runs)) for label in labels]
    return [("", *(run.name for run in runs)), *(row for row in rows if {*row[1:]} != {"-"})]


def write_page(path: Path, runs: Sequence[RunSummary]) -> None:
    """Write the comparison as an HTML page. Raises UserError if `path` exists and was not written by this program."""
    refuse_foreign(path)
    write_text(path, comparison_page([run.losses for run in runs], comparison(runs)))
