"""Resolve the `auto` values that need no comparison of plans: dtype, checkpointing, row length and batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from offload_trainer.config import ModelSection, TrainSection
from offload_trainer.errors import UserError
from offload_trainer.plan.machine import MachineProfile, has_bf16
from offload_trainer.plan.shape import ModelShape

CHECKPOINTING_FROM = 100_000_000  # parameters; below, recomputation costs more than the activations it saves
LONGEST_ROW = 1024


def checkpointed_blocks(section: ModelSection, shape: ModelShape) -> int:
    """Return how many blocks are checkpointed, unless the plan chooses for `auto`: the first N, all or none.

    `auto` means all from 1e8 parameters on, if the architecture supports it.

    Raises:
        UserError: the model has fewer blocks, or cannot checkpoint only some of them.
    """
    setting, large = section.activation_checkpointing, shape.parameters >= CHECKPOINTING_FROM and shape.can_checkpoint
    if not isinstance(setting, int):
        return shape.layers if setting == "on" or (setting == "auto" and large) else 0
    if setting > shape.layers:
        raise UserError(
            f"model.activation_checkpointing={setting}: the model has {shape.layers} blocks; use on for all"
        )
    if setting < shape.layers and not shape.can_checkpoint_some:
        raise UserError(
            f"model.activation_checkpointing={setting}: this model checkpoints all of its blocks or none in "
            "transformers, or what a single block keeps could not be counted; use on or off"
        )
    return setting


def row_length(setting: int | Literal["auto"], shape: ModelShape) -> int:
    """Return the row length in tokens; `auto` means the model's context, but at most 1024.

    Raises:
        UserError: the requested length exceeds the model's context.
    """
    if setting == "auto":
        return min(shape.context, LONGEST_ROW)
    if setting > shape.context:
        raise UserError(f"--seq-len {setting}: this model's context is {shape.context} tokens")
    return setting


_MOST_ROWS = 64  # rows per micro-batch; larger micro-batches do not make matrix products faster


def micro_batches(section: TrainSection, *, seq_len: int, world: int) -> Iterator[TrainSection]:
    """Yield each split of `train.tokens_per_step`, largest micro-batch first; if it is `auto`, yield `section` itself.

    Raises:
        UserError: the tokens are not a multiple of ranks x row length.
    """
    tokens = section.tokens_per_step
    if tokens == "auto":
        yield section
        return
    rows, rest = divmod(tokens, seq_len * world)
    if rest or not rows:
        raise UserError(
            f"train.tokens_per_step={tokens}: not a multiple of {world} rank(s) x {seq_len} tokens in a row; use "
            f"{max(1, round(tokens / (seq_len * world))) * seq_len * world}, or another --seq-len"
        )
    for micro in range(min(rows, _MOST_ROWS), 0, -1):
        if rows % micro == 0:
            yield section.model_copy(
                update={
                    "micro_batch_size": micro,
                    "gradient_accumulation_steps": rows // micro,
                    "tokens_per_step": "auto",
                }
            )


def with_dtype_of_card(section: ModelSection, machine: MachineProfile) -> ModelSection:
    """Return the section with fp16 as dtype if none was set and the GPU has no bf16 units."""
    if "dtype" in section.model_fields_set or has_bf16(machine):
        return section
    return section.model_copy(update={"dtype": "fp16"})
