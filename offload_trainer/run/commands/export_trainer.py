"""The export command with --trainer: write a checkpoint that transformers' Trainer resumes from.

DEST/model.safetensors ...   fp32 masters, as in any export
DEST/optimizer.pt            moments by position (foreign/trainer_checkpoint.py), with the run's settings
DEST/scheduler.pt            the position of a torch LambdaLR, whatever its function is
DEST/trainer_state.json      completed steps, the length of the run, and its steps between logs, evaluations and saves
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import configuration_of, find_checkpoint, read_manifest, read_state
from offload_trainer.config import ModelSection, OptimSection
from offload_trainer.errors import UserError
from offload_trainer.export.directory import Exported, check_destination, write_model
from offload_trainer.export.sources import opened
from offload_trainer.model.loader import resolve_model
from offload_trainer.optim.state_files import EngineState, read_engine_state, read_tensors
from offload_trainer.plan.tiered.state_formats import ADAMW, MOMENTS
from offload_trainer.run.foreign.trainer_checkpoint import OPTIMIZER, SCHEDULER, STATE, decay_order
from offload_trainer.storage.atomic_io import bytes_below, write_text
from offload_trainer.storage.tensorfile import TensorEntry, TensorFileReader, TensorFileWriter
from offload_trainer.trainer import learning_rate, steps_between_saves


def export_trainer(source: Path, destination: Path, *, shard_bytes: int, check: bool) -> Exported:
    """Write a run's newest checkpoint, or a checkpoint, as a Trainer's checkpoint directory.

    Args:
        source: run directory or checkpoint.
        destination: a new directory. A Trainer takes the step from trainer_state.json, so its name is free.
        shard_bytes: largest size of a shard of the weights.
        check: read all headers and a sample of the weights back.

    Raises:
        UserError: the checkpoint is damaged or not of AdamW, the destination exists, or space is short (20 bytes a
            weight while it is written, 12 of them remain).
        TrainerError: the disk fails.
    """
    checkpoint = find_checkpoint(source)
    read_manifest(checkpoint)
    state = read_engine_state(checkpoint, rule=ADAMW)
    with opened(checkpoint) as found:
        with TensorFileReader(checkpoint / "master.safetensors") as masters:
            trained = sum(entry.numel for entry in masters.entries.values())
        weights = sum(map(math.prod, found.shapes.values()))
        check_destination(destination.resolve(), 4 * weights + 2 * 4 * len(MOMENTS) * trained)  # moments: twice a while
        written = write_model(
            found,
            destination,
            dtype="fp32",
            shard_bytes=shard_bytes,
            check=check,
            also=partial(_write_state, checkpoint=checkpoint, state=state),
        )
    return Exported(str(checkpoint), bytes_below(destination), written.compared)


def _write_state(directory: Path, *, checkpoint: Path, state: EngineState) -> None:
    """Write the files that a Trainer reads in addition to the model's."""
    config, done = configuration_of(checkpoint), read_state(checkpoint)
    try:
        # strict validation accepts a list for a tuple only when the input is JSON
        optim, steps = OptimSection.model_validate_json(json.dumps(config["optim"])), int(config["train"]["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint / 'run.json'} has no optimizer settings of a run: {error}") from error
    rate = learning_rate(done.step, optim, steps=steps)
    order = _order(checkpoint)
    groups, number = [], 0
    for names, decay in zip(order, (optim.weight_decay, 0.0), strict=True):
        groups.append(_group(optim, rate=rate, decay=decay) | {"params": list(range(number, number + len(names)))})
        number += len(names)
    names = [name for group in order for name in group]
    moments = {moment: _mapped(directory, checkpoint, moment) for moment in MOMENTS}
    torch.save(
        {
            "state": {
                number: {"step": torch.tensor(float(state.steps_of(name)))}
                | {kind: tensors[name] for kind, tensors in moments.items()}
                for number, name in enumerate(names)
            },
            "param_groups": groups,
        },
        directory / OPTIMIZER,
    )
    for kind in moments:
        (directory / f"{kind}.part").unlink()
    torch.save(_scheduler(optim, rate=rate, step=done.step), directory / SCHEDULER)
    write_text(directory / STATE, json.dumps(_trainer_state(config, step=done.step, steps=steps), indent=2))


def _trainer_state(config: Mapping[str, Mapping[str, Any]], *, step: int, steps: int) -> dict[str, Any]:
    """Return the fields of transformers' TrainerState. Its Trainer ignores its own arguments for all but `max_steps`.

    A save fails for a callback with state that the file does not name. The control's entry is its default state; an
    empty list restores nothing.
    """
    return {
        "global_step": step,
        "max_steps": steps,
        "train_batch_size": config["train"].get("micro_batch_size", 1),
        "logging_steps": 1,  # a run logs every step
        "eval_steps": config["train"].get("eval_every") or steps,
        "save_steps": steps_between_saves(config.get("save", {}).get("every", "auto"), steps=steps) or steps,
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}, "EarlyStoppingCallback": []},
    }


def _order(checkpoint: Path) -> list[list[str]]:
    """Return the trained weights in the order of a Trainer's optimizer."""
    section = ModelSection(name=str(checkpoint / "model"), random_init=True)
    model = resolve_model(section, seed=0, image_patches=1)._meta()  # has the class that the configuration names
    with TensorFileReader(checkpoint / "master.safetensors") as masters:
        trained = set(masters.entries)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return decay_order(model)


def _group(optim: OptimSection, *, rate: float, decay: float) -> dict[str, Any]:
    """Return the settings of a group as torch.optim.AdamW stores them."""
    made = torch.optim.AdamW([torch.zeros(1)], lr=rate, betas=optim.betas, eps=optim.eps, weight_decay=decay)
    return {**made.state_dict()["param_groups"][0], "initial_lr": optim.lr}


def _scheduler(optim: OptimSection, *, rate: float, step: int) -> dict[str, Any]:
    """Return the state of a LambdaLR after `step` steps. None stands for a function, which torch does not store.

    Its position is the one at which transformers' schedule has the run's rate, so the Trainer resumes without a jump.
    """
    position = max(0, step + 1 - optim.schedule_delay)
    weights = [{"params": [torch.zeros(1)]} for _ in range(2)]
    made = torch.optim.lr_scheduler.LambdaLR(torch.optim.AdamW(weights, lr=optim.lr), lambda _: 1.0)
    return {**made.state_dict(), "last_epoch": position, "_step_count": position + 1, "_last_lr": [rate] * 2}


def _mapped(directory: Path, checkpoint: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a moment in fp32, mapped from a file in `directory`, so that none need be in memory.

    All are views of the file's bytes, which `torch.save` writes once.
    """
    with TensorFileReader(checkpoint / f"{kind}.safetensors") as stored:
        shapes = {name: entry.shape for name, entry in stored.entries.items()}
    path = directory / f"{kind}.part"
    writer = TensorFileWriter(path, [TensorEntry(name, torch.float32, shape) for name, shape in shapes.items()])
    for name, tensor in read_tensors(checkpoint, kind, shapes=shapes):
        writer.write(name, tensor)
    size = writer.close().bytes
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
    first = size - 4 * sum(math.prod(shape) for shape in shapes.values())
    found, start = {}, first // 4
    for name, shape in shapes.items():
        found[name] = torch.empty(0).set_(storage, start, shape, torch.empty(shape, device="meta").stride())
        start += found[name].numel()
    return found
