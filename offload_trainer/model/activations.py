"""Counts what a model's forward and backward hold, for any architecture: the module itself runs on the meta device.

    allocations and releases of tensors, in order        (`_Held`, on the module as it is trained, dropout and all)
    the same in rows or tokens twice as many              -> how each grows
    cut where blocks begin and where gradients come back  -> moments of each part    (plan/activations.py)

No tensor has memory there, so a count costs the dispatch: three passes of three blocks of each kind. What is
not known without values: which kernel takes attention (fused: flash or memory-efficient keep its output and a
logarithm a row; on a CPU none does with dropout), whether rows are packed (they are not). Experts are counted as
transformers groups them, one row for each token and expert chosen, whatever the routing.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from offload_trainer.model.loss import CausalLoss
from offload_trainer.plan.activations import Activations, Growth, Part, pruned

Kind = Literal["gpu", "cpu"]
_aten = torch.ops.aten
_MOST_OPERATIONS = 20_000  # of a pass: about a second
_NUMBER = re.compile(r"(^|_)(idx|index|id|number|num|i)$|layer_num")  # attributes that tell alike blocks apart


class _Attention(torch.autograd.Function):
    """Memory of a fused attention: its output, a logarithm for each row, and what its backward works in."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, workspace: bool) -> torch.Tensor:
        if mask is not None and mask.dtype is torch.bool:
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        output = _heads_inside(query, value.shape[-1])
        ctx.workspace = workspace
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        # On a GPU the query's gradient is added up in fp32, those of shared keys and values for each head.
        work = [query.new_empty(query.shape, dtype=torch.float32)] if ctx.workspace else []
        if ctx.workspace and key.shape[1] != query.shape[1]:
            work += [torch.empty_like(query), torch.empty_like(query)]
        found = [_heads_inside(x, x.shape[-1]) if x.requires_grad else None for x in (query, key, value)]
        del work
        return *found, None, None


def _heads_inside(like: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, heads, tokens, width] in the memory order of these kernels: the heads of a token side by side."""
    rows, heads, tokens = like.shape[:-1]
    return like.new_empty(rows, tokens, heads, width).transpose(1, 2)


class _Gradient(torch.autograd.Function):
    """Gives back a gradient of the input's size, as what comes behind would."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.like = hidden.shape, hidden.dtype
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].new_empty(ctx.like[0], dtype=ctx.like[1])


