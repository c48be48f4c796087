"""Point parameters to their weights: fetch offloaded units in time, and guard units in place while they are updated.

A module's pre-hook, or autograd when it unpacks a saved weight, asks for a unit; those that followed it in the previous
pass are prefetched. Buffers are never freed: the least recently used unit is evicted. Quantised units on the device
need a buffer too; others there are used in place, and are NaN while an update changes them. docs/design_streaming.md
says more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_trainer.common.errors import UserError
from offload_trainer.offloading import autograd
from offload_trainer.offloading.allocation import EngineParts, Stores
from offload_trainer.offloading.device import DeviceCopy
from offload_trainer.plan.tiered.layout import Place
from offload_trainer.plan.tiered.weight_streaming import Rings, packed_bytes

_END = -1  # marks the end of a pass in place of a following unit


@dataclass(frozen=True)
class _Weight:
    """A weight, and the parameters that use it."""

    unit: int
    place: Place
    uses: Sequence[nn.Parameter]

    def point(self, memory: torch.Tensor) -> None:
        """Point the parameters to the weight in `memory`, which has its unit's elements or is one NaN."""
        shape, start = self.place.weight.shape, self.place.start
        self.use(memory[start : start + self.place.weight.numel].view(shape) if memory.dim() else memory.expand(shape))

    def use(self, values: torch.Tensor) -> None:
        for use in self.uses:
            autograd.set_memory(use, values)


@dataclass
class _Slot:
    """A ring buffer on the device."""

    buffer: torch.Tensor
    packed: torch.Tensor  # receives quantised weights, which are then dequantised into `buffer`
    arrival: DeviceCopy | None = None  # None: the copy has completed


