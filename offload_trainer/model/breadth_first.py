"""Run the micro-batches of a step breadth-first: all of them pass through a block before any enters the next block.

    forward    block 0: micro-batch 3 2 1 0   block 1: 3 2 1 0   ...          each keeps its input (checkpointing)
    backward   loss: 0 1 2 3   ...   block 1: 0 1 2 3   block 0: 0 1 2 3      each recomputes its block

Weights are then needed once a pass, not once a micro-batch. The forward takes the micro-batches in reverse, so that the
backward needs the inputs in the reverse order of the forward.

transformers' own forward runs for each micro-batch, in a separate thread that pauses inside each checkpointed block.
Masks, positions and everything else between the blocks are therefore transformers' code. Only one thread runs at a
time, and the blocks themselves are computed by the calling thread, because torch would start a team of threads for each
thread that computes. torch's generators are swapped at each change, so each micro-batch draws what it would draw alone.

The autograd graph is cut after each block. A backward through one block of one micro-batch ends at the cut, which
keeps the gradient until it is the previous block's turn. The operations and their order within a micro-batch, and the
order of micro-batches for each weight, are those of one micro-batch after the other, so every bit is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from offload_trainer.errors import TrainerError
from offload_trainer.model.loss import CausalLoss

Saving = Callable[[], AbstractContextManager[Any]]


class BreadthFirst:
    """A causal language model that runs several micro-batches at a time, block by block."""

    def __init__(self, loss: CausalLoss, *, saving: Saving = nullcontext) -> None:
        """Wrap the checkpointed blocks of `loss`; other forwards of the model are unchanged.

        `saving` returns a context for the threads that run parts of the forward: the caller's saved-tensor hooks.
        """
        self._loss, self._saving = loss, saving
        self._running: _MicroBatch | None = None  # the micro-batch whose thread runs
        self._active: list[_MicroBatch] = []
        self._blocks: int | None = None  # blocks that a micro-batch passes through, once one has
        for module in loss.model.modules():
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None:
                setattr(module, "_gradient_checkpointing_func", partial(self._block, module, checkpoint))  # noqa: B010

    def _block(self, module: nn.Module, checkpoint: Callable[..., Any], *args: Any, **words: Any) -> Any:
        if self._running is None:
            return checkpoint(*args, **words)
        # transformers collects router logits through context variables, so the block needs its thread's context.
        return self._running.ask(module, partial(copy_context().run, checkpoint, *args, **words))

    @contextmanager
    def step(self, batches: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Wrap the forward and backward of a step; `batches` are the arguments of `CausalLoss` for each micro-batch."""
        self._active = [_MicroBatch(partial(self._body, *batch), batch) for batch in batches]
        try:
            yield
        finally:
            for one in self._active:
                one.close()
            self._active = []

    def _body(
        self, inputs: torch.Tensor, targets: torch.Tensor, seed: int | None, count: int, positions: torch.Tensor | None
    ) -> Any:
        with self._saving():
            if seed is not None:
                torch.manual_seed(seed)
            return self._loss.run(inputs, positions)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run all micro-batches through all blocks."""
        number = 0
        while self._blocks is None or number < self._blocks:
            modules = set()
            for one in reversed(self._active):
                if not self._resume(one):
                    break
                modules.add(one.module)
            if not modules:  # the first micro-batch of the first step has ended: it has passed through all blocks
                self._blocks = number
                return
            if len(modules) > 1 or one.ended:
                raise TrainerError(
                    "micro-batches pass through different blocks of this model (it skips some at random?), and its "
                    "gradients cannot be added in order: set tiered.micro_batch_order=depth_first"
                )
            number += 1

    def _resume(self, one: _MicroBatch) -> bool:
        """Run a micro-batch through its next block; return False if its body ended instead."""
        self._running = one
        try:
            with one.random():
                call = one.resume()
                self._running = None
                if call is not None:
                    one.answer = one.cut(call(), block=len(one.cuts))
        finally:
            self._running = None
        return call is not None

    # -- backward -----------------------------------------------------------------------------------------------------

    def loss(self, number: int) -> torch.Tensor:
        """Return the mean loss of a micro-batch that has passed through all blocks, where its backward ends."""
        one = self._active[number]
        if not one.ended and self._resume(one):
            raise TrainerError("a micro-batch passes through more blocks than the one before it")
        _, targets, _, count, _ = one.batch
        with one.random():
            return self._loss.of(one.cut_inside(), targets, count)

    def backward(self, turn: Callable[[int], None]) -> None:
        """Run the backward of all blocks and of what precedes them, after that of all losses.

        `turn` is called with the number of each micro-batch before its gradients arrive.
        """
        for block in reversed(range(self._blocks or 0)):
            for number, one in enumerate(self._active):
                known = [cut for cut in one.cuts[block] if cut.gradient is not None]
                one.cuts[block] = []
                if known:
                    turn(number)
                    torch.autograd.backward([cut.edge for cut in known], [cut.gradient for cut in known])


@dataclass
class _Cut:
    """A place where the graph of a micro-batch is cut: the edge to what precedes it, and the gradient for that edge."""

    edge: GradientEdge
    block: int  # number of the block that precedes it
    gradient: torch.Tensor | None = None


class _CutFunction(torch.autograd.Function):
    """The identity, whose backward keeps the gradient in a `_Cut` and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor, cut: _Cut) -> torch.Tensor:
        ctx.cut = cut
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        cut: _Cut = ctx.cut
        cut.gradient = gradients[0] if cut.gradient is None else cut.gradient + gradients[0]
        return None, None, None


