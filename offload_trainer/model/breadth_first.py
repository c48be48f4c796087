"""Run the micro-batches of a step breadth-first: all of them pass through a block before any enters the next block.

transformers' own forward runs for each micro-batch, in a separate thread that pauses inside each checkpointed block.
Only one thread runs at a time, and the blocks are computed by the calling thread, because torch would start a team of
threads for each thread that computes. The autograd graph is cut after each block; the cut keeps the gradient until it
is the previous block's turn. docs/design_streaming.md says why every bit is that of one micro-batch after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from threading import Thread, local
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.model.loader import checkpoint_blocks
from offload_trainer.model.loss import CausalLoss, adds_router_loss
from offload_trainer.model.tiny_model import TrialFailed, random_ids, try_on_tiny_model
from offload_trainer.offloading.ranks.cuts import Cuts, Like

Saving = Callable[[], AbstractContextManager[Any]]
_HERE = local()  # has the attribute `micro_batch` in a thread of one
_ROW, _MICRO, _CHUNK = 24, 3, 16  # the trial: tokens of a row, micro-batches, and tokens of a chunk of the loss


class BreadthFirst:
    """A causal language model that runs several micro-batches at a time, block by block."""

    def __init__(
        self, loss: CausalLoss, *, saving: Saving = nullcontext, cuts: Cuts | None = None, in_order: bool = False
    ) -> None:
        """Wrap the checkpointed blocks of `loss`; other forwards of the model are unchanged.

        `saving` returns a context for the threads that run parts of the forward: the caller's saved-tensor hooks.
        `cuts` connects the ranks of a pipeline. Each computes its own blocks only; another block's output is NaN, or is
        received from that block's rank if the next block is computed here. `in_order`: the forward does not take the
        micro-batches in reverse, so the first loss may begin while the last block computes the others.
        """
        self._loss, self._saving, self._cuts, self._in_order = loss, saving, cuts, in_order
        self._active: list[_MicroBatch] = []
        # Blocks that a micro-batch passes through, once one has.
        self._blocks: int | None = cuts.blocks if cuts else None
        self.only_hidden = True  # blocks have got one tensor that depends on weights, and have returned one like it
        for module in loss.model.modules():
            if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                setattr(module, "_gradient_checkpointing_func", partial(_block, module, checkpoint))  # noqa: B010

    @contextmanager
    def step(self, batches: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Wrap the forward and backward of a step; `batches` are the arguments of `CausalLoss` for each micro-batch."""
        self._active = [
            _MicroBatch(number, partial(self._body, *batch), batch, self._cuts) for number, batch in enumerate(batches)
        ]
        try:
            yield
        finally:
            self.only_hidden &= all(one.only_hidden for one in self._active)
            for one in self._active:
                one.close()
            self._active = []

    def _body(
        self, inputs: torch.Tensor, targets: torch.Tensor, seed: int | None, count: int, positions: torch.Tensor | None
    ) -> Any:
        with self._saving():
            return self._loss.run(inputs, positions, seed=seed)

    def forward(self) -> None:
        """Run all micro-batches through all blocks."""
        number = 0
        while self._blocks is None or number < self._blocks:
            modules = set()
            for one in self._active if self._in_order else reversed(self._active):
                if not one.advance():
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
        if self._cuts and self._cuts.here(number) and not self._in_order:
            for one in reversed(self._active):  # the rank of the last block sends in this order
                self._end(one)

    def backward(self, turn: Callable[[int], None], factors: Sequence[float]) -> list[torch.Tensor]:
        """Run the backward of all losses, of all blocks, and of what precedes them; return the losses.

        `turn` is called with the number of each micro-batch before its gradients arrive. The gradients are those of its
        mean loss times its factor. A rank of a pipeline that does not compute the losses returns zeros.
        """
        blocks, cuts = self._blocks or 0, self._cuts
        if cuts and not cuts.here(blocks):
            losses = [torch.zeros(()) for _ in factors]
        else:
            losses = [self._loss_backward(turn, *one) for one in enumerate(factors)]
        for block in (number for number in reversed(range(blocks)) if not cuts or cuts.here(number)):
            for number, one in enumerate(self._active):
                turn(number)  # before it waits for another rank, which may wait for the exchange that this ends
                if gradients := one.gradients(block):
                    torch.autograd.backward([edge for edge, _ in gradients], [values for _, values in gradients])
                    one.hand_back(block)
        if cuts:
            cuts.finish()
        return losses

    def _loss_backward(self, turn: Callable[[int], None], number: int, factor: float) -> torch.Tensor:
        one = self._active[number]
        turn(number)
        self._end(one)
        _, targets, _, count, _ = one.batch
        with one.random():
            loss = self._loss.of(one.output(), targets, count)
        (loss * factor).backward()
        one.hand_back(self._blocks or 0)
        return loss.detach()

    def _end(self, one: _MicroBatch) -> None:
        if not one.ended and one.advance():
            raise TrainerError("a micro-batch passes through more blocks than the one before it")


