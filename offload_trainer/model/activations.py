"""Counting of activation memory in a model's forward and backward, for any architecture, on the meta device.

Allocations and releases are recorded in order, and again with twice the rows and twice the tokens, which shows how each
grows. Meta tensors have no memory, so a count costs only operator dispatch: three passes over three blocks of each
kind. They have no values either: where code asks for one (is anything padded, are positions consecutive), the answer is
that of usual rows. Experts are counted as transformers groups them, one row for each token and chosen expert.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offload_trainer.model.loss import CausalLoss
from offload_trainer.offloading.autograd import in_backward
from offload_trainer.optim.cross_entropy import cross_entropy
from offload_trainer.plan.shape import Activations, Growth, Order, Part, pruned, unit_of

_aten = torch.ops.aten
_ROWS = 2  # rows of the smallest pass; with a single row, sums and repetitions over rows would not show
_NUMBERS = 64  # bytes; smaller tensors are single numbers and do not count
_LENGTHS = 256, 16  # row lengths in tokens; the shorter one is for architectures that process tokens one by one
_LONG = 65536  # row length in tokens at which the plausibility of kept memory is checked
# attributes that differ between otherwise equal blocks
_NUMBER = re.compile(r"(^|_)(idx|index|id|number|num|i)$|layer_num")
_MOST_OPERATIONS = 32_000  # limit for all passes and attempts of one count: about two seconds


@dataclass(frozen=True)
class ModelMemory:
    """A model's activation memory, and the order in which its passes need its weights."""

    on_gpu: Activations
    on_cpu: Activations
    order: Order | None  # None if the blocks are unknown


def count_activations(
    model: PreTrainedModel,
    blocks: Sequence[str],
    *,
    dtype: torch.dtype,
    whole_logits: bool = False,
    packed: bool = False,
    chunk: int = 1024,
) -> ModelMemory | None:
    """Count the activation memory of `model` on a GPU and on a CPU when it runs in `dtype`.

    `model` is on the meta device, with its frozen parameters set; its parameters are in `dtype` afterwards. `packed` is
    for rows of several documents, with a mask between them. `chunk` is `model.loss_chunk`. Returns None for a model
    that cannot run on meta tensors.
    """
    with suppress(Exception):  # an architecture's code may raise anything
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.train()
        loss = CausalLoss(model, chunk=chunk, whole=whole_logits)
        count = _Count(loss, blocks, packed=packed)
        counted = count.with_few_blocks()
        if not count.kernels.differs:
            return counted
        count.kernels = Kernels(gpu=False)
        return replace(counted, on_cpu=count.with_few_blocks().on_cpu)
    return None


