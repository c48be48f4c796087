"""The model card (README.md) of exported weights: model, data, settings, and the recorded numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from offload_trainer.checkpoint import read_state
from offload_trainer.plan.tiered.state_formats import ADAMW, RULES
from offload_trainer.safe_files import Flag, Number, Steps, read_back
from offload_trainer.telemetry.metrics import read_evaluations, read_metrics
from offload_trainer.units import format_count, format_seconds, shown

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- offload-trainer
---
"""

_ROUNDED = "the frozen matrices of blocks were rounded to {} when they were loaded"


# The parts of a run.json that a card uses, and of an export.json. Other keys are ignored.


class _Model(TypedDict):
    name: str
    dtype: str
    overrides: dict[str, Any]
    base: str


class _Optim(TypedDict):
    name: str
    lr: Number
    betas: tuple[Number, Number]
    weight_decay: Number
    max_grad_norm: Number
    schedule: str
    moment_dtype: str


class _Data(TypedDict):
    path: list[str]


class _Train(TypedDict):
    steps: Steps
    seed: int


class _Config(TypedDict):
    model: _Model
    optim: _Optim
    data: _Data
    train: _Train


class _Environment(TypedDict, total=False):
    packages: dict[str, str | None]


class _Run(TypedDict, total=False):
    config: _Config
    random: Flag
    environment: _Environment


class _Final(TypedDict):
    step: Steps
    run: _Run


def model_card(
    run_directory: Path,
    *,
    dtype: str,
    source: str,
    run: Mapping[str, Any],
    step: int | None = None,
    updates: int | None = None,
) -> str:
    """Return the card's text. `run` is a checkpoint's run.json (may be empty); metrics come from `run_directory`.

    Metrics end at `step`, or at the step that made update number `updates`. Numbers that were not recorded are left
    out.
    """
    config: Mapping[str, Any] = run.get("config", {})
    facts: list[tuple[str, Any]] = [("Weights", f"{dtype}, from the fp32 masters of {source}")]
    if config:
        model, optim = config["model"], config["optim"]
        rule = RULES.get(optim["name"], ADAMW).title
        changes = ", ".join(f"{key}={value}" for key, value in model["overrides"].items())
        start = "random weights" if run.get("random") else "its weights"
        facts += [
            ("Model", f"{model['name']}, from {start}" + (f" ({changes})" if changes else "")),
            ("Trained in", f"{model['dtype']}, masters in fp32, moments in {optim['moment_dtype']}"),
            ("Base", None if model["base"] == "model" else _ROUNDED.format(model["base"])),
            ("Text", ", ".join(Path(path).name for path in config["data"]["path"])),
            (
                "Optimizer",
                f"{rule}, peak rate {optim['lr']:g}, betas {tuple(optim['betas'])}, weight decay "
                f"{optim['weight_decay']:g}, clipping {optim['max_grad_norm']:g}, schedule {optim['schedule']}",
            ),
            ("Seed", config["train"]["seed"]),
        ]
    rows = read_metrics(run_directory / "metrics.jsonl")
    if updates is not None:
        step = next((row.step for row in [r for r in rows if not r.skipped][updates - 1 : updates]), updates)
    rows = [row for row in rows if step is None or row.step <= step]
    if rows:
        last = rows[-1]
        facts += [
            ("Steps", f"{last.step}" + (f" of {config['train']['steps']}" if config else "")),
            ("Tokens", f"{last.tokens} ({format_count(last.tokens)})"),
            ("Loss of the last step", f"{last.loss:.4f}" if last.loss is not None else None),
            ("Time in steps", format_seconds(sum(row.seconds for row in rows))),
        ]
    elif step is not None:
        facts.append(("Steps", step))
    seen = [e for e in read_evaluations(run_directory / "evaluations.jsonl") if step is None or e.step <= step]
    if seen and seen[-1].validation_loss is not None:
        bits = seen[-1].bits_per_byte
        facts.append(
            (
                f"Validation loss after step {seen[-1].step}",
                f"{seen[-1].validation_loss:.4f}" + (f" ({bits:.4f} bits a byte)" if bits is not None else ""),
            )
        )
    packages = run.get("environment", {}).get("packages", {})
    if packages:
        facts.append(("Made with", ", ".join(f"{name} {number}" for name, number in packages.items() if number)))
    lines = [f"| {name} | {_plain(value)} |" for name, value in facts if value is not None]
    title = Path(config["model"]["name"]).name if config else "Trained weights"
    return f"{_HEAD}\n# {_plain(title)}\n\n| | |\n| --- | --- |\n" + "\n".join(lines) + "\n"


def checkpoint_card(checkpoint: Path, *, dtype: str) -> str:
    """Return the card of a checkpoint, with the metrics of its run directory if it is still inside one."""
    run = read_back(checkpoint / "run.json", _Run, fix="Export another checkpoint of the run")
    step = read_state(checkpoint).step
    return model_card(checkpoint.parent.parent, dtype=dtype, source=checkpoint.name, run=run, step=step)


def final_card(record: Path, *, dtype: str) -> str:
    """Return the card of a run's final weights; `record` is the run's export.json."""
    found = read_back(record, _Final, fix=f"Move it and {record.parent / 'export'} away")
    step = found["step"]
    return model_card(record.parent, dtype=dtype, source=f"the run after step {step}", run=found["run"], step=step)


def _plain(text: object) -> str:
    """Return text for a Markdown table: markup and HTML escaped, on one line."""
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", " ".join(shown(text).split()))