class _Kernels(TorchFunctionMode):
    """Takes the device's kernels where they hold something else than torch's operations without memory."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._gpu = kind == "gpu"
        self.differs = False  # whether the other kind holds something else

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is nn.functional.dropout:
            return self._drop(*args, **kwargs)
        return func(*args, **kwargs)

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
            return torch.native_dropout(input, p, True)[0]  # keeps a byte an element, a CPU a number
        return nn.functional.dropout(input, p, training, inplace)


class _TooLong(Exception):
    """An architecture that takes tokens one by one."""


class _Held(TorchDispatchMode):
    """Every allocation (+ bytes) and release (- bytes) in order, and marks in between."""

    def __init__(self, given: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[int] = []
        self.marks: list[tuple[str, int, int]] = []  # what, which of them, how many events before it
        self._operations = 0
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in given}
        self._any = False

    def mark(self, what: str, number: int = 0) -> None:
        self.marks.append((what, number, len(self.events)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return not self._any  # "is all of it so": nothing is padded, packed, or infinite
        if func.overloadpacket in (_aten.any, _aten.all):
            self._any = func.overloadpacket is _aten.any
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise _TooLong
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
        """Bytes held: the most before the first mark, at it, the most until the next, at that, ..., at the end."""
        held, found, start = list(accumulate(self.events, initial=0)), [], 0
        for end in (*(event for _, _, event in self.marks), len(self.events)):
            found += [max(held[start : end + 1]), held[end]]
            start = end
        return found

    def _released(self, key: int, size: int) -> None:
        del self._known[key]
        self.events.append(-size)


class _Run:
    """One pass of a body, or of a head, on the meta device."""

    def __init__(self, model: PreTrainedModel, kernels: _Kernels) -> None:
        self._model, self._kernels = model, kernels

    @contextmanager
    def _watched(self, blocks: Sequence[nn.Module], *given: torch.Tensor) -> Iterator[_Held]:
        parameters = list(self._model.parameters())
        held = _Held(iter([*parameters, *self._model.buffers(), *given]))
        first: list[Any] = []  # the first block's input, which checkpointing keeps

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            number = sum(what == "block" for what, _, _ in held.marks)
            if not first:
                first.extend(tree_iter((args, kwargs)))
                comes = next((v for v in first if isinstance(v, torch.Tensor) and v.requires_grad), None)
                if comes is not None:
                    comes.register_hook(lambda _: held.mark("gradient", -1))
            held.mark("block", number)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            hidden = next(value for value in tree_iter(output) if isinstance(value, torch.Tensor))
            number = sum(what == "after" for what, _, _ in held.marks)
            held.mark("after", number)
            if hidden.requires_grad:
                hidden.register_hook(lambda _: held.mark("gradient", number))

        def hand_over(parameter: nn.Parameter) -> None:
            parameter.grad = None

        with ExitStack() as hooks:
            collecting = gc.isenabled()
            gc.disable()
            hooks.callback(gc.enable if collecting else gc.disable)
            handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
            handles += [block.register_forward_hook(after) for block in blocks]
            handles += [p.register_post_accumulate_grad_hook(hand_over) for p in parameters if p.requires_grad]
            for handle in handles:
                hooks.callback(handle.remove)
            with self._kernels, held:
                yield held
            first.clear()

    def body(self, blocks: Sequence[nn.Module], rows: int, length: int) -> _Held:
        ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
        body = self._model._modules[self._model.base_model_prefix]
        assert body is not None
        with self._watched(blocks, ids) as held:
            output = body(input_ids=ids, use_cache=False)
            self.kind, self.hidden = type(output), output.last_hidden_state.shape[-1]
            loss = _Gradient.apply(output.last_hidden_state)
            del output
            held.mark("body")
            loss.backward()
        return held

    def head(self, tokens: int) -> _Held:
        """After `body`."""
        loss = CausalLoss(self._model, chunk=tokens)
        states = torch.empty(tokens, self.hidden, dtype=self._model.dtype, device="meta", requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64, device="meta")
        with self._watched([], states, targets) as held:
            summed = loss._summed(self.kind, states, targets)
            held.mark("body")
            summed.backward()
        return held


_ROWS = 2  # of the smallest pass; one row alone is summed and repeated nowhere
_LENGTHS = 256, 16  # of its rows; the shorter one where an architecture takes tokens one by one
_NUMBERS = 64  # bytes: below it single numbers are, which nobody plans


def _levels(passes: Sequence[_Held], length: int) -> tuple[list[Growth], list[tuple[str, int, int]]]:
    """What is held after each event, and the marks. Passes: rows x length, twice the rows, twice the length.

    Where another length makes other operations (a recurrence in pieces), only at marks and at the most between them.
    """
    first = passes[0]
    if len({tuple(mark[:2] for mark in one.marks) for one in passes}) > 1:
        raise ValueError("blocks run in another order for other rows")
    if len({len(one.events) for one in passes}) == 1:
        sizes = zip(*(one.events for one in passes), strict=True)
        return list(accumulate((_growth(*size, length=length) for size in sizes), initial=Growth())), first.marks
    sampled = zip(*(one.at_marks() for one in passes), strict=True)
    marks = [(what, number, 2 * place + 1) for place, (what, number, _) in enumerate(first.marks)]
    return [_fitted(*size, length=length) for size in sampled], marks


def _growth(base: int, rows: int, longer: int, *, length: int) -> Growth:
    """Of one tensor, from its bytes for _ROWS x length, for twice the rows and for twice the length."""
    if abs(base) < _NUMBERS:
        return Growth()
    each = rows == 2 * base
    if not each and rows != base:  # some of it grows with rows
        return _fitted(base, rows, longer, length=length)
    size = base / (_ROWS if each else 1)
    if longer == base:
        return Growth(row=size) if each else Growth(fixed=size)
    if longer == 4 * base:
        return Growth(pair=size / length**2) if each else Growth(square=size / length**2)
    slope = (longer - base) / (_ROWS if each else 1) / length
    rest = size - slope * length
    return Growth(row=rest, token=slope) if each else Growth(fixed=rest, position=slope)


def _fitted(base: int, rows: int, longer: int, *, length: int) -> Growth:
    """The same of many tensors together: what is fixed, grows with tokens, and with pairs of them."""
    pair = (longer - rows) / (2 * _ROWS * length**2)
    token = (rows - base) / (_ROWS * length) - pair * length
    return Growth(fixed=2 * base - rows, token=token, pair=pair)


class _Cut:
    """A pass's moments, part by part. `chain`: the kind of each block that ran."""

    def __init__(self, passes: Sequence[_Held], chain: Sequence[int], *, length: int) -> None:
        self._held, self._marks = _levels(passes, length)
        self._at = {(what, number): event for what, number, event in self._marks}
        self._chain = chain

    def counted(self, head: Part, *, blocks: Sequence[int], hidden: Growth) -> Activations:
        return Activations(
            before=self._start(0),
            kinds=tuple(self._block(self._typical(kind)) for kind in range(max(self._chain) + 1)),
            blocks=tuple(blocks),
            hidden=hidden,
            norm=self._norm(),
            head=head,
            embedding=self._moments(self._at.get(("gradient", -1), len(self._held)), len(self._held) - 1),
        )

    def whole(self) -> Part:
        """All of it, with nothing before."""
        body = self._at["body", 0]
        return Part(self._held[body], self._moments(0, body), self._moments(body, len(self._held) - 1))

    def _typical(self, kind: int) -> int:
        """Of the blocks of this kind that ran, the last but one: others come before it and behind."""
        return [number for number, other in enumerate(self._chain) if other == kind][-2:][0]

    def _start(self, number: int) -> Growth:
        """What is held where this block begins; behind the last one, what would be where one more began."""
        if number < len(self._chain):
            return self._held[self._at["block", number]]
        typical = self._typical(self._chain[-1])
        if typical == number - 1:
            return self._held[self._at["after", typical]]
        return self._start(number - 1) + self._start(typical + 1) - self._start(typical)

    def _block(self, number: int) -> Part:
        start = self._start(number)
        return Part(
            kept=self._start(number + 1) - start,
            forward=self._moments(self._at["block", number], self._at["after", number], beyond=start),
            backward=self._backward(self._at.get(("gradient", number)), beyond=start),
        )

    def _norm(self) -> Part:
        start, body = self._start(len(self._chain)), self._at["body", 0]
        return Part(
            kept=self._held[body] - start,
            forward=self._moments(self._at["after", len(self._chain) - 1], body, beyond=start),
            backward=self._backward(body, beyond=start),
        )

    def _backward(self, start: int | None, *, beyond: Growth) -> tuple[Growth, ...]:
        """Until the next gradient of hidden states; nothing where none comes, since nothing before is trained."""
        if start is None:
            return ()
        later = (at for what, _, at in self._marks if what == "gradient" and at > start)
        return self._moments(start, min(later, default=len(self._held) - 1), beyond=beyond)

    def _moments(self, start: int, end: int, *, beyond: Growth | None = None) -> tuple[Growth, ...]:
        base = beyond or Growth()
        return pruned([held - base for held in self._held[start : end + 1]])


