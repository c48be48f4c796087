"""What is asked of torch's autograd that it has no public name for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes


def in_backward() -> bool:
    """Whether this thread runs a part of a backward."""
    return current_backward() != -1


def current_backward() -> int:
    """The number of the backward that this thread runs a part of, -1 where it runs none."""
    return int(torch._C._current_graph_task_id())


def unprotected() -> bool:
    """Return whether autograd would save weights as they lie in memory now, with no hooks in between."""
    return torch.is_grad_enabled() and hooks_of_autograd() is None


def recording() -> str | None:
    """Return what records operations instead of running them, or runs them on stand-ins; None where nothing does."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, jvp, ...)"
    if _len_torch_dispatch_stack() and any(_get_dispatch_mode(key) is not None for key in _RECORDING):
        return "torch.export, make_fx or FakeTensorMode"
    return None


_RECORDING = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function; torch.compile runs it as it is, instead of tracing it."""

    def offloaded_weights_cannot_be_traced(*args: Any, **words: Any) -> Any:  # torch's errors have this name
        return function(*args, **words)

    as_it_is = _disable_dynamo(offloaded_weights_cannot_be_traced)

    def run(*args: Any, **words: Any) -> Any:
        return (as_it_is if is_compiling() else function)(*args, **words)  # the first takes 6 us longer

    return run


def keep_by(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Use these saved-tensor hooks for what the backward node that runs now saves for a second backward.

    torch restores the thread's state, these hooks too, as each node ends.
    """
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def version_of(parameter: nn.Parameter) -> int:
    """Return the counter that torch increments whenever the parameter, or a view of it, is written to."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


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


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which modes that watch or replace operations, selective checkpointing's, do not see any."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()
