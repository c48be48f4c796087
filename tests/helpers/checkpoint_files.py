"""Write checkpoints of an engine in the layout of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import Checkpoints, RunRecord, TrainState
from offload_trainer.config import ModelSection
from offload_trainer.model.loader import resolve_model, save_model_config


def checkpoint_of(made: Any, model: Path, output: Path, *, step: int = 0) -> Path:
    """Save a checkpoint of engine `made` as a run would; return the run directory."""
    scratch = not (model / "model.safetensors.index.json").exists()
    source = resolve_model(ModelSection(name=str(model), attention="eager", random_init=scratch), seed=0)
    (output / "model").mkdir(parents=True, exist_ok=True)
    save_model_config(source, output / "model", dtype=torch.float32, end_of_text=None)
    record = RunRecord(identity={}, layout={}, run={}, model=output / "model")
    with Checkpoints(output / "checkpoints", record=record, keep=2, need_bytes=10, say=print) as checkpoints:
        checkpoints.save(made, TrainState(step=step, tokens=0, data_position=0))
    return output