def count_activations(
    model: PreTrainedModel, blocks: Sequence[str], *, dtype: torch.dtype
) -> tuple[Activations, Activations]:
    """What `model` (on the meta device, parameters as they train) holds on a GPU and on a CPU, run in `dtype`.

    The model's parameters have that dtype afterwards. Raises whatever a model does that cannot run without values.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.train()
    kernels = _Kernels("gpu")
    on_gpu = _count(model, blocks, kernels)
    return on_gpu, _count(model, blocks, _Kernels("cpu")) if kernels.differs else on_gpu


def _count(model: PreTrainedModel, blocks: Sequence[str], kernels: _Kernels) -> Activations:
    """With three blocks of each kind where the model runs so, else with all."""
    modules = [model.get_submodule(name) for name in blocks]
    kinds = _kinds(modules)
    last = [[n for n, other in enumerate(kinds) if other == kind][-3:] for kind in dict.fromkeys(kinds)]
    few = sorted(number for numbers in last for number in numbers)
    failed: Exception = ValueError("no blocks")
    for ran in (few, range(len(blocks))):
        for length in _LENGTHS:
            try:
                with _only(model, blocks, ran):
                    return _counted(model, modules, kernels, kinds=kinds, ran=ran, length=length)
            except _TooLong as error:
                failed = error
            except Exception as error:  # of transformers' code, where blocks are found by their number
                failed = error
                break
    raise failed


def _counted(
    model: PreTrainedModel,
    blocks: Sequence[nn.Module],
    kernels: _Kernels,
    *,
    kinds: Sequence[int],
    ran: Sequence[int],
    length: int,
) -> Activations:
    run = _Run(model, kernels)
    modules, chain = [blocks[number] for number in ran], [kinds[number] for number in ran]
    sizes = [(_ROWS, length), (2 * _ROWS, length), (_ROWS, 2 * length)]
    bodies = [run.body(modules, *size) for size in sizes]
    calls = sum(what == "block" for what, _, _ in bodies[0].marks)
    if calls != len(chain):  # some run more than once
        if len(ran) < len(kinds):
            raise ValueError("blocks are called more than once")
        kinds = chain = list(range(calls))
    head = _Cut([run.head(rows * length) for rows, length in sizes], [], length=length).whole()
    hidden = Growth(token=run.hidden * model.dtype.itemsize)
    return _Cut(bodies, chain, length=length).counted(head, blocks=kinds, hidden=hidden)


def _kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """A number for each block, the same for those that are alike in weights and settings."""
    known: dict[Any, int] = {}
    return [known.setdefault(_signature(block), len(known)) for block in blocks]


def _signature(block: nn.Module) -> Any:
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
    """The list of blocks cut down to those with these numbers. ValueError where they are not one list."""
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(numbers) == len(blocks):
        yield
        return
    whole = model.get_submodule(parents.pop())
    if parents or not isinstance(whole, nn.ModuleList) or len(whole) != len(blocks):
        raise ValueError("blocks are in more than one list")
    held = dict(whole._modules)
    whole._modules = {str(place): held[str(number)] for place, number in enumerate(numbers)}
    try:
        yield
    finally:
        whole._modules = held
