"""What torch's `checkpoint` keeps of a block: its input, handed to a keeper, and its weights, which it need not hold.

A block that is computed again saves what its backward needs through hooks of torch's own, weights too, as bare views
until that backward is through. Weights that come and go by themselves are kept by place instead, in the forward
already, and are none of what is computed again. An operation's backward asks for a weight and for what else it saved in
an order that is autograd's; the block is computed again before the first of them is given, or its parts would pass
through the memory that a weight was given in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from offload_trainer.offloading.autograd import current_backward, hooks_of_autograd


class BlockInputStore(Protocol):
    """Keeps blocks' inputs in a way of its own."""

    def begin(self) -> None:
        """A block begins that a backward will compute again."""

    def keep(self, tensor: torch.Tensor) -> Any:
        """In the place of a block's input, contiguous and not empty."""

    def leave(self, tensor: torch.Tensor) -> Any:
        """In the place of whatever else is saved of a block's arguments."""

    def give(self, kept: Any) -> torch.Tensor:
        """What was kept or left, as it was."""


def keep_inputs(model: nn.Module, keeper: BlockInputStore) -> None:
    """Let `model`'s checkpointed blocks keep their inputs so, those too for which it is turned on anew."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and getattr(checkpoint, "kept_by", None) is not keeper:
            setattr(module, "_gradient_checkpointing_func", _keeping(checkpoint, keeper))  # noqa: B010


class WeightReferences(Protocol):
    """Keeps weights that come and go."""

    def place_of(self, tensor: torch.Tensor) -> Any:
        """What to keep of a weight; None of any other tensor."""

    def unpack(self, saved: Any) -> torch.Tensor:
        """The weight of such a place, for what is computed next."""


def keep_weights(model: nn.Module, places: WeightReferences) -> None:
    """Let `model`'s checkpointed blocks keep weights so, and all else as torch does."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            setattr(module, "_gradient_checkpointing_func", _without_weights(checkpoint, places))  # noqa: B010


def _without_weights(checkpoint: Callable[..., Any], places: WeightReferences) -> Callable[..., Any]:
    def without(function: Callable[..., Any], *args: Any, **words: Any) -> Any:
        def inside(*given: Any, **named: Any) -> Any:
            with BlockSavedTensors(places).hooks():
                return function(*given, **named)

        return checkpoint(inside, *args, **words)

    return without


class BlockSavedTensors:
    """What a block saves in a forward, or as it is computed again: weights by place, the rest as torch's hooks do."""

    def __init__(self, places: WeightReferences) -> None:
        self._places, self._others = places, hooks_of_autograd()
        self._computed = -1  # the backward in which the block has been computed again
        if self._others is not None:
            self._first = self._others[0](torch.empty(0))  # before all that the block saves

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        place = self._places.place_of(tensor)
        if place is not None:
            return _Place(place)
        return self._others[0](tensor) if self._others else tensor.detach()

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Place):
            self._compute_again()
            return self._places.unpack(saved.place)
        found: torch.Tensor = self._others[1](saved) if self._others else saved
        return found

    def _compute_again(self) -> None:
        """If that is still to come in this backward."""
        now = current_backward()
        if self._others is not None and self._computed != now:
            self._computed = now
            self._others[1](self._first)


def recompute_views(places: WeightReferences) -> None:
    """Let selective checkpointing compute views of weights again, whose memory gets other values, and save none."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _CachingTorchDispatchMode) and not hasattr(mode.policy_fn, "without_views_of"):
            mode.policy_fn = _without_views(mode.policy_fn, places)


def _without_views(policy: Callable[..., Any], places: WeightReferences) -> Callable[..., Any]:
    def without_views(context: Any, operation: Any, *args: Any, **words: Any) -> Any:
        results = context.op_output if isinstance(context.op_output, list | tuple) else [context.op_output]
        if any(isinstance(one, torch.Tensor) and places.place_of(one) is not None for one in results):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return policy(context, operation, *args, **words)

    without_views.without_views_of = places  # type: ignore[attr-defined]
    return without_views


@dataclass(frozen=True)
class _Place:
    place: Any


def _keeping(checkpoint: Callable[..., Any], keeper: BlockInputStore) -> Callable[..., Any]:
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