def _block(module: nn.Module, checkpoint: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """Run a checkpointed block; in a micro-batch's thread, let the calling thread do that."""
    one: _MicroBatch | None = getattr(_HERE, "micro_batch", None)
    if one is None:
        return checkpoint(*args, **words)
    # transformers collects router logits through context variables, so the block needs its thread's context.
    return one.ask(module, partial(copy_context().run, checkpoint, *args, **words), args, words)


class _Cut(torch.autograd.Function):
    """The identity, whose node ends a backward: it keeps the gradient for the edge to the graph that precedes it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor, edge: Any, block: int) -> torch.Tensor:
        ctx.edge, ctx.block, ctx.gradient = edge, block, None  # `block` is the number of the one that precedes it
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None]:
        ctx.gradient = gradients[0] if ctx.gradient is None else ctx.gradient + gradients[0]
        return None, None, None, None


class _Abandoned(BaseException):
    """Raised in a paused thread to end it."""


class _MicroBatch:
    """The forward of one micro-batch, in a thread that pauses inside each block, and the cuts of its graph."""

    def __init__(self, number: int, body: Callable[[], Any], batch: tuple[Any, ...], cuts: Cuts | None) -> None:
        self.batch = batch
        self.cuts: list[list[Any]] = []  # nodes of the cuts after each block, by its number
        self.only_hidden = True  # the same as in `BreadthFirst`, for this micro-batch
        self._number, self._cuts = number, cuts
        self._hidden: Any = None  # input of the current block
        self._last: Any = None  # output of the last one
        self._sent: dict[int, tuple[Any, Like]] = {}  # edges to the blocks whose output another rank has got
        self.module: nn.Module | None = None  # the block that it has passed through last
        self.ended = False
        self._body = body
        self._answer: Any = None  # output of `module`, which the thread waits for
        self._output: Any = None  # the body's return value
        self._error: BaseException | None = None  # an exception that the body raised
        self._thread: Thread | None = None
        self._asked, self._answered = SimpleQueue[Any](), SimpleQueue[Any]()
        self._generators: Any = None

    # -- in its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _HERE.micro_batch = self
        try:
            self._output = self._body()
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._asked.put(None)

    def ask(self, module: nn.Module, call: Callable[[], Any], args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Pause until the calling thread has computed the block by `call` and resumes this; return its output."""
        function, self._hidden, *others = args if len(args) > 1 else (None, None)
        others += [words, getattr(function, "keywords", {})]
        passed_on = isinstance(self._hidden, torch.Tensor) and (not self.cuts or self._hidden is self._last)
        more = any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(others))
        self.only_hidden &= passed_on and not more
        self._last = None
        self.module = module
        self._asked.put(call)
        del call, args, words, function, others
        answer = self._answered.get()
        if isinstance(answer, _Abandoned):
            raise answer
        return answer

    # -- in the calling thread ----------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Run the thread until it reaches a block, and run that; return False if the body ended instead."""
        with self.random():
            with self._cuts.before(len(self.cuts)) if self._cuts else nullcontext():
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="micro-batch", daemon=True)
                    self._thread.start()
                else:
                    answer, self._answer = self._answer, None
                    self._last = answer = self._received(answer) if isinstance(answer, Like) else answer
                    self._answered.put(answer)
                    del answer
                call = self._asked.get()
            self.ended = call is None
            error, self._error = self._error, None  # its frames hold tensors
            if error is not None:
                raise error
            if call is not None:
                self._answer = self._pass_through(call)
        return not self.ended

    def _pass_through(self, call: Callable[[], Any]) -> Any:
        """Return the block's output, cut off its graph, or what stands for it if another rank needs or computes it.

        What another rank sends is received when this micro-batch resumes, since others may be computed before.
        """
        block, cuts = len(self.cuts), self._cuts
        hidden, self._hidden = self._hidden, None
        self.cuts.append([])
        output = call() if cuts is None or cuts.here(block) else hidden
        both = isinstance(hidden, torch.Tensor) and isinstance(output, torch.Tensor)
        self.only_hidden &= both and (output.shape, output.dtype) == (hidden.shape, hidden.dtype)
        if cuts is None:
            return tree_map_only(torch.Tensor, partial(self._cut, block=block), output)
        if not self.only_hidden:
            raise UserError(
                "parallel.pipeline: blocks share more than hidden states, or change their dtype: leave it out"
            )
        like = Like(output.shape, output.dtype)
        if cuts.here(block) and cuts.here(block + 1):
            return self._cut(output, block=block)
        if cuts.here(block):
            self._sent[block] = get_gradient_edge(output), like
            cuts.send(output, micro_batch=self._number, block=block, forward=True)
        elif cuts.here(block + 1):
            return like
        return like.absent(hidden.device)

    def _received(self, like: Like) -> torch.Tensor:
        """Return the output of the block before the next one, which another rank sends."""
        assert self._cuts is not None
        block = len(self.cuts) - 1
        values = self._cuts.receive(like, micro_batch=self._number, block=block, forward=True)
        return self._cut(values, block=block, received=True)

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

    def output(self) -> Any:
        """Return the body's output once, with tensors from inside the blocks (router logits) cut off their graph."""
        output, self._output, self._last = self._output, None, None

        def each(tensor: torch.Tensor) -> torch.Tensor:
            block = _last_cut(tensor) + 1
            return self._cut(tensor, block=block) if block < len(self.cuts) else tensor

        return tree_map_only(torch.Tensor, each, output)

    def _cut(self, tensor: torch.Tensor, *, block: int, received: bool = False) -> torch.Tensor:
        if not (tensor.requires_grad or received):
            return tensor
        anchor = torch.empty(0, device=tensor.device, requires_grad=True)  # without it the result needs no gradient
        edge = None if received else get_gradient_edge(tensor)
        result: torch.Tensor = _Cut.apply(anchor, tensor.detach(), edge, block)
        self.cuts[block].append(result.grad_fn)
        return result

    def gradients(self, block: int) -> list[tuple[Any, torch.Tensor]]:
        """Return once, for each output of the block, the edge to the graph that precedes it and its gradient.

        Of a pipeline's block the gradient may come from another rank. Without any, this rank has nothing to compute.
        """
        if self._cuts and block in self._sent:
            edge, like = self._sent.pop(block)
            return [(edge, self._cuts.receive(like, micro_batch=self._number, block=block, forward=False))]
        known, self.cuts[block] = self.cuts[block], []
        return [(cut.edge, cut.gradient) for cut in known if cut.gradient is not None]

    def hand_back(self, block: int) -> None:
        """After the backward of a block, send its input's gradient to the rank that computes the block before it."""
        if self._cuts and block and not self._cuts.here(block - 1):
            (cut,), self.cuts[block - 1] = self.cuts[block - 1], []
            gradient, cut.gradient = cut.gradient, None  # a paused forward keeps the node
            self._cuts.send(gradient, micro_batch=self._number, block=block - 1, forward=False)

    def close(self) -> None:
        """End the thread, whether or not its body has ended."""
        if self._thread is not None:
            if not self.ended:
                self._answered.put(_Abandoned())
            self._thread.join()


