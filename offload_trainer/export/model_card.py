"""The model card (README.md) of exported weights: model, data, settings, and the recorded numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from offload_trainer.checkpoint import RunConfiguration
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
_OPTIM = ("name", "lr", "betas", "weight_decay", "max_grad_norm", "schedule", "moment_dtype")  # keys that a card shows


def model_card(
    run_directory: Path,
    *,
    dtype: str,
    source: str,
    run: RunConfiguration,
    step: int | None = None,
    updates: int | None = None,
) -> str:
    """Return the card's text. `run` is a checkpoint's record of its run; metrics come from `run_directory`.

    Metrics end at `step`, or at the step that made update number `updates`. Numbers that were not recorded are left
    out.
    """
    model, optim, data, train = (run.config.get(section, {}) for section in ("model", "optim", "data", "train"))
    facts: list[tuple[str, Any]] = [("Weights", f"{dtype}, from the fp32 masters of {source}")]
    if run.config:
        start = f"random weights ({model.get('overrides')})" if run.random else "its weights"
        facts += [
            ("Model", f"{model.get('name')}, from {start}"),
            ("Trained in", f"{model.get('dtype')}, masters in fp32"),
            ("Text", ", ".join(Path(str(path)).name for path in data.get("path", ()))),
            ("Optimizer", ", ".join(f"{key}={optim.get(key)}" for key in _OPTIM)),
            ("Seed", train.get("seed")),
        ]
    rows = read_metrics(run_directory / "metrics.jsonl")
    if updates is not None:
        step = next((row.step for row in [r for r in rows if not r.skipped][updates - 1 : updates]), updates)
    rows = [row for row in rows if step is None or row.step <= step]
    if rows:
        last = rows[-1]
        facts += [
            ("Steps", f"{last.step}" + (f" of {train['steps']}" if "steps" in train else "")),
            ("Tokens", f"{last.tokens} ({format_count(last.tokens)})"),
            ("Loss of the last step", f"{last.loss:.4f}" if last.loss is not None else None),
            ("Time in steps", format_seconds(sum(row.seconds for row in rows))),
        ]
    elif step is not None:
        facts.append(("Steps", step))
    seen = [e for e in read_evaluations(run_directory / "evaluations.jsonl") if step is None or e.step <= step]
    if seen and seen[-1].validation_loss is not None:
        bits = seen[-1].bits_per_byte
        told = f"{seen[-1].validation_loss:.4f}" + (f" ({bits:.4f} bits a byte)" if bits is not None else "")
        facts.append((f"Validation loss after step {seen[-1].step}", told))
    if packages := run.environment.get("packages"):
        facts.append(("Made with", ", ".join(f"{name} {number}" for name, number in packages.items() if number)))
    lines = [f"| {name} | {_plain(value)} |" for name, value in facts if value is not None]
    title = Path(str(model.get("name", "Trained weights"))).name
    return f"{_HEAD}\n# {_plain(title)}\n\n| | |\n| --- | --- |\n" + "\n".join(lines) + "\n"


def _plain(text: object) -> str:
    """Return text for a Markdown table: markup and HTML escaped, on one line."""
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", " ".join(shown(text).split()))
