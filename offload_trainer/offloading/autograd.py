"""What is asked of torch's autograd that it has no public name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def in_backward() -> bool:
    """Whether this thread runs a part of a backward."""
    return current_backward() != -1


def current_backward() -> int:
    """The number of the backward that this thread runs a part of, -1 where it runs none."""
    return int(torch._C._current_graph_task_id())


def unprotected() -> bool:
    """Whether autograd would save weights as they lie in memory now: outside all passes, and not in a backward."""
    saving = torch.is_grad_enabled() and not in_backward()
    return saving and hooks_of_autograd() is None


def hooks_of_autograd() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Those that a tensor saved now would go through."""
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def set_memory(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = memory
