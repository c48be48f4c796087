"""Fetch offloaded weights to the device while they are needed, with rings of device buffers and prefetching.

    forward   a module's pre-hook calls `need` for its units, then prefetches those that followed in the previous pass
    backward  the same happens when a block is recomputed, or when autograd unpacks a saved weight
    between   the first units of the next pass are prefetched while this pass ends, or once the update has written them
    outside   a weight that is read outside its module is copied into separate memory for one operation

While a weight is offloaded, its parameter has the right shape over a single NaN, so that code that uses it without a
hook produces NaN. A weight that autograd saves points into a ring buffer whose content changes. It is saved as unit
and offset instead, and fetched again in the backward. Buffers are never freed: the least recently used unit is evicted
(`plan/tiered/weight_streaming.py`). Quantised weights are fetched as they are stored, and dequantised when they are
needed, on the thread and stream that compute. They are treated so on the device too, where nothing needs to be fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_trainer.errors import UserError
from offload_trainer.offloading.autograd import (
    BlockSavedTensors,
    as_saved,
    hooks_of_autograd,
    in_backward,
    keep_by,
    not_compiled,
    recompute_views,
    set_memory,
    unprotected,
    without_modes,
)
from offload_trainer.offloading.device import Device, DeviceCopy, Read
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.plan.tiered.layout import Place, Unit
from offload_trainer.plan.tiered.weight_streaming import Rings

_END = -1  # marks the end of a pass in place of a following unit


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

    def __init__(
        self,
        weights: PlacedWeights,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        update_progress: UpdateProgress,
        *,
        source: Callable[[int], torch.Tensor | Read],
        device: Device,
        blocks: int,
    ) -> None:
        """Allocate the ring buffers, of which `blocks` are for blocks.

        `update_progress` says when a unit has its new weights. `source` returns where a unit is fetched from: host
        memory, or a function that fills a buffer.
        """
        self._weights, self._source, self._device = weights, source, device
        self._update_progress = update_progress
        units = [unit for unit in weights.units if weights.in_place(unit.index) is None]
        self.fetches = bool(units)  # otherwise all weights are used in place
        self._rings = Rings(units, blocks=blocks)
        packed = {kind: weights.packed_elements(of_blocks=kind) for kind in (True, False)}
        self._slots = [
            _Slot(device.buffer(slot.size, weights.dtype), device.buffer(packed[slot.block], weights.dtype))
            for slot in self._rings.slots
        ]
        self._parts = {
            unit.index: [(parameter, place) for place in unit.places for parameter in parameters[place.weight.name]]
            for unit in units
        }
        self._by_storage = {slot.buffer.untyped_storage().data_ptr(): number for number, slot in enumerate(self._slots)}
        self._placeholder = torch.full((), torch.nan, dtype=weights.dtype, device=device.place)
        self._backward = False
        self._then: bool | None = None
        # (is backward, previous unit, unit) -> the unit that followed last time; (None, None): start of a pass
        self._followed: dict[tuple[bool, int | None, int | None], int] = {}
        self._before_last: int | None = None
        self._last: int | None = None
        self._recomputing: Any = None  # pack hook of the checkpointed part that was recomputed last
        self._recomputed: set[int] = set()  # units of that part
        self._borrowed: dict[str, tuple[int, int]] = {}  # weights in separate memory: their unit and offset in it
        self.then_after_backward: bool | None = None  # `then` for backwards that begin without `passing`
        for unit in units:
            self._withdraw(unit.index)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def attach(self, wanted: Mapping[nn.Module, Sequence[int]]) -> None:
        """Register pre-hooks on the modules of `wanted`, which maps each module to the units it needs."""
        for module, units in wanted.items():
            streamed = [unit for unit in units if unit in self._parts]
            if not streamed:
                continue
            for kind in (True, False):
                several = sum(self._weights.units[unit].block == kind for unit in streamed)
                all_units = sum(self._weights.units[unit].block == kind for unit in self._parts)
                if 1 < several >= self._rings.count(of_blocks=kind) < all_units:
                    raise UserError(
                        f"a block of this model runs with {several} blocks' weights at a time, and another must be on "
                        f"its way: tiered.weight_buffers must be at least {several + 1}"
                    )
                self._rings.together[kind] = max(several, self._rings.together[kind])
            module.register_forward_pre_hook(self._before(streamed, saves=not isinstance(module, nn.Embedding)))

    def _before(self, units: list[int], *, saves: bool) -> Callable[..., None]:
        """Return a forward pre-hook that fetches `units`.

        `saves`: autograd saves the module's weights for its backward. An embedding's backward needs no weights, so
        embeddings may be called outside the model's forward, as PEFT's prompt tuning does.
        """

        def hook(*_: Any) -> None:
            if saves and unprotected() and not in_backward():
                raise UserError(
                    "a part of an offloaded model was called by itself, and its weights would not stay for the "
                    "backward: call the model as a whole, or do it inside session.micro_batch() or torch.no_grad()"
                )
            recompute_views(self)
            for unit in units:
                self._note_recomputation(unit)
                with without_modes():
                    self.need(unit)

        return not_compiled(hook)

    def _note_recomputation(self, unit: int) -> None:
        """Protect a checkpointed part's units from eviction until another part is recomputed.

        The recomputation saves plain views of its weights, which point into the ring buffers.

        Raises:
            UserError: checkpointing is reentrant.
        """
        if not (in_backward() and torch.is_grad_enabled()):
            return
        hooks = hooks_of_autograd()
        if hooks is None:
            raise UserError(
                "reentrant checkpointing keeps no weights that come and go: use checkpoint(..., use_reentrant=False)"
            )
        if hooks[0] == self.pack or isinstance(getattr(hooks[0], "__self__", None), BlockSavedTensors):
            return
        if hooks[0] is not self._recomputing:
            self._recomputing, self._recomputed = hooks[0], set()
        self._recomputed.add(unit)

    @contextmanager
    def passing(self, *, backward: bool, then: bool | None) -> Iterator[None]:
        """Wrap each forward or backward pass, with saved-tensor hooks that save weights by unit and offset.

        `then`: the pass after this one is a backward; None if the weights will have changed by then.
        """
        self._begin_pass(backward=backward, then=then)
        with self.saving():
            yield
        self._end_pass()

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves weights by unit and offset."""
        if not self.fetches:
            return nullcontext()
        return saved_tensors_hooks(self.pack, self.unpack)

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
        self._before_last = self._last = None
        self._recomputing, self._recomputed = None, set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _WeightReference:
        return self.reference_of(tensor) or tensor.detach()  # without detach a saved result refers to its own node

    def reference_of(self, tensor: torch.Tensor) -> _WeightReference | None:
        """Return the unit and offset of a tensor that views a ring buffer, or None for other tensors."""
        number = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return None
        unit = self._rings.slots[number].unit
        assert unit is not None
        return _WeightReference(unit, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: torch.Tensor | _WeightReference) -> torch.Tensor:
        if not isinstance(saved, _WeightReference):
            return saved
        if unprotected() and in_backward():
            keep_by(self.pack, self.unpack)  # create_graph saves the weight again for the double backward
        with without_modes():
            return self.need(saved.unit).as_strided(saved.size, saved.stride, saved.offset)

    # -- the ring -----------------------------------------------------------------------------------------------------

    def need(self, unit: int) -> torch.Tensor:
        """Return the buffer with the unit's weights for the next computation, and prefetch the units that follow.

        Raises:
            UserError: a checkpointed part needs more units than there are buffers.
        """
        if not self._backward and in_backward():
            self._begin_pass(backward=True, then=self.then_after_backward)  # a backward without `passing`
        number = self._rings.slot_of(unit)
        if number is None:
            # The part may have ended: blocks that are not checkpointed can follow it (Idefics 2's resampler).
            number = self._rings.room_for(unit, self._recomputed)
            if number is None:
                assert self._recomputed
                several = len(self._recomputed | {unit})
                raise UserError(
                    f"a checkpointed part of the model runs with the weights of {several} blocks or more at a time: "
                    f"tiered.weight_buffers must be at least {several}, or the part smaller"
                )
            self._start(unit, number)
        self._rings.use(unit)
        slot = self._slots[number]
        if slot.arrival is not None:
            slot.arrival.wait()
            self._weights.dequantise(unit, slot.packed, slot.buffer)
            slot.arrival = None
            for parameter, place in self._parts[unit]:
                set_memory(parameter, self._weights.values(slot.buffer, place))
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
        source, after = self._source(unit), self._device.mark()
        slot.arrival = self._update_progress.fetch_when_ready(
            unit, lambda: self._weights.fetch(unit, source, slot.buffer, slot.packed, after=after)
        )

    def _evict(self, number: int) -> None:
        unit, slot = self._rings.slots[number].unit, self._slots[number]
        if unit is None:
            return
        self._rings.empty(number)
        if slot.arrival is None:
            self._withdraw(unit)
            return
        arrival, slot.arrival = slot.arrival, None
        arrival.wait()  # two transfers must not write to the same buffer

    def _withdraw(self, unit: int) -> None:
        """Point the unit's parameters to the NaN placeholder."""
        for parameter, place in self._parts[unit]:
            set_memory(parameter, self._placeholder.expand(place.weight.shape))

    def forget(self) -> None:
        """Evict all units and end all loans, because the weights have changed or are about to."""
        self._return_borrowed()
        for number in range(len(self._slots)):
            self._evict(number)

    # -- reading weights outside their modules ------------------------------------------------------------------------

    @contextmanager
    def borrow_weights(self, places: Mapping[str, tuple[int, int]]) -> Iterator[None]:
        """Provide weights, given by unit and offset, to one operation inside the context.

        An offloaded weight is copied into separate memory. So is one in a ring buffer if autograd would save it without
        hooks that could fetch it again. The copy stays until other weights are borrowed without it, or the weights
        change. Autograd saves the copy itself.
        """
        bare = unprotected()
        recomputing = self._recomputing is not None and torch.is_grad_enabled()
        wanted = {
            name: (unit, start)
            for name, (unit, start) in places.items()
            if unit in self._parts
            and self._needs_copy(unit, start, bare=bare or (recomputing and unit not in self._recomputed))
        }
        if wanted:
            with without_modes():
                # The operation also reads weights that an earlier one has borrowed.
                stays = {name: self._borrowed.pop(name) for name in places if name in self._borrowed}
                self._return_borrowed()
                for unit, start in wanted.values():
                    for parameter, place in self._parts[unit]:
                        if place.start == start:
                            set_memory(parameter, self._copy(unit, place))
            self._borrowed = stays | wanted
        borrowed = any(name in self._borrowed for name in places)
        keeping = saved_tensors_hooks(torch.Tensor.detach, as_saved) if borrowed and bare else nullcontext()
        with keeping:
            yield

    def _needs_copy(self, unit: int, start: int, *, bare: bool) -> bool:
        parameter = next(parameter for parameter, place in self._parts[unit] if place.start == start)
        with torch._C.DisableTorchFunctionSubclass():
            memory = parameter.untyped_storage().data_ptr()
        return memory == self._placeholder.untyped_storage().data_ptr() or (bare and memory in self._by_storage)

    @torch.no_grad()
    def _copy(self, unit: int, place: Place) -> torch.Tensor:
        self._update_progress.wait(unit)
        with torch.inference_mode(False):  # the copy may be used after inference mode ends
            stored = self._weights.get(unit, place.start, place.weight.numel)
            return stored.to(self._device.place).view(place.weight.shape)

    def _return_borrowed(self) -> None:
        """End all loans: point the parameters to their ring buffer or to the placeholder."""
        for unit, start in self._borrowed.values():
            number = self._rings.slot_of(unit)
            there = number is not None and self._slots[number].arrival is None
            for parameter, place in self._parts[unit]:
                if place.start == start and number is not None and there:
                    set_memory(parameter, self._weights.values(self._slots[number].buffer, place))
                elif place.start == start:
                    set_memory(parameter, self._placeholder.expand(place.weight.shape))
        self._borrowed = {}

    def close(self) -> None:
        """Wait for all fetches, successful or not."""
        for number in range(len(self._slots)):
            with suppress(Exception):
                self._evict(number)