@dataclass(frozen=True)
class _WeightReference:
    """A view of a weight that autograd saved, as a range of its unit; `unpack` fetches the unit and rebuilds it."""

    unit: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class WeightPrefetcher:
    """The device buffers for the offloaded units of `weights`, and the hooks that fetch units into them.

    `parameters` (by name, one for each use) point to a buffer while their unit is in it.
    """

    _recomputing: Any  # pack hook of the checkpointed part that was recomputed last
    _recomputed: set[int]  # units of that part

    def __init__(self, stores: Stores, parts: EngineParts, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """Allocate the ring buffers, and point all parameters."""
        weights, device = stores.weights, parts.device
        self._weights, self._fetches, self._device = weights, stores.fetches, device
        self._update_progress = stores.update_progress
        self._placeholder = torch.full((), torch.nan, dtype=weights.dtype, device=device.torch_device)
        self._inside = {
            unit.index: [_Weight(unit.index, place, parameters[place.weight.name]) for place in unit.places]
            for unit in weights.units
        }
        self._named = {weight.place.weight.name: weight for inside in self._inside.values() for weight in inside}
        homes, there = weights.homes, weights.resident
        self._in_place = {unit.index: there[unit.index] for unit in weights.units if unit.in_place(homes[unit.index])}
        for unit in self._inside:
            self._point(unit, self._in_place.get(unit, self._placeholder))
        units = [unit for unit in weights.units if unit.index not in self._in_place]
        self.fetches = bool(units)  # otherwise all weights are used in place
        self._rings = Rings(units, blocks=parts.sizes.unit_buffers)
        self._slots: list[_Slot] = []
        dtype, size = weights.dtype, weights.dtype.itemsize
        for slot in self._rings.slots:
            packed = packed_bytes(weights.units, weights.homes, of_blocks=slot.block, item_bytes=size) // size
            self._slots.append(_Slot(device.buffer(slot.size, dtype), device.buffer(packed, dtype)))
        self._by_storage = {slot.buffer.untyped_storage().data_ptr(): number for number, slot in enumerate(self._slots)}
        self._begin_pass(backward=False, then=None)
        # (is backward, previous unit, unit) -> the unit that followed last time; (None, None): start of a pass
        self._followed: dict[tuple[bool, int | None, int | None], int] = {}
        self._borrowed: set[str] = set()  # weights in separate memory
        self._blocked: set[int] = set()  # units in place whose parameters wait for the update
        self._called: set[int] = set()  # units in place that a module's call has needed so far
        self.then_after_backward: bool | None = None  # `then` for backwards that begin without `passing`
        self.absent = False  # modules compute with NaN, since another rank of a pipeline computes what they are for

    # -- hooks --------------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, *, overlaps: bool) -> None:
        """Register a pre-hook on each module for the units of its direct weights, or of a block for all inside it.

        transformers recomputes a block without the block's own hook. `overlaps`: updates run during the next forward,
        so modules wait for units in place too.
        """
        unit_of = {use: weight.unit for weight in self._named.values() for use in weight.uses}
        blocks = {unit.name for unit in self._weights.units if unit.block}
        for name, module in model.named_modules():
            units = dict.fromkeys(unit_of[parameter] for parameter in module.parameters(recurse=name in blocks))
            fetched = [unit for unit in units if unit not in self._in_place]
            waited = [unit for unit in units if unit in self._in_place and overlaps]
            self._make_room(fetched)
            if fetched or waited:
                hook = partial(self._before, fetched, waited, saves=not isinstance(module, nn.Embedding))
                module.register_forward_pre_hook(autograd.not_compiled(hook))

    def _make_room(self, together: Sequence[int]) -> None:
        """Note the units that one module uses together. Raises UserError if there are too few buffers."""
        units = self._weights.units
        for kind in (True, False):
            several = sum(units[unit].block == kind for unit in together)
            all_units = sum(unit.block == kind for unit in units if unit.index not in self._in_place)
            if 1 < several >= self._rings.count(of_blocks=kind) < all_units:
                raise UserError(
                    f"a block of this model runs with {several} blocks' weights at a time, and another must be on "
                    f"its way: tiered.weight_buffers must be at least {several + 1}"
                )
            self._rings.together[kind] = max(several, self._rings.together[kind])

    def _before(self, fetched: Sequence[int], waited: Sequence[int], *_: Any, saves: bool) -> None:
        """Fetch the units that a module needs before its forward, and wait for the updates of others.

        `saves`: autograd saves the module's weights. It saves no embedding's, which PEFT's prompt tuning calls alone.
        """
        self._called.update(waited)
        if self.absent:
            return
        if fetched:
            if saves and autograd.unprotected() and not autograd.in_backward():
                raise UserError(
                    "a part of an offloaded model was called by itself, and its weights would not stay for the "
                    "backward: call the model as a whole, or do it inside session.micro_batch() or torch.no_grad()"
                )
            if autograd.saves_selected_results():
                raise UserError(
                    "selective checkpointing (context_fn) would save views of weights that come and go: use "
                    "checkpoint(..., use_reentrant=False) without it"
                )
        for unit in fetched:
            self._note_recomputation(unit)
            with autograd.without_modes():
                self.need(unit)
        self.restore(waited)

    def _note_recomputation(self, unit: int) -> None:
        """Protect a checkpointed part's units, of which plain views are saved, until another part is recomputed."""
        if not (autograd.in_backward() and torch.is_grad_enabled()):
            return
        if (hooks := autograd.hooks_of_autograd()) is None:
            raise UserError(
                "reentrant checkpointing keeps no weights that come and go: use checkpoint(..., use_reentrant=False)"
            )
        if hooks[0] == self.pack:
            return
        if hooks[0] is not self._recomputing:
            self._recomputing, self._recomputed = hooks[0], set()
        self._recomputed.add(unit)

    @contextmanager
    def passing(self, *, backward: bool, then: bool | None) -> Iterator[None]:
        """Wrap each pass; `then`: a backward is the next one; None if the weights will have changed by then."""
        self._begin_pass(backward=backward, then=then)
        with self.saving():
            yield
        self._end_pass()

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves weights by unit and offset."""
        return saved_tensors_hooks(self.pack, self.unpack) if self.fetches else nullcontext()

    def end_backward(self) -> None:
        """End a backward that began without `passing`."""
        if self._backward:
            self._end_pass()

    def _end_pass(self) -> None:
        self._followed[self._backward, self._before_last, self._last] = _END
        self._look_ahead()

    def begin(self) -> None:
        """Prefetch the first units of the next forward, after the weights have changed."""
        self._begin_pass(backward=False, then=None)
        self._look_ahead()

    def _begin_pass(self, *, backward: bool, then: bool | None) -> None:
        self._backward, self._then = backward, then
        self._before_last: int | None = None  # units
        self._last: int | None = None
        self._recomputing, self._recomputed = None, set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _WeightReference:
        if (number := self._by_storage.get(tensor.untyped_storage().data_ptr())) is None:
            return tensor.detach()  # without detach a saved result refers to its own node
        unit = self._rings.slots[number].unit
        assert unit is not None
        return _WeightReference(unit, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: torch.Tensor | _WeightReference) -> torch.Tensor:
        if not isinstance(saved, _WeightReference):
            return saved
        if autograd.unprotected() and autograd.in_backward():
            autograd.keep_by(self.pack, self.unpack)  # create_graph saves the weight again for the double backward
        with autograd.without_modes():
            return self.need(saved.unit).as_strided(saved.size, saved.stride, saved.offset)

    # -- the ring -----------------------------------------------------------------------------------------------------

    def need(self, unit: int) -> torch.Tensor:
        """Return the unit's weights, and prefetch what follows. Raises UserError if there are too few buffers."""
        if not self._backward and autograd.in_backward():
            self._begin_pass(backward=True, then=self.then_after_backward)  # a backward without `passing`
        if (number := self._rings.slot_of(unit)) is None:
            # The part may have ended: blocks that are not checkpointed can follow it (Idefics 2's resampler).
            if (number := self._rings.room_for(unit, self._recomputed)) is None:
                assert self._recomputed
                several = len(self._recomputed | {unit})
                raise UserError(
                    f"a checkpointed part of the model runs with the weights of {several} blocks or more at a time: "
                    f"tiered.weight_buffers must be at least {several}, or the part smaller"
                )
            self._start(unit, number)
        self._rings.put(unit, number)
        slot = self._slots[number]
        if slot.arrival is not None:
            slot.arrival.wait()
            self._weights.dequantise(unit, slot.packed, slot.buffer)
            slot.arrival = None
            self._point(unit, slot.buffer)
        if unit != self._last:
            self._followed[self._backward, self._before_last, self._last] = unit
            self._before_last, self._last = self._last, unit
            self._look_ahead()
        return slot.buffer

    def _look_ahead(self) -> None:
        """Start fetching the units that are expected next, without evicting units of the recomputed part."""
        for unit, number in self._rings.ahead(self._last, self._expected()):
            if self._rings.slots[number].unit in self._recomputed - {self._last}:
                return
            self._start(unit, number)

    def _expected(self) -> Iterator[int]:
        """Yield the units expected after the last one, by the order of earlier passes, up to the next pass's end."""
        backward, then = self._backward, self._then
        before, last = self._before_last, self._last
        while (unit := self._followed.get((backward, before, last))) is not None:
            if unit != _END:
                yield unit
                before, last = last, unit
            elif then is None:
                return
            else:
                backward, then, before, last = then, None, None, None

    def _start(self, unit: int, number: int) -> None:
        """Evict the slot's unit, and start fetching `unit` into it."""
        self._evict(number)
        self._rings.put(unit, number)
        slot = self._slots[number]
        source, after = self._fetches.source(unit), self._device.mark()
        slot.arrival = self._update_progress.fetch_when_ready(
            unit, lambda: self._weights.fetch(unit, source, slot.buffer, slot.packed, after=after)
        )

    def _evict(self, number: int) -> None:
        unit, slot = self._rings.slots[number].unit, self._slots[number]
        if unit is None:
            return
        self._rings.empty(number)
        arrival, slot.arrival = slot.arrival, None
        if arrival is None:
            self._point(unit, self._placeholder)
        else:
            arrival.wait()  # two transfers must not write to the same buffer

    def _point(self, unit: int, memory: torch.Tensor) -> None:
        for weight in self._inside[unit]:
            weight.point(memory)

    def forget(self) -> None:
        """Evict all units and end all loans, because the weights have changed or are about to."""
        self._return(self._borrowed)
        for number in range(len(self._slots)):
            self._evict(number)

    # -- units in place ------------------------------------------------------------------------------------------------

    def block(self) -> None:
        """Withdraw the units in place that the update that has just begun will change."""
        for unit in self._in_place:
            if not self._update_progress.is_ready(unit):
                self._blocked.add(unit)
                self._point(unit, self._placeholder)

    def restore(self, units: Iterable[int] | None = None) -> None:
        """Wait until these units in place (None: all) have their new weights, and point their parameters to them."""
        if not self._blocked:
            return
        for unit in self._blocked.intersection(self._in_place if units is None else units):
            self._update_progress.wait(unit)
            with autograd.without_modes():
                self._point(unit, self._in_place[unit])
            self._blocked.discard(unit)

    def restore_uncalled(self) -> None:
        """Restore the units that no module's call has needed so far: ProphetNet reads n-gram embeddings directly."""
        self.restore(self._blocked - self._called)

    # -- reading weights outside their modules ------------------------------------------------------------------------

    def borrow_weights(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which these weights have their values, for one operation.

        An offloaded weight is copied into separate memory, which autograd may save; so is one in a ring buffer if
        autograd has no hooks. The copy stays until other weights are borrowed without it, or the weights change.
        """
        self.restore(self._named[name].unit for name in names)
        return self._borrowing(names) if self.fetches else nullcontext()

    @contextmanager
    def _borrowing(self, names: Sequence[str]) -> Iterator[None]:
        bare = autograd.unprotected()
        recomputing = self._recomputing is not None and torch.is_grad_enabled()
        wanted = [
            weight
            for weight in (self._named[name] for name in names)
            if weight.unit not in self._in_place
            and self._needs_copy(weight, bare=bare or (recomputing and weight.unit not in self._recomputed))
        ]
        if wanted:
            with autograd.without_modes():
                self._return(self._borrowed.difference(names))  # the operation may read others that are borrowed
                for weight in wanted:
                    weight.use(self._copy(weight))
                    self._borrowed.add(weight.place.weight.name)
        borrowed = bare and not self._borrowed.isdisjoint(names)
        with saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved) if borrowed else nullcontext():
            yield

    def _needs_copy(self, weight: _Weight, *, bare: bool) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            memory = weight.uses[0].untyped_storage().data_ptr()
        return memory == self._placeholder.untyped_storage().data_ptr() or (bare and memory in self._by_storage)

    @torch.no_grad()
    def _copy(self, weight: _Weight) -> torch.Tensor:
        self._update_progress.wait(weight.unit)
        with torch.inference_mode(False):  # the copy may be used after inference mode ends
            stored = self._weights.get(weight.unit, weight.place.start, weight.place.weight.numel)
            return stored.to(self._device.torch_device).view(weight.place.weight.shape)

    def _return(self, names: set[str]) -> None:
        """End the loans of these weights: point the parameters to their ring buffer or to the placeholder."""
        for weight in (self._named[name] for name in names):
            number = self._rings.slot_of(weight.unit)
            slot = self._slots[number] if number is not None else None
            weight.point(slot.buffer if slot is not None and slot.arrival is None else self._placeholder)
        self._borrowed = self._borrowed - names

    def close(self) -> None:
        """Wait for all fetches, successful or not."""
        for number in range(len(self._slots)):
            with suppress(Exception):
                self._evict(number)