def _last_cut(tensor: torch.Tensor) -> int:
    """Return the number of the last block that precedes a tensor in its graph, or -1."""
    left: list[Any] = [tensor.grad_fn]
    seen, found = set(), -1
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if getattr(node, "_forward_cls", None) is _Cut:
                found = max(found, node.block)
            left += [before for before, _ in node.next_functions]
    return found


def why_no_chain(model: PreTrainedModel, *, pipeline: bool = False) -> str:
    """Return why micro-batches cannot pass through models like `model` block by block, or "" if they can.

    Some blocks feed all later ones, which neither names nor architectures tell: a tiny model runs both ways.
    `pipeline`: different ranks compute the blocks, which must share nothing but hidden states.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    if skipped := [key for key, value in vars(text).items() if "layerdrop" in key and value]:
        return f"{name} skips blocks at random ({', '.join(skipped)})"
    if pipeline and adds_router_loss(model):
        return f"the loss of {name} has a part of the routers of all blocks (output_router_logits)"
    try:
        equal, only_hidden = try_on_tiny_model(model, _equal_both_ways)
    except TrialFailed as error:
        return f"in a trial, a tiny {name} did not run so ({error})"
    if equal and (only_hidden or not pipeline):
        return ""
    how = "its blocks share more than hidden states" if equal else "its gradients differ"
    return f"{name} is no chain of blocks, as a trial with a tiny one shows: {how}"


def _equal_both_ways(tiny: PreTrainedModel) -> tuple[bool, bool]:
    """Return whether gradients have the same bits and order block by block, and blocks share only hidden states."""
    checkpoint_blocks(tiny, reentrant=False)
    loss = CausalLoss(tiny.train(), chunk=_CHUNK)
    rows = [random_ids(tiny, 1, _ROW + 1) for _ in range(_MICRO)]
    batches = [(ids[:, :-1], ids[:, 1:], number, _ROW, None) for number, ids in enumerate(rows)]
    uses = Counter(id(parameter) for _, parameter in tiny.named_parameters(remove_duplicate=False))
    sums, now, once = dict[tuple[str, int], torch.Tensor](), 0, True

    def turn(number: int) -> None:
        nonlocal now
        now = number

    def take(name: str, parameter: Any) -> None:
        nonlocal once
        gradient, parameter.grad = parameter.grad, None
        if (name, now) in sums:
            once &= uses[id(parameter)] > 1  # a tied weight gets gradients of a micro-batch at several times
            gradient = sums[name, now] + gradient
        sums[name, now] = gradient

    for name, parameter in tiny.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(take, name))
    for number, batch in enumerate(batches):
        turn(number)
        loss(*batch).backward()
    if not sums:
        raise UserError("no gradient arrived")
    expected, sums, once = sums, {}, True
    model = BreadthFirst(loss)
    with model.step(batches):
        model.forward()
        model.backward(turn, [1.0] * _MICRO)
    # A stable sort by weight shows the order in which each weight's micro-batches came.
    in_order = once and sorted(sums, key=itemgetter(0)) == sorted(sums)
    equal = in_order and sums.keys() == expected.keys() and all(torch.equal(sums[key], expected[key]) for key in sums)
    return equal, model.only_hidden