class ResidentGuard:
    """The guard of the units that the model uses where `weights` stores them; `WeightPrefetcher` has the others.

    When an update begins, the parameters of units that it changes lose their memory: they are NaN, like those of
    offloaded weights. Before a module runs, a pre-hook waits for its units and restores their memory.
    """

    def __init__(
        self,
        weights: PlacedWeights,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        update_progress: UpdateProgress,
        *,
        place: torch.device,
    ) -> None:
        """Point the parameters of these units to their unit's memory on the torch device `place`."""
        self._update_progress = update_progress
        self._placeholder = torch.full((), torch.nan, dtype=weights.dtype, device=place)
        self._parts: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        for unit in weights.units:
            memory = weights.in_place(unit.index)
            if memory is not None:
                self._parts[unit.index] = [
                    (use, weights.values(memory, place))
                    for place in unit.places
                    for use in parameters[place.weight.name]
                ]
        for parameter, values in (part for parts in self._parts.values() for part in parts):
            parameter.data = values
        self._blocked: set[int] = set()
        self._called: set[int] = set()  # units that a module's call has needed so far

    def attach(self, wanted: Mapping[nn.Module, Sequence[int]]) -> None:
        """Register pre-hooks on the modules of `wanted`, which maps each module to the units it needs."""
        for module, units in wanted.items():
            resident = [unit for unit in units if unit in self._parts]
            if resident:
                module.register_forward_pre_hook(self._before(resident))

    def _before(self, units: Sequence[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._called.update(units)
            self.restore(units)

        return not_compiled(hook)

    def begin(self) -> None:
        """Block the units that the update that has just begun will change."""
        for unit, parts in self._parts.items():
            if not self._update_progress.is_ready(unit):
                self._blocked.add(unit)
                for parameter, memory in parts:
                    set_memory(parameter, self._placeholder.expand(memory.shape))

    def restore(self, units: Iterable[int]) -> None:
        """Wait until these units have their new weights, and restore their parameters' memory."""
        for unit in self._blocked.intersection(units) if self._blocked else ():
            self._update_progress.wait(unit)
            for parameter, memory in self._parts[unit]:
                set_memory(parameter, memory)
            self._blocked.discard(unit)

    def begin_forward(self) -> None:
        """Restore the units that no module's call has needed so far: code may read their weights directly.

        ProphetNet reads its n-gram embeddings so. The first forward shows which they are, before the first update.
        """
        self.restore(self._blocked - self._called)

    def restore_all(self) -> None:
        """Wait for all new weights, and restore all parameters' memory."""
        self.restore(self._parts)


def modules_of_units(
    model: nn.Module, unit_of: dict[str, int], *, blocks: Sequence[Unit]
) -> dict[nn.Module, list[int]]:
    """Return the units that each module needs: those of its direct weights, or for a block of all weights inside it.

    `unit_of` maps the names of the model's parameters, including tied ones, to units. Modules inside a block are
    included as well, because transformers recomputes a block without calling the block's own hooks.
    """
    inside = {unit.name for unit in blocks}
    wanted: dict[nn.Module, list[int]] = {}
    for name, module in model.named_modules():
        named = module.named_parameters(prefix=name, recurse=name in inside, remove_duplicate=False)
        units = dict.fromkeys(unit_of[parameter] for parameter, _ in named)
        if units:
            wanted[module] = list(units)
    return wanted
