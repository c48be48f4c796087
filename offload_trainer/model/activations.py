"""Counts what a model's forward and backward hold, for any architecture: the module itself runs on the meta device.

    allocations and releases of tensors, in order, dropout and all  (model/held.py)
    the same in rows or tokens twice as many                        -> how each grows
    cut where blocks begin and where gradients come back            -> moments of each part  (plan/activations.py)

No tensor has memory there, so a count costs the dispatch: three passes of three blocks of each kind. Experts are
counted as transformers groups them, one row for each token and expert chosen, whatever the routing.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offload_trainer.model.held import Gradient, Held, Kernels, Operations, TooLong
from offload_trainer.model.loss import CausalLoss, cross_entropy
from offload_trainer.plan.activations import Activations, Growth, Part, pruned

_NUMBER = re.compile(r"(^|_)(idx|index|id|number|num|i)$|layer_num")  # attributes that tell alike blocks apart


class _Run:
    """One pass of a body, or of a head, on the meta device."""

    def __init__(self, loss: CausalLoss, kernels: Kernels, operations: Operations, *, packed: bool) -> None:
        self._loss, self._model, self._kernels, self.operations = loss, loss.model, kernels, operations
        self._packed = packed

    @contextmanager
    def _watched(self, blocks: Sequence[nn.Module], *given: torch.Tensor) -> Iterator[Held]:
        parameters = list(self._model.parameters())
        held = Held(iter([*parameters, *self._model.buffers(), *given]), self.operations, packed=self._packed)
        places = {id(block): place for place, block in enumerate(blocks)}
        first: list[Any] = []  # the first block's input, which checkpointing keeps

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            number = sum(what == "block" for what, _, _ in held.marks)
            if not first:
                first.extend(tree_iter((args, kwargs)))
                comes = next((v for v in first if isinstance(v, torch.Tensor) and v.requires_grad), None)
                if comes is not None:
                    comes.register_hook(lambda _: held.mark("gradient", -1))
            held.mark("block", number)
            held.called.append(places[id(module)])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            hidden = next(value for value in tree_iter(output) if isinstance(value, torch.Tensor))
            self.hidden = hidden.shape[-1]
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

    @property
    def all_trained(self) -> bool:
        return all(parameter.requires_grad for parameter in self._model.parameters())

    @property
    def item_bytes(self) -> int:
        return self._model.dtype.itemsize

    def body(self, blocks: Sequence[nn.Module], rows: int, length: int) -> Held:
        ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
        positions = [torch.zeros_like(ids)] if self._packed else []
        with self._watched(blocks, ids, *positions) as held:
            output = self._loss.run(ids, *positions)
            states = output.logits if self._loss.whole else output.last_hidden_state
            self.kind, self.width = type(output), states.shape[-1]
            if not self._loss.whole:
                self.hidden = self.width
            loss = Gradient.apply(states)
            del output, states
            held.mark("body")
            loss.backward()
        return held

    def head(self, tokens: int) -> Held:
        """After `body`."""
        states = torch.empty(tokens, self.width, dtype=self._model.dtype, device="meta", requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64, device="meta")
        with self._watched([], states, targets) as held:
            summed = (
                cross_entropy(states.float(), targets)
                if self._loss.whole
                else self._loss.summed(self.kind, states, targets)
            )
            held.mark("body")
            summed.backward()
        return held


_ROWS = 2  # of the smallest pass; one row alone is summed and repeated nowhere
_LENGTHS = 256, 16  # of its rows; the shorter one where an architecture takes tokens one by one
_LONG = 65536  # tokens of a row, that what is kept is looked at for
_NUMBERS = 64  # bytes: below it single numbers are, which nobody plans


def _levels(passes: Sequence[Held], length: int) -> tuple[list[Growth], list[tuple[str, int, int]]]:
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
    """The same of many tensors together: what is fixed, grows with tokens, and with pairs of them.

    What less than doubles in rows twice as long has a share that each row has, whatever its length: a state.
    """
    pair = (longer - rows) / (2 * _ROWS * length**2)
    if pair < 0:
        token = (longer - base) / (_ROWS * length)
        return Growth(fixed=2 * base - rows, row=(rows - base) / _ROWS - token * length, token=token)
    token = (rows - base) / (_ROWS * length) - pair * length
    return Growth(fixed=2 * base - rows, token=token, pair=pair)


class _Cut:
    """A pass's moments, part by part. `chain`: the kind of each block that ran."""

    def __init__(self, passes: Sequence[Held], chain: Sequence[int], *, length: int) -> None:
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
    model: PreTrainedModel,
    blocks: Sequence[str],
    *,
    dtype: torch.dtype,
    whole_logits: bool = False,
    packed: bool = False,
) -> tuple[Activations, Activations]:
    """What `model` (on the meta device, parameters as they train) holds on a GPU and on a CPU, run in `dtype`.

    `packed`: in rows of several documents, with a mask between them. The model's parameters have that dtype afterwards.
    Raises whatever a model does that cannot run without values.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.train()
    blocks = blocks or _checkpointed(model)
    loss = CausalLoss(model, chunk=1, whole=whole_logits)
    kernels, operations = Kernels("gpu"), Operations()
    on_gpu = _count(loss, blocks, kernels, operations, packed=packed)
    if not kernels.differs:
        return on_gpu, on_gpu
    return on_gpu, _count(loss, blocks, Kernels("cpu"), operations, packed=packed)


def _checkpointed(model: PreTrainedModel) -> list[str]:
    """What transformers checkpoints, in an architecture that does not name its blocks."""
    return [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]


def _count(
    loss: CausalLoss, blocks: Sequence[str], kernels: Kernels, operations: Operations, *, packed: bool
) -> Activations:
    """With three or two blocks of each kind where the model runs so, else with all."""
    model = loss.model
    modules = [model.get_submodule(name) for name in blocks]
    kinds = _kinds(modules)
    failed: Exception = ValueError("no blocks")
    tried = (_last(kinds, 3), _last(kinds, 2), list(range(len(blocks))))
    for ran in (ran for place, ran in enumerate(tried) if ran and ran not in tried[:place]):
        for length in _LENGTHS:
            run = _Run(loss, kernels, operations, packed=packed)
            operations.attempt()
            try:
                with _only(model, blocks, ran):
                    return _counted(run, [modules[n] for n in ran], kinds=kinds, ran=ran, length=length)
            except TooLong as error:
                failed = error
            except Exception as error:  # of transformers' code, where blocks are found by their number
                failed = error
                break
    raise failed


def _last(kinds: Sequence[int], count: int) -> list[int]:
    """Numbers of the last so many blocks of each kind."""
    return sorted(n for kind in set(kinds) for n in [n for n, other in enumerate(kinds) if other == kind][-count:])


def _counted(
    run: _Run, modules: Sequence[nn.Module], *, kinds: Sequence[int], ran: Sequence[int], length: int
) -> Activations:
    sizes = [(_ROWS, length), (2 * _ROWS, length), (_ROWS, 2 * length)]
    bodies, heads = [], []
    for rows, tokens in sizes:
        bodies.append(run.body(modules, rows, tokens))
        heads.append(run.head(rows * tokens))
        run.operations.go_on()
    kinds, chain = _ran(kinds, [ran[place] for place in bodies[0].called], ran)
    head = _Cut(heads, [], length=length).whole()
    hidden = Growth(token=run.hidden * run.item_bytes)
    found = _Cut(bodies, chain, length=length).counted(head, blocks=kinds, hidden=hidden)
    least = hidden.at(1, _LONG) / 2 if run.all_trained else 0
    if any(part.kept.at(1, _LONG) < least for part in found.kinds):
        raise ValueError("what blocks keep does not grow as the lengths that were run say")
    return found


def _ran(kinds: Sequence[int], order: Sequence[int], ran: Sequence[int]) -> tuple[list[int], list[int]]:
    """The kind of each block of the model that a text goes through, and of each call, numbered anew from 0.

    A vision tower's are never called. Where some are called more than once every call is a kind of its own.
    """
    alive = {kinds[number] for number in order}
    if sorted(order) == [number for number in ran if kinds[number] in alive]:
        anew = {kind: place for place, kind in enumerate(sorted(alive))}
        return [anew[kind] for kind in kinds if kind in alive], [anew[kinds[number]] for number in order]
    if len(ran) < len(kinds):
        raise ValueError("blocks are called more than once")
    return list(range(len(order))), list(range(len(order)))


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
    """The lists of blocks cut down to those with these numbers. ValueError where they are not in lists."""
    if len(numbers) == len(blocks):
        yield
        return
    wanted = {blocks[number] for number in numbers}
    whole: list[tuple[nn.ModuleList, dict[str, Any], list[Any]]] = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        module = model.get_submodule(parent)
        inside = [name for name in blocks if name.rpartition(".")[0] == parent]
        if isinstance(module, nn.ModuleList) and len(module) == len(inside):
            kept = [block for key, block in module._modules.items() if f"{parent}.{key}" in wanted]
            whole.append((module, dict(module._modules), kept))
        elif not wanted.issuperset(inside):
            raise ValueError("blocks are not in lists of their own")
    try:
        for module, _, kept in whole:
            module._modules = {str(place): block for place, block in enumerate(kept)}
        yield
    finally:
        for module, held, _ in whole:
            module._modules = held