class _Count:
    """Traced passes of a model's body and head, with a GPU's kernels or a CPU's; the loss is counted for both."""

    def __init__(self, loss: CausalLoss, blocks: Sequence[str], *, packed: bool) -> None:
        """Set up the passes; afterwards the parameters' storages must stay the same."""
        self.kernels, self._loss, self._model = Kernels(gpu=True), loss, loss.model
        self._packed, self._left = packed, _MOST_OPERATIONS
        self._named, inside = blocks, {self._model.get_submodule(name) for name in blocks}
        unit = {parameter: unit_of(name, blocks)[0] for name, parameter in self._model.named_parameters()}
        used = {m: [unit[weight] for weight in m.parameters(recurse=m in inside)] for m in self._model.modules()}
        self._units_of = {module: units for module, units in used.items() if units}  # units of the fetched weights
        self._unit_in = {parameter.untyped_storage()._cdata: name for parameter, name in unit.items()}
        # In an architecture that does not name its blocks they are the modules that transformers checkpoints.
        self._blocks = blocks or [n for n, m in loss.model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
        self._modules = [self._model.get_submodule(name) for name in self._blocks]
        known: dict[Any, int] = {}
        self._kinds = [known.setdefault(_signature(block), len(known)) for block in self._modules]

    def with_few_blocks(self) -> ModelMemory:
        """Count with three or two blocks of each kind if the model runs with so few, otherwise with all."""
        numbers = [[n for n, other in enumerate(self._kinds) if other == kind] for kind in set(self._kinds)]
        tried = (tuple(sorted(n for same in numbers for n in same[-most:])) for most in (3, 2, len(self._kinds)))
        for ran in filter(None, dict.fromkeys(tried)):
            with suppress(Exception):  # transformers' code, in models that find blocks by their index
                for length in _LENGTHS:
                    # An attempt may use 2/3 of the operations that are left, and its first pass 1/3 of that.
                    share = self._left * 2 // 3
                    self._end, self._until = self._left - share, self._left - share // 3
                    with suppress(TooLong), _only(self._model, self._blocks, ran):
                        return self._counted(ran, length)
        raise ValueError("it runs neither with few blocks nor with all of them")

    def _counted(self, ran: Sequence[int], length: int) -> ModelMemory:
        """Return the memory of passes through the blocks with these numbers, with a GPU's loss and with a CPU's."""
        bodies, heads, heads_of_cpu = [], [], []
        for rows, tokens in ((_ROWS, length), (2 * _ROWS, length), (_ROWS, 2 * length)):
            bodies.append(self._body([self._modules[number] for number in ran], rows, tokens))
            heads.append(self._head(rows * tokens, gpu=True))
            heads_of_cpu.append(self._head(rows * tokens, gpu=False))
            self._until = self._end
        head, head_of_cpu = (_Pass(traces, length=length).whole() for traces in (heads, heads_of_cpu))
        hidden = Growth(token=self._hidden * self._model.dtype.itemsize)
        blocks, chain = _kinds_of_calls(self._kinds, [ran[place] for place in bodies[0].called], ran)
        found = _Pass(bodies, length=length).in_parts(chain, blocks=blocks, hidden=hidden, head=head)
        all_trained = all(parameter.requires_grad for parameter in self._model.parameters())
        if all_trained and any(part.kept.at(1, _LONG) < hidden.at(1, _LONG) / 2 for part in found.kinds):
            raise ValueError("what blocks keep does not grow as the lengths that were run say")
        return ModelMemory(found, replace(found, head=head_of_cpu), self._order(bodies[-1], heads[-1], ran))

    def _order(self, body: AllocationTrace, head: AllocationTrace, ran: Sequence[int]) -> Order | None:
        """Return the order in which the passes use units, or None if no blocks are known.

        In the forward a module uses its own weights when it begins, a block all weights inside it. In the backward an
        operation uses a weight that was saved for it. Modules that text does not pass through (a vision tower) do not
        occur. Every block that did not run is used like the next one that did.
        """
        if not self._named:
            return None
        others = {
            block: self._named[min(n for n in ran if n > number)]
            for number, block in enumerate(self._named)
            if number not in ran
        }
        backward = _filled([*head.backward, *body.backward][::-1], others)
        return Order(_filled([*body.forward, *head.forward], others), backward[::-1])

    def _take(self) -> None:
        self._left -= 1
        if self._left < self._until:
            raise TooLong

    def _body(self, blocks: Sequence[nn.Module], rows: int, length: int) -> AllocationTrace:
        ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
        positions = [torch.zeros_like(ids)] if self._packed else []
        with self._watched(blocks, ids, *positions) as held:
            output = self._loss.run(ids, *positions)
            states = output.logits if self._loss.whole else output.last_hidden_state
            self._kind, self._width = type(output), states.shape[-1]
            if not self._loss.whole:
                self._hidden = self._width
            loss = Gradient.apply(states)
            del output, states
            held.mark("body")
            loss.backward()
        return held

    def _head(self, tokens: int, *, gpu: bool) -> AllocationTrace:
        """Trace the head on `tokens` tokens, with a GPU's loss or a CPU's; `_body` must have run before."""
        states = torch.empty(tokens, self._width, dtype=self._model.dtype, device="meta", requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64, device="meta")
        with self._watched([], states, targets) as held:
            if self._loss.whole:
                summed = cross_entropy(states, targets)
            else:
                summed = self._loss.summed(self._kind, states, targets, gpu=gpu)
            held.mark("body")
            summed.backward()
        return held

    @contextmanager
    def _watched(self, blocks: Sequence[nn.Module], *given: torch.Tensor) -> Iterator[AllocationTrace]:
        parameters = list(self._model.parameters())
        there = iter([*parameters, *self._model.buffers(), *given])
        held = AllocationTrace(there, self._take, packed=self._packed, units=self._unit_in)
        places = {id(block): place for place, block in enumerate(blocks)}
        first: list[Any] = []  # the first block's input, which checkpointing keeps

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not first:
                first.extend(tree_iter((args, kwargs)))
                comes = next((v for v in first if isinstance(v, torch.Tensor) and v.requires_grad), None)
                if comes is not None:
                    comes.register_hook(lambda _: held.mark("gradient", -1))
            held.mark("block", len(held.called))
            held.called.append(places[id(module)])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            hidden = next(value for value in tree_iter(output) if isinstance(value, torch.Tensor))
            self._hidden = hidden.shape[-1]
            number = sum(what == "after" for what, _, _ in held.marks)
            held.mark("after", number)
            if hidden.requires_grad:
                hidden.register_hook(lambda _: held.mark("gradient", number))

        def begin(module: nn.Module, _: Any) -> None:
            held.forward += self._units_of[module]

        def hand_over(parameter: nn.Parameter) -> None:
            parameter.grad = None

        with ExitStack() as hooks:
            if gc.isenabled():
                gc.disable()
                hooks.callback(gc.enable)
            handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
            handles += [block.register_forward_hook(after) for block in blocks]
            handles += [module.register_forward_pre_hook(begin) for module in self._units_of]
            handles += [p.register_post_accumulate_grad_hook(hand_over) for p in parameters if p.requires_grad]
            for handle in handles:
                hooks.callback(handle.remove)
            with self.kernels, held:
                yield held
            first.clear()


class _Pass:
    """The memory of a pass after each allocation or release, as it grows with rows and tokens, and the marks in it."""

    def __init__(self, traces: Sequence[AllocationTrace], *, length: int) -> None:
        """Take traces of rows x length, of twice the rows, and of twice the length.

        If the number of operations depends on the length (a chunked recurrence), only memory at marks and the maxima
        between them are known.
        """
        self._marks = traces[0].marks
        if len({tuple(mark[:2] for mark in one.marks) for one in traces}) > 1:
            raise ValueError("blocks run in another order for other rows")
        if len({len(one.events) for one in traces}) == 1:
            sizes = zip(*(one.events for one in traces), strict=True)
            self._held = list(accumulate((_growth(*size, length=length) for size in sizes), initial=Growth()))
        else:
            sizes = zip(*(one.at_marks() for one in traces), strict=True)
            self._held = [_fitted(*size, length=length) for size in sizes]
            self._marks = [(what, number, 2 * place + 1) for place, (what, number, _) in enumerate(self._marks)]
        self._at = {(what, number): event for what, number, event in self._marks}
        self._end = len(self._held) - 1

    def whole(self) -> Part:
        body = self._at["body", 0]
        return Part(self._held[body], self._moments(0, body), self._moments(body, self._end))

    def in_parts(self, chain: Sequence[int], *, blocks: Sequence[int], hidden: Growth, head: Part) -> Activations:
        """Cut the pass where blocks begin and gradients arrive; `chain` is the kind of each block that ran, in order.

        The second to last block of a kind counts for all, since it has neighbours on both sides.
        """
        held, at, count = self._held, self._at, len(chain)
        typical = {kind: [number for number, other in enumerate(chain) if other == kind][-2:][0] for kind in chain}

        def start(number: int) -> Growth:
            """Return the memory in use where a block begins; after the last block, extrapolate to one more block."""
            if number < count:
                return held[at["block", number]]
            like = typical[chain[-1]]
            if like == number - 1:
                return held[at["after", like]]
            return start(number - 1) + start(like + 1) - start(like)

        def part(number: int) -> Part:
            forward = self._moments(at["block", number], at["after", number], beyond=start(number))
            backward = self._backward(at.get(("gradient", number)), beyond=start(number))
            return Part(start(number + 1) - start(number), forward, backward)

        body, end = at["body", 0], start(count)
        norm_forward = self._moments(at["after", count - 1], body, beyond=end)
        return Activations(
            before=start(0),
            kinds=tuple(part(typical[kind]) for kind in range(max(chain) + 1)),
            blocks=tuple(blocks),
            hidden=hidden,
            norm=Part(held[body] - end, norm_forward, self._backward(body, beyond=end)),
            head=head,
            embedding=self._moments(at.get(("gradient", -1), len(held)), self._end),
        )

    def _backward(self, start: int | None, *, beyond: Growth) -> tuple[Growth, ...]:
        """Return the memory from event `start` to the next gradient of hidden states."""
        if start is None:  # no gradient arrives there, since nothing before it is trained
            return ()
        later = (at for what, _, at in self._marks if what == "gradient" and at > start)
        return self._moments(start, min(later, default=self._end), beyond=beyond)

    def _moments(self, start: int, end: int, *, beyond: Growth | None = None) -> tuple[Growth, ...]:
        base = beyond or Growth()
        return pruned([held - base for held in self._held[start : end + 1]])


def _kinds_of_calls(kinds: Sequence[int], order: Sequence[int], ran: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the kind of each block of the model that text passes through, and of each call, renumbered from 0."""
    alive = {kinds[number] for number in order}  # the blocks of a vision tower are never called
    if sorted(order) == [number for number in ran if kinds[number] in alive]:
        renumbered = {kind: place for place, kind in enumerate(sorted(alive))}
        return [renumbered[kind] for kind in kinds if kind in alive], [renumbered[kinds[number]] for number in order]
    if len(ran) < len(kinds):
        raise ValueError("blocks are called more than once")
    return list(range(len(order))), list(range(len(order)))  # every call is a kind


def _signature(block: nn.Module) -> Any:
    """Return a key that is equal for blocks with equal weights and settings."""
    weights = tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())
    settings = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not _NUMBER.search(key)
    )
    return type(block), weights, settings


@contextmanager
def _only(model: PreTrainedModel, blocks: Sequence[str], numbers: Sequence[int]) -> Iterator[None]:
    """Reduce lists of blocks to those with these indices, or raise ValueError where a list has other modules, too."""
    wanted = {blocks[number] for number in numbers}
    with ExitStack() as stack:
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
            module = model.get_submodule(parent)
            inside = [name for name in blocks if name.rpartition(".")[0] == parent]
            if wanted.issuperset(inside):
                continue
            if not isinstance(module, nn.ModuleList) or len(module) != len(inside):
                raise ValueError("blocks are not in lists of their own")
            kept = [block for key, block in module._modules.items() if f"{parent}.{key}" in wanted]
            few = {str(place): block for place, block in enumerate(kept)}
            stack.enter_context(patch.object(module, "_modules", few))
        yield


# -- how memory grows with rows and tokens ---------------------------------------------------------------------------


def _growth(base: int, rows: int, longer: int, *, length: int) -> Growth:
    """Return the growth of one tensor from its bytes for _ROWS x length, twice the rows, and twice the length."""
    if abs(base) < _NUMBERS:
        return Growth()
    each = rows == 2 * base
    if not each and rows != base:  # it grows with rows, but not in proportion
        return _fitted(base, rows, longer, length=length)
    size = base / (_ROWS if each else 1)
    if longer == 4 * base:
        return Growth(pair=size / length**2) if each else Growth(square=size / length**2)
    slope = (longer - base) / (_ROWS if each else 1) / length
    rest = size - slope * length
    return Growth(row=rest, token=slope) if each else Growth(fixed=rest, position=slope)


def _fitted(base: int, rows: int, longer: int, *, length: int) -> Growth:
    """Return the growth of many tensors together: a fixed part, a part per token, and a part per pair of tokens.

    Memory that less than doubles with the length has a part per row, such as a recurrent state.
    """
    pair = (longer - rows) / (2 * _ROWS * length**2)
    if pair < 0:
        token = (longer - base) / (_ROWS * length)
        return Growth(fixed=2 * base - rows, row=(rows - base) / _ROWS - token * length, token=token)
    token = (rows - base) / (_ROWS * length) - pair * length
    return Growth(fixed=2 * base - rows, token=token, pair=pair)


# -- instruments -------------------------------------------------------------------------------------------------------


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
        on_cpu = not dropout_p and query.shape[-1] == value.shape[-1]  # a CPU's fused kernel takes no others
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


class AllocationTrace(TorchDispatchMode):
    """Record every allocation (+ bytes) and release (- bytes) in order, with marks in between."""

    def __init__(
        self, given: Iterator[torch.Tensor], take: Callable[[], None], *, packed: bool, units: Mapping[int, str]
    ) -> None:
        """Start with the tensors `given`; call `take` before each operation. `units`: the unit of each storage."""
        super().__init__()
        self.events: list[int] = []
        self.marks: list[tuple[str, int, int]] = []  # name, number, and the count of events before it
        self.called: list[int] = []  # indices of the blocks that ran, in order
        self.forward: list[str] = []  # units of the weights that modules use when they begin, in order
        self.backward: list[str] = []  # units of the weights that operations of the backward get, in order
        self._take = take
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in given}
        self._any, self._packed, self._units = False, packed, units

    def mark(self, what: str, number: int = 0) -> None:
        self.marks.append((what, number, len(self.events)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            # The check whether all positions are consecutive is answered with no for packed rows. Nothing is padded or
            # infinite.
            return not self._any and not self._packed
        if func.overloadpacket in (_aten.any, _aten.all):
            self._any = func.overloadpacket is _aten.any
        self._take()
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


def _filled(units: Sequence[str], others: Mapping[str, str]) -> tuple[str, ...]:
    """Drop consecutive repetitions, and insert each block that did not run before the block that it resembles."""
    found: list[str] = []
    for unit, _ in groupby(units):
        if unit not in found:
            found += [other for other, like in others.items() if like == unit]
        found.append(unit)
    return tuple(found)
