"""Write checkpoints without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import Checkpoints, RunRecord, TrainState
from offload_trainer.manifest import crc32_of
from offload_trainer.model.loader import resolve_model, save_model_config
from offload_trainer.ranks import ALONE, Group
from offload_trainer.settings import load_config


class Small:
    """An engine, and its own snapshot, whose state is one file of a few bytes."""

    rank, world, concurrent = 0, 1, False

    def snapshot(self) -> Small:
        return self

    def write(self, directory: Path, group: Group = ALONE) -> dict[str, Any]:
        for name in ("engine.json", "master.safetensors"):
            (directory / name).write_text("{}")
        return {"master.safetensors": {"bytes": 2, "crc32": crc32_of(directory / "master.safetensors")}}

    def close(self) -> None:
        pass


def save(
    output: Path, step: int, *, keep: int = 2, say: Callable[[str], None] = print, growing: Sequence[Path] = ()
) -> Path:
    """Save a checkpoint in run directory `output`; return the checkpoint's directory."""
    (output / "model").mkdir(exist_ok=True, parents=True)
    (output / "model" / "config.json").write_text("{}")
    record = RunRecord(identity={}, layout={}, run={"config": {}}, model=output / "model")
    root = output / "checkpoints"
    with Checkpoints(root, record=record, keep=keep, need_bytes=10, say=say, growing=growing) as checkpoints:
        checkpoints.save(Small(), TrainState(step=step, tokens=0, data_position=0))  # type: ignore[arg-type]
    return root / f"step-{step:08d}"


def saved_engine(engine: Any, output: Path, step: int, words: Sequence[str]) -> Path:
    """Save a real engine's state as the checkpoint of a run with these words; return the checkpoint's directory."""
    config = load_config(list(words))
    source = resolve_model(config.model, seed=0)
    save_model_config(source, output / "model", dtype=torch.float32, end_of_text=None)
    layout = {w.name: {"shape": list(w.shape), "trained": w.trainable} for w in source.shape.weights}
    run = {"config": config.model_dump(mode="json"), "random": False}
    record = RunRecord(identity={}, layout=layout, run=run, model=output / "model")
    root = output / "checkpoints"
    with Checkpoints(root, record=record, keep=2, need_bytes=10, say=print) as checkpoints:
        checkpoints.save(engine, TrainState(step=step, tokens=0, data_position=0))
    return root / f"step-{step:08d}"
