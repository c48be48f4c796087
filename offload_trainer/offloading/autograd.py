"""Wrap the private torch functions (autograd, checkpoint, dispatch modes, dynamo) that offloading needs.

Edit this module when a new torch version renames one of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachingTorchDispatchMode

from offload_trainer.common.errors import UserError


def in_backward() -> bool:
    """Return whether this thread is running a node of a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def unprotected() -> bool:
    """Return whether autograd would save tensors directly: gradients are enabled and no saved-tensor hooks are set."""
    return torch.is_grad_enabled() and hooks_of_autograd() is None


def refuse_recording(what: str) -> None:
    """Raise UserError if operations are traced or transformed, because a trace would record memory, not weights."""
    if torch._C._get_tracing_state() is not None:
        by = "torch.jit.trace"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        by = "a transform of torch.func (vmap, grad, jvp, ...)"
    elif _len_torch_dispatch_stack() and any(_get_dispatch_mode(key) is not None for key in _RECORDING):
        by = "torch.export, make_fx or FakeTensorMode"
    else:
        return
    raise UserError(
        f"{what} was used inside {by}, which cannot follow weights that come and go: give it a module that is not "
        "offloaded, with copies of the weights (session.named_weights(), or session.export)"
    )


_RECORDING = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a wrapper that torch.compile calls without tracing it."""

    def offloaded_weights_cannot_be_traced(*args: Any, **words: Any) -> Any:  # this name appears in torch's errors
        return function(*args, **words)

    as_it_is = _disable_dynamo(offloaded_weights_cannot_be_traced)

    def run(*args: Any, **words: Any) -> Any:
        return (as_it_is if is_compiling() else function)(*args, **words)  # `as_it_is` costs 6 us more

    return run


# Push saved-tensor hooks (pack, unpack) for the tensors that the running backward node saves for a double backward.
# torch restores the thread's hooks when the node ends.
keep_by = torch._C._autograd._push_saved_tensors_default_hooks


def version_of(parameter: nn.Parameter) -> int:
    """Return the version counter, which torch increments at each write to the parameter or a view of it."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


def hooks_of_autograd() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost saved-tensor hooks (pack, unpack) of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def set_memory(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Set `parameter.data` without calling `__torch_function__`, which refuses that for offloaded parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = memory


def without_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes (such as FlopCounterMode), so that none of them sees copies."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()


def saves_selected_results() -> bool:
    """Return whether torch's selective checkpointing is saving results of operations on this thread."""
    return any(isinstance(mode, _CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())
