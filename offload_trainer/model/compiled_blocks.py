"""Compile the inside of blocks with torch.compile (`model.compile=on`), once for all blocks of a shape.

    block(...)  ──> CompiledForward ──> hooks that fetch weights ──> torch.compile(forward of the class)(block, ...)
    checkpoint  ──> the same, in the forward and in the recomputation

Only what a block computes is compiled. Hooks that fetch its weights and torch's checkpointing stay outside, so nothing
in the compiled function depends on where weights are. torch passes a block's parameters to it as arguments, so it
reads whatever memory they have at the call. The class's own forward is compiled, with the block as an argument, so that
blocks of equal shapes share it.

Evaluation and samples are not compiled: their rows have other lengths, and each length would need another compilation.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.probes.tiny_model import TrialFailed, random_ids, try_on_tiny_model
from offload_trainer.model.shape import block_names
from offload_trainer.optim.kernel_cache import private_directory
from offload_trainer.packages import is_installed, to_install
from offload_trainer.safe_files import one_line

_ROW = 16


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile the blocks of `model` at their first training forward. Activation checkpointing is already enabled.

    Raises:
        TrainerError: the cache of compiled code is not this user's alone.
    """
    blocks = [model.get_submodule(name) for name in block_names(model)]
    # torch's own default is a directory in /tmp that anybody may create first.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_directory("inductor")))
    # Helper processes would outlive a killed run, and their memory is in no plan.
    torch._inductor.config.compile_threads = 1
    # Blocks may all have different shapes. torch would give up after eight.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    for block in blocks:
        block.forward = CompiledForward(block, backend=backend)


class CompiledForward:
    """A replacement forward of a block that runs hooks, then the compiled forward of the block's class."""

    def __init__(self, block: nn.Module, *, backend: str) -> None:
        self._block, self._of_class = block, type(block).forward
        self._hooks: list[Callable[..., None]] = []
        body = _checkpointed(self._of_class)
        self._compiled = _compiled(body or self._of_class, backend)
        self._checkpoints = body is not None  # the class's forward checkpoints what is compiled
        if self._checkpoints and (checkpoint := getattr(block, "_gradient_checkpointing_func", None)) is not None:
            setattr(block, "_gradient_checkpointing_func", partial(self._inside, checkpoint))  # noqa: B010

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> None:
        """Register a hook that fetches the weights of the whole block, before each forward and recomputation."""
        self._hooks.append(hook)

    def __call__(self, *args: Any, **words: Any) -> Any:
        if self._block.training and torch.is_grad_enabled():
            if not (self._checkpoints and getattr(self._block, "gradient_checkpointing", False)):
                return self._run(*args, **words)
        else:
            self._fetch()
        return self._of_class(self._block, *args, **words)

    def _inside(self, checkpoint: Callable[..., Any], function: Any, *args: Any, **words: Any) -> Any:
        """Checkpoint the compiled forward in place of `function`, transformers' `partial` of the block's forward."""
        return checkpoint(partial(self._run, **function.keywords), *args, **words)

    def _run(self, *args: Any, **words: Any) -> Any:
        self._fetch()
        try:
            return self._compiled(self._block, *args, **words)
        except TorchDynamoException as error:
            raise UserError(
                f"model.compile=on: torch cannot compile {type(self._block).__name__} as a whole: {one_line(error)}. "
                "Use model.compile=off"
            ) from error

    def _fetch(self) -> None:
        for hook in self._hooks:
            hook(self._block, ())


@functools.cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return the compiled function; a graph break inside a block is an error, since its parts would be compiled."""
    return torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)


def _checkpointed(forward: Any) -> Callable[..., Any] | None:
    """Return the function that a block's `forward` checkpoints; None if that happens before `forward`.

    Earlier versions of transformers checkpoint in `__call__`; later ones wrap each class's forward.
    """
    code = getattr(forward, "__code__", None)
    if code is None or "_gradient_checkpointing_func" not in code.co_names:
        return None
    inner: Callable[..., Any] = inspect.unwrap(forward, stop=lambda one: one is not forward)
    return inner


def refuse_uncompiled(model: PreTrainedModel) -> None:
    """Raise UserError if blocks like those of `model` cannot be compiled, or nothing here can compile them."""
    compilers = [os.environ.get("CXX", "g++")] if not torch.cuda.is_available() else ["cc", "gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        raise UserError(
            f"model.compile=on needs a C++ compiler, and there is no {compilers[0]}: install g++, or name another one "
            "with the variable CXX; or use model.compile=off"
        )
    if torch.cuda.is_available() and not is_installed("triton"):
        raise UserError(f"model.compile=on needs triton on a GPU, which is not installed: {to_install('triton')}")
    try:
        why = try_on_tiny_model(model, _why_not, all_classes=False)
    except TrialFailed:
        return  # the first step shows it
    if why:
        raise UserError(why)


def _why_not(tiny: PreTrainedModel) -> str:
    """Return why the blocks of `tiny` cannot be traced as a whole, or ""; nothing is compiled for it."""
    compile_blocks(tiny.train(), backend="eager")
    try:
        with torch.enable_grad():
            tiny(input_ids=random_ids(tiny, 1, _ROW), use_cache=False)
    except UserError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return ""
