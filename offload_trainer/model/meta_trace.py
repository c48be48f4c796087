"""Instruments for a pass on meta tensors: allocations and releases as on a device, and the order of its weights.

activations.py runs the passes inside them and computes memory from what they record.

    AllocationTrace   bytes allocated and released, in order, with marks
    Kernels           attention and dropout as the device has them: fused kernels keep their output and one logarithm
                      per row (a CPU has none with dropout), a GPU keeps a byte per element that it may drop
    Gradient, TileStub   in place of the layers behind a block, and of a module that runs in pieces
    UnitsOfWeights    the order in which forward and backward use weights
    Operations        a budget, beyond which `TooLong` is raised

Meta tensors have no values. Where code asks for one (is anything padded, are positions consecutive), the answer is that
of usual rows; whether rows are packed is for the caller to say.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from offload_trainer.model.tiled_mlp import Tiled, zeros
from offload_trainer.offloading.autograd import in_backward
from offload_trainer.plan.shape import Order, unit_of

_aten = torch.ops.aten
_MOST_OPERATIONS = 32_000  # limit for all passes and attempts of one count: about two seconds
PIECE = "piece"  # name of the mark where a piece begins; the next mark is where it ends


class _Attention(torch.autograd.Function):
    """Model the memory of fused attention: its output, a logarithm per row, and the workspace of its backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, workspace: bool) -> torch.Tensor:
        if mask is not None and mask.dtype is torch.bool:
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        # It has the query's memory order, like that of flash attention. If heads are the outer dimension in memory, as
        # after a `cat`, the next operation copies the output, and both stay.
        heads_inside, width = query.stride(1) < query.stride(2), value.shape[-1]
        output = _heads_inside(query, width) if heads_inside else query.new_empty(*query.shape[:-1], width)
        ctx.workspace = workspace
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        # A GPU accumulates the query's gradient in fp32, and the gradients of shared keys and values per query head.
        work = [query.new_empty(query.shape, dtype=torch.float32)] if ctx.workspace else []
        if ctx.workspace and key.shape[1] != query.shape[1]:
            work += [torch.empty_like(query), torch.empty_like(query)]
        found = [_heads_inside(x) if x.requires_grad else None for x in (query, key, value)]
        del work
        return *found, None, None


def _heads_inside(like: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Return an empty [rows, heads, tokens, width] in the usual memory order, with the heads of a token adjacent."""
    rows, heads, tokens, same = like.shape
    return like.new_empty(rows, tokens, heads, width or same).transpose(1, 2)


class Gradient(torch.autograd.Function):
    """Produce a gradient of the input's size, in place of the layers that follow."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.like = hidden.shape, hidden.dtype
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].new_empty(ctx.like[0], dtype=ctx.like[1])


