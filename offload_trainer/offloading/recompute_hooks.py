"""Hook into torch's activation checkpointing: weights that a block saves are replaced by references to them.

`checkpoint` has its own saved-tensor hooks, which would save a recomputed block's weights as plain views until its
backward ends. Weights that are fetched and evicted are saved as references (unit, offset) instead, already in the
forward, without passing through torch's hooks. Autograd unpacks a weight and other saved tensors of an operation in any
order. So the block is recomputed before the first weight is returned; otherwise the recomputation would fetch other
weights into the same buffer.
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


class WeightReferences(Protocol):
    """The references to offloaded weights (`WeightPrefetcher`)."""

    def reference_of(self, tensor: torch.Tensor) -> Any:
        """Return the reference of a tensor that views an offloaded weight, or None for any other tensor."""

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the weight of a reference, on the device."""


def keep_weights(model: nn.Module, references: WeightReferences) -> None:
    """Make `model`'s checkpointed blocks save weights as references, and everything else as torch does."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            setattr(module, "_gradient_checkpointing_func", _without_weights(checkpoint, references))  # noqa: B010


def _without_weights(checkpoint: Callable[..., Any], references: WeightReferences) -> Callable[..., Any]:
    def without(function: Callable[..., Any], *args: Any, **words: Any) -> Any:
        def inside(*given: Any, **named: Any) -> Any:
            with BlockSavedTensors(references).hooks():
                return function(*given, **named)

        return checkpoint(inside, *args, **words)

    return without


class BlockSavedTensors:
    """Saved-tensor hooks inside a checkpointed block: weights as references, other tensors through torch's hooks."""

    def __init__(self, references: WeightReferences) -> None:
        self._references, self._others = references, hooks_of_autograd()
        self._recomputed_in = -1  # id of the backward in which the block was recomputed
        if self._others is not None:
            self._first = self._others[0](torch.empty(0))  # unpacking this first tensor triggers the recomputation

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        reference = self._references.reference_of(tensor)
        if reference is not None:
            return _Reference(reference)
        return self._others[0](tensor) if self._others else tensor.detach()

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Reference):
            backward = current_backward()
            if self._others is not None and self._recomputed_in != backward:
                self._recomputed_in = backward
                self._others[1](self._first)  # torch recomputes the block
            return self._references.unpack(saved.reference)
        found: torch.Tensor = self._others[1](saved) if self._others else saved
        return found


def recompute_views(references: WeightReferences) -> None:
    """Make active selective checkpointing recompute views of weights, because their memory will be reused."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _CachingTorchDispatchMode) and not hasattr(mode.policy_fn, "without_views_of"):
            mode.policy_fn = _without_views(mode.policy_fn, references)


def _without_views(policy: Callable[..., Any], references: WeightReferences) -> Callable[..., Any]:
    def without_views(context: Any, operation: Any, *args: Any, **words: Any) -> Any:
        results = context.op_output if isinstance(context.op_output, list | tuple) else [context.op_output]
        if any(isinstance(one, torch.Tensor) and references.reference_of(one) is not None for one in results):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return policy(context, operation, *args, **words)

    without_views.without_views_of = references  # type: ignore[attr-defined]
    return without_views


@dataclass(frozen=True)
class _Reference:
    """A saved reference to a weight."""

    reference: Any
