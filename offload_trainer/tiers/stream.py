"""Units' weights on the device only while they are needed: a ring of buffers, the next unit always on its way.

    forward   a module's pre-hook: `need` its units, then start the one that came next the last time
    backward  the same when a block is recomputed, or when autograd asks for a weight that it saved

A weight that is away has its shape and one NaN for memory, so that code which uses it without a hook is seen at once.
What autograd saves of a weight points into a ring buffer whose content changes: it is kept by unit and place, and
found again in backward. Nothing is ever freed: what has been unused for longest makes room for what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.plan.layout import Unit
from offload_trainer.tiers.device import Arrival, Device
from offload_trainer.tiers.weights import Weights


@dataclass
class _Slot:
    """A ring buffer on the device and what it holds."""

    buffer: torch.Tensor
    unit: int | None = None
    arrival: Arrival | None = None  # None: in place
    used: int = 0  # when it was last needed


@dataclass(frozen=True)
class _Saved:
    """A saved view of a weight: autograd gets it back from wherever its unit is then."""

    unit: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Stream:
    """Fetches units that `weights` keeps away from the device. `parameters` are by name, one for each use."""

    def __init__(
        self,
        weights: Weights,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        *,
        device: Device,
        blocks: int,
        others: int,
    ) -> None:
        """`blocks` and `others`: ring buffers for units that are blocks and for those that are not."""
        self._weights, self._device = weights, device
        units = [unit for unit in weights.units if weights.resident(unit.index) is None]
        # One ring for the blocks, which are alike, and one for the modules outside them.
        self._rings = {
            True: self._ring([unit for unit in units if unit.block], blocks),
            False: self._ring([unit for unit in units if not unit.block], others),
        }
        self._parts = {
            unit.index: [
                (parameter, place.start, place.weight.shape)
                for place in unit.places
                for parameter in parameters[place.weight.name]
            ]
            for unit in units
        }
        self._slot_of: dict[int, _Slot] = {}
        self._by_storage = {
            slot.buffer.untyped_storage().data_ptr(): slot for ring in self._rings.values() for slot in ring
        }
        self._away = torch.full((1,), torch.nan, dtype=weights.dtype, device=device.place)
        self._clock = 0
        self._backward = False
        # (backward?, the unit before, unit) -> the unit needed next, last time
        self._followed: dict[tuple[bool, int | None, int | None], int] = {}
        self._before_last: int | None = None
        self._last: int | None = None
        for unit in units:
            self._send_away(unit.index)

    def _ring(self, units: Sequence[Unit], count: int) -> list[_Slot]:
        largest = max((unit.elements for unit in units), default=0)
        return [_Slot(self._device.buffer(largest, self._weights.dtype)) for _ in range(min(count, len(units)))]

    # -- hooks --------------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, unit_of: dict[str, int]) -> None:
        """Watch the modules of `model`; `unit_of` maps the names of its parameters, tied ones too, to units."""
        wanted = _modules_of_units(model, unit_of, blocks=[unit for unit in self._weights.units if unit.block])
        for module, units in wanted.items():
            streamed = [unit for unit in units if unit in self._parts]
            if not streamed:
                continue
            for kind in (True, False):
                several = sum(self._weights.units[unit].block == kind for unit in streamed)
                all_units = sum(self._weights.units[unit].block == kind for unit in self._parts)
                if 1 < several >= len(self._rings[kind]) < all_units:
                    raise UserError(
                        f"a block of this model runs with {several} blocks' weights at a time, and another must be on "
                        f"its way: tiered.unit_buffers must be {several + 1} at least"
                    )
            module.register_forward_pre_hook(self._before(streamed))

    def _before(self, units: list[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for unit in units:
                self.need(unit)

        return hook

    @contextmanager
    def passing(self, *, backward: bool) -> Iterator[None]:
        """Around each forward and each backward pass: the direction, and autograd keeping weights by place."""
        self._backward = backward
        self._before_last = self._last = None
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        slot = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if slot is None:
            return tensor.detach()  # itself would be a cycle where it is its node's own result
        assert slot.unit is not None
        return _Saved(slot.unit, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        slot = self.need(saved.unit)
        return slot.buffer.as_strided(saved.size, saved.stride, saved.offset)

    # -- the ring -----------------------------------------------------------------------------------------------------

    def need(self, unit: int) -> _Slot:
        """The unit's weights are on the device for what is computed next, and the unit after it is on its way."""
        slot = self._slot_of.get(unit) or self._start(unit)
        self._clock += 1
        slot.used = self._clock
        if slot.arrival is not None:
            slot.arrival.wait()
            slot.arrival = None
            for parameter, start, shape in self._parts[unit]:
                parameter.data = slot.buffer[start : start + parameter.numel()].view(shape)
        if unit != self._last:
            self._followed[self._backward, self._before_last, self._last] = unit
            self._before_last, self._last = self._last, unit
        following = self._followed.get((self._backward, self._before_last, unit))
        if following is not None and following not in self._slot_of:
            ring = self._rings[self._weights.units[following].block]
            if any(slot.unit != unit for slot in ring):
                self._start(following, keep=unit)
        return slot

    def _start(self, unit: int, *, keep: int | None = None) -> _Slot:
        """Send the unit on its way into the buffer unused for longest, but not that of `keep`."""
        ring = self._rings[self._weights.units[unit].block]
        slot = min((slot for slot in ring if keep is None or slot.unit != keep), key=lambda slot: slot.used)
        if slot.unit is not None:
            self._evict(slot)
        slot.unit = unit
        slot.used = self._clock  # on its way counts as used, or the next one would take its place
        self._slot_of[unit] = slot
        into = slot.buffer[: self._weights.units[unit].elements]
        host = self._weights.store.host(unit)
        source = host if host is not None else lambda buffer: self._weights.store.read(unit, 0, buffer)
        slot.arrival = self._device.fetch(source, into, after=self._device.mark())
        return slot

    def _evict(self, slot: _Slot) -> None:
        assert slot.unit is not None
        if slot.arrival is not None:
            slot.arrival.wait()  # two transfers must not share a buffer
            slot.arrival = None
        else:
            self._send_away(slot.unit)
        del self._slot_of[slot.unit]
        slot.unit = None

    def _send_away(self, unit: int) -> None:
        for parameter, _, shape in self._parts[unit]:
            parameter.data = self._away.expand(shape)

    def forget(self) -> None:
        """The homes have new weights: whatever the ring holds is old."""
        for ring in self._rings.values():
            for slot in ring:
                if slot.unit is not None:
                    self._evict(slot)
                slot.used = 0


def _modules_of_units(
    model: nn.Module, unit_of: dict[str, int], *, blocks: Sequence[Unit]
) -> dict[nn.Module, list[int]]:
    """The units that must be there while a module runs: those of its own weights; for a block, of all inside it.

    The modules inside a block are watched too, since transformers recomputes a block below its hooks.
    """
    inside = {unit.name for unit in blocks}
    wanted: dict[nn.Module, list[int]] = {}
    for name, module in model.named_modules():
        named = module.named_parameters(prefix=name, recurse=name in inside, remove_duplicate=False)
        units = dict.fromkeys(unit_of[parameter] for parameter, _ in named)
        if units:
            wanted[module] = list(units)
    return wanted