class _Abandoned(BaseException):
    """Raised in a paused thread to end it."""


@dataclass(eq=False)
class _MicroBatch:
    """The forward of one micro-batch, in a thread that pauses inside each block, and the cuts of its graph."""

    body: Callable[[], Any]
    batch: tuple[Any, ...]
    cuts: list[list[_Cut]] = field(default_factory=list)  # the cuts after each block, by its number
    module: nn.Module | None = None  # the block that it has passed through last
    answer: Any = None  # output of `module`, which the thread waits for
    ended: bool = False
    _output: Any = None  # what the body has returned
    _error: BaseException | None = None  # what it has raised
    _thread: Thread | None = None
    _asked: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    _answered: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    _generators: Any = None

    # -- in its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._output = self.body()
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._asked.put(None)

    def ask(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Pause until the calling thread has computed the block and resumes this micro-batch; return its output."""
        self.module = module
        self._asked.put(call)
        del call
        answer = self._answered.get()
        if isinstance(answer, _Abandoned):
            raise answer
        return answer

    # -- in the calling thread ----------------------------------------------------------------------------------------

    def resume(self) -> Callable[[], Any] | None:
        """Run the thread until it reaches a block; return that block's call, or None if the body has ended."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="micro-batch", daemon=True)
            self._thread.start()
        else:
            answer, self.answer = self.answer, None
            self._answered.put(answer)
            del answer
        call: Callable[[], Any] | None = self._asked.get()
        self.ended = call is None
        error, self._error = self._error, None  # its frames hold tensors
        if error is not None:
            raise error
        return call

    @contextmanager
    def random(self) -> Iterator[None]:
        """Give torch's generators the state in which this micro-batch left them, and keep their state afterwards."""
        if self._generators is not None:
            torch.set_rng_state(self._generators[0])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(self._generators[1])
        yield
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._generators = torch.get_rng_state(), on_gpu

    def cut(self, output: Any, *, block: int) -> Any:
        """Return a block's output, cut off its graph."""
        self.cuts.append([])
        return tree_map_only(torch.Tensor, partial(self._cut, block=block), output)

    def cut_inside(self) -> Any:
        """Return the body's output, with tensors from inside the blocks (router logits) cut off their graph."""
        output, self._output = self._output, None

        def each(tensor: torch.Tensor) -> torch.Tensor:
            block = _last_cut(tensor) + 1
            return self._cut(tensor, block=block) if block < len(self.cuts) else tensor

        return tree_map_only(torch.Tensor, each, output)

    def _cut(self, tensor: torch.Tensor, *, block: int) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        made = _Cut(get_gradient_edge(tensor), block)
        self.cuts[block].append(made)
        anchor = torch.empty(0, device=tensor.device, requires_grad=True)  # without it the result needs no gradient
        result: torch.Tensor = _CutFunction.apply(anchor, tensor.detach(), made)
        return result

    def close(self) -> None:
        """End the thread, whether or not its body has ended."""
        if self._thread is not None:
            if not self.ended:
                self._answered.put(_Abandoned())
            self._thread.join()


def _last_cut(tensor: torch.Tensor) -> int:
    """Return the number of the last block that precedes a tensor in its graph, or -1."""
    seen, left, found = set(), [tensor.grad_fn], -1
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        cut = getattr(node, "cut", None)
        if isinstance(cut, _Cut):
            found = max(found, cut.block)
        left += [before for before, _ in node.next_functions]
    return found
