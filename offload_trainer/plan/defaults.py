"""Resolve the `auto` values that need no comparison of plans: activation checkpointing and row length."""

from __future__ import annotations

from typing import Literal

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.plan.shape import ModelShape

CHECKPOINTING_FROM = 100_000_000  # parameters; below, recomputation costs more than the activations it saves
LONGEST_ROW = 1024


def wants_checkpointing(section: ModelSection, shape: ModelShape) -> bool:
    """Return whether blocks are checkpointed; `auto` means from 1e8 parameters on, if the architecture supports it."""
    large = shape.parameters >= CHECKPOINTING_FROM and shape.can_checkpoint
    return section.activation_checkpointing == "on" or (section.activation_checkpointing == "auto" and large)


def row_length(wish: int | Literal["auto"], shape: ModelShape) -> int:
    """Return the row length in tokens; `auto` means the model's context, but at most 1024.

    Raises:
        UserError: the requested length exceeds the model's context.
    """
    if wish == "auto":
        return min(shape.context, LONGEST_ROW)
    if wish > shape.context:
        raise UserError(f"--seq-len {wish}: this model's context is {shape.context} tokens")
    return wish