class Kernels(TorchFunctionMode):
    """Replace operations whose kernels on the device hold other memory than torch's meta implementation."""

    def __init__(self, *, gpu: bool) -> None:
        super().__init__()
        self._gpu, self.differs = gpu, False  # becomes true if the other kind of device would hold different memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = {nn.functional.scaled_dot_product_attention: self._attend, nn.functional.dropout: self._drop}
        return replaced.get(func, func)(*args, **(kwargs or {}))

    def _attend(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        on_cpu = not dropout_p and query.shape[-1] == value.shape[-1]
        self.differs |= not on_cpu
        if self._gpu or on_cpu:
            return _Attention.apply(query, key, value, attn_mask, self._gpu)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    def _drop(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        self.differs |= training and p > 0
        if self._gpu and training and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]  # a GPU keeps one byte per element; a CPU keeps a number
        return nn.functional.dropout(input, p, training, inplace)


class TooLong(Exception):
    """The architecture runs too many operations to be counted at a start: token by token, or many kinds of blocks."""


class Operations:
    """A budget of operations. An attempt may use 2/3 of the remaining budget, and its first pass 1/3 of that."""

    def __init__(self) -> None:
        self._left = _MOST_OPERATIONS
        self.attempt()

    def attempt(self) -> None:
        share = self._left * 2 // 3
        self._end, self._until = self._left - share, self._left - share // 3

    def resume(self) -> None:
        """Release the rest of the attempt's budget after its first pass."""
        self._until = self._end

    def take(self) -> None:
        self._left -= 1
        if self._left < self._until:
            raise TooLong


class AllocationTrace(TorchDispatchMode):
    """Record every allocation (+ bytes) and release (- bytes) in order, with marks in between."""

    def __init__(
        self, given: Iterator[torch.Tensor], operations: Operations, *, packed: bool, units: Mapping[int, str]
    ) -> None:
        """Start with the tensors `given`. `packed`: rows hold several documents. `units`: the unit of each storage."""
        super().__init__()
        self.events: list[int] = []
        self.marks: list[tuple[str, int, int]] = []  # name, number, and the count of events before it
        self.called: list[int] = []  # indices of the blocks that ran, in order
        self.forward: list[str] = []  # units of the weights that modules use when they begin, in order
        self.backward: list[str] = []  # units of the weights that operations of the backward get, in order
        self._operations = operations
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in given}
        self._any, self._packed, self._units = False, packed, units

    def mark(self, what: str, number: int = 0) -> None:
        self.marks.append((what, number, len(self.events)))

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Mark memory that is in use inside the context as that of a piece of the micro-batch."""
        self.mark(PIECE)
        yield
        self.mark("end of the piece")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            # The check whether all positions are consecutive is answered with no for packed rows. Nothing is padded or
            # infinite.
            return not self._any and not self._packed
        if func.overloadpacket in (_aten.any, _aten.all):
            self._any = func.overloadpacket is _aten.any
        self._operations.take()
        if in_backward():
            given = (value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor))
            storages = (tensor.untyped_storage()._cdata for tensor in given)
            self.backward += [self._units[storage] for storage in storages if storage in self._units]
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._released(key, size))
            self.events.append(size)

    def at_marks(self) -> list[int]:
        """Return the bytes in use: the maximum before the first mark, the value at it, and so on until the end."""
        held, found, start = list(accumulate(self.events, initial=0)), [], 0
        for end in (*(event for _, _, event in self.marks), len(self.events)):
            found += [max(held[start : end + 1]), held[end]]
            start = end
        return found

    def _released(self, key: int, size: int) -> None:
        del self._known[key]
        self.events.append(-size)


class UnitsOfWeights:
    """The units whose weights a pass uses, to find their order in a pass of the model's body and then one of its head.

        forward    a module uses its own weights when it begins, a block all weights inside it, as the engine fetches
        backward   an autograd operation uses a weight that was saved for it; embeddings are not saved, nor are frozen
                   weights with nothing trained before them

    Modules that text does not pass through (a vision tower) do not occur, whatever the order of registration.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Find the units; afterwards the parameters' storages must stay the same."""
        self._blocks, inside = blocks, {model.get_submodule(name) for name in blocks}
        unit = {parameter: unit_of(name, blocks)[0] for name, parameter in model.named_parameters()}
        used = {m: [unit[parameter] for parameter in m.parameters(recurse=m in inside)] for m in model.modules()}
        self.of_module = {module: units for module, units in used.items() if units}
        self.of_storage = {parameter.untyped_storage()._cdata: name for parameter, name in unit.items()}

    def order(self, body: AllocationTrace, head: AllocationTrace, *, ran: Sequence[int]) -> Order | None:
        """Return the recorded order, or None if no blocks are known.

        `ran` lists the blocks that ran; every other block is used like the next one that did.
        """
        if not self._blocks:
            return None
        others = {
            block: self._blocks[min(n for n in ran if n > number)]
            for number, block in enumerate(self._blocks)
            if number not in ran
        }
        backward = _filled([*head.backward, *body.backward][::-1], others)
        return Order(_filled([*body.forward, *head.forward], others), backward[::-1])


def _filled(units: Sequence[str], others: Mapping[str, str]) -> tuple[str, ...]:
    """Drop consecutive repetitions, and insert each block that did not run before the block that it resembles."""
    found: list[str] = []
    for unit, _ in groupby(units):
        if unit not in found:
            found += [other for other, like in others.items() if like == unit]
        found.append(unit)
    return tuple(found)


class TileStub(Tiled):
    """A tile (tiled_mlp.py) with one piece as long as the micro-batch, whose memory is marked as that of a piece.

    The number of pieces depends on the row length, so a pass with real ones would not show how memory grows.
    """

    def __init__(self, module: nn.Module, held: AllocationTrace) -> None:
        super().__init__(module, 0)
        self._held = held

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with self._held.piece():
            self._whole(_flat(x))
        return output

    def gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, back: torch.Tensor | None, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        sums: list[torch.Tensor | None] = [zeros(weight) for weight in weights]
        with self._held.piece(), torch.enable_grad():
            piece = _flat(x).requires_grad_()
            torch.autograd.grad(self._whole(piece), [piece, *weights], _flat(gradient), allow_unused=True)
        return sums


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return [rows, tokens, width] or [tokens, width] as one row, which requires no gradient."""
    return values.detach().reshape(*(1,) * (values.dim() - 2), -1, values.shape[-1])
