"""Where gradient checkpointing keeps a block's input: what torch's `checkpoint` saves of it, handed to a keeper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class Keeper(Protocol):
    """Keeps blocks' inputs in a way of its own."""

    def begin(self) -> None:
        """A block begins that a backward will compute again."""

    def keep(self, tensor: torch.Tensor) -> Any:
        """In the place of a block's input, contiguous and not empty."""

    def leave(self, tensor: torch.Tensor) -> Any:
        """In the place of whatever else is saved of a block's arguments."""

    def give(self, kept: Any) -> torch.Tensor:
        """What was kept or left, as it was."""


def keep_inputs(model: nn.Module, keeper: Keeper) -> None:
    """Let `model`'s checkpointed blocks keep their inputs so, those too for which it is turned on anew."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and getattr(checkpoint, "kept_by", None) is not keeper:
            setattr(module, "_gradient_checkpointing_func", _keeping(checkpoint, keeper))  # noqa: B010


def _keeping(checkpoint: Callable[..., Any], keeper: Keeper) -> Callable[..., Any]:
    """torch's `checkpoint`, what it keeps of its arguments kept by `keeper`."""

    def keeping(function: Callable[..., Any], *args: Any, **words: Any) -> Any:
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, **words)
        # Masks and positions need no gradient; blocks share them, and they stay.
        wanted = {_identity(one) for one in args if isinstance(one, torch.Tensor) and one.requires_grad}

        def pack(tensor: torch.Tensor) -> Any:
            if _identity(tensor) in wanted and tensor.is_contiguous() and tensor.numel():
                return keeper.keep(tensor)
            return keeper.leave(tensor)

        keeper.begin()
        with torch.autograd.graph.saved_tensors_hooks(pack, keeper.give):
            return checkpoint(function, *args, **words)

    keeping.kept_by = keeper  # type: ignore[attr-defined]
    return keeping


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Autograd saves an alias: the same memory in the same shape."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype
