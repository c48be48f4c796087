"""Write checkpoints, without an engine or of one, in the layout of a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload_trainer.config import ModelSection
from offload_trainer.data.tokenizer import load_tokenizer, save_tokenizer
from offload_trainer.model.loader import resolve_model, save_model_config
from offload_trainer.ranks import ALONE, Group
from offload_trainer.run.checkpoint import Checkpoints, RunRecord, TrainState
from offload_trainer.run.export import Source, write_model
from offload_trainer.storage.atomic_io import StoredFile


class Small:
    """An engine, and its own snapshot, whose state is one file of a few bytes."""

    rank, world, concurrent = 0, 1, False

    def snapshot(self) -> Small:
        return self

    def write(self, directory: Path, group: Group = ALONE) -> dict[str, StoredFile]:
        for name in ("engine.json", "master.safetensors"):
            (directory / name).write_text("{}")
        return {"master.safetensors": StoredFile.of(directory / "master.safetensors")}

    def close(self) -> None:
        pass


def save(output: Path, step: int, *, engine: Any = None, keep: int = 2, say: Callable[[str], None] = print) -> Path:
    """Save a checkpoint of `engine`, or of none, in the run directory `output`; return the checkpoint's directory."""
    if engine is None:
        engine = Small()
        (output / "model").mkdir(exist_ok=True, parents=True)
        (output / "model" / "config.json").write_text("{}")
    record = RunRecord(identity={}, layout={}, run={"config": {}}, model=output / "model")
    root = output / "checkpoints"
    with Checkpoints(root, record=record, keep=keep, need_bytes=10, say=say) as checkpoints:
        checkpoints.save(engine, TrainState(step=step, tokens=0, data_position=0))
    return root / f"step-{step:08d}"


def checkpoint_of(engine: Any, model: Path, output: Path, *, step: int = 0) -> Path:
    """Save a checkpoint of a real engine, without its configuration; return the run directory."""
    scratch = not (model / "model.safetensors.index.json").exists()
    source = resolve_model(ModelSection(name=str(model), attention="eager", random_init=scratch), seed=0)
    (output / "model").mkdir(parents=True, exist_ok=True)
    save_model_config(source, output / "model", dtype=torch.float32, end_of_text=None)
    save(output, step, engine=engine)
    return output


def exported(given: Path, place: Path, *, dtype: str) -> Path:
    """Export the weights of a model directory to `place`/`dtype` as its run would, without a step of training."""
    source = resolve_model(ModelSection(name=str(given)), seed=0)
    save_model_config(source, place / "run", dtype=torch.float32, end_of_text=None)
    save_tokenizer(load_tokenizer(str(given)), place / "run")
    weights, model = dict(source.weights()), place / "run"
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    whole = Source(shapes=shapes, read=weights.__getitem__, model=model, description="")
    write_model(whole.with_buffers(), place / dtype, dtype=dtype, check=False)
    return place / dtype
