"""A step's gradients on their way from autograd to the update: their sums are kept on the device, in host memory,
or, through a buffer, on a drive.

Each weight's gradient is added to its place in its unit as soon as autograd has it, and autograd's copy is let go.
Norms are taken on the device on the way; `norm` adds them up in the model's order, so that neither the homes
nor the order of arrival changes a bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_trainer.plan.layout import DEVICE, Place, Unit
from offload_trainer.tiers.device import Device
from offload_trainer.tiers.memory import host_buffer
from offload_trainer.tiers.store import UnitStore
from offload_trainer.tiers.transfer import DriveFile, Ticket, Transfers

_NORM_PIECE = 1 << 17  # elements


@dataclass
class _Staging:
    """Host memory in which a unit's gradient is collected before it goes to its drive."""

    buffer: torch.Tensor
    unit: int | None = None
    writing: Ticket | None = None


class Gradients:
    """Sums of one step. `dtype` is what they are kept and added in."""

    def __init__(
        self,
        units: Sequence[Unit],
        homes: Sequence[int],
        *,
        dtype: torch.dtype,
        device: Device,
        files: Sequence[DriveFile],
        transfers: Transfers,
        stagings: int,
        order: Sequence[str],
    ) -> None:
        """`order`: the weights' names as the norm adds them up. `stagings`: buffers for blocks whose gradients go to a
        drive; all other units share one."""
        self.dtype = dtype
        self._units, self._device = tuple(units), device
        self._place: dict[str, tuple[Unit, Place]] = {
            place.weight.name: (unit, place) for unit in units for place in unit.places if place.weight.trainable
        }
        pinned = device.is_cuda
        trained = [unit.trained for unit in units]
        self.store = UnitStore(trained, homes, dtype=dtype, files=files, transfers=transfers, pinned=pinned)
        self._on_device = _Resident(units, homes, device=device, dtype=dtype)
        away = [unit for unit in units if homes[unit.index] >= 0]
        self._stagings = {
            True: self._make([unit for unit in away if unit.block], stagings, pinned=pinned),
            False: self._make([unit for unit in away if not unit.block], 1, pinned=pinned),
        }
        self._order = tuple(name for name in order if name in self._place)
        self._norms: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()  # in this step
        self._written: set[int] = set()  # units whose sums so far are on their drive

    def _make(self, units: Sequence[Unit], count: int, *, pinned: bool) -> list[_Staging]:
        size = max((unit.trained for unit in units), default=0) * self.dtype.itemsize
        return [_Staging(host_buffer(size, pinned=pinned).view(self.dtype)) for _ in range(min(count, len(units)))]

    # -- during backward ----------------------------------------------------------------------------------------------

    def add(self, name: str, gradient: torch.Tensor, *, last: bool) -> None:
        """Add a weight's gradient of this micro-batch; `last`: it is the step's last one, so its norm counts."""
        unit, place = self._place[name]
        flat = gradient.detach().reshape(-1)
        resident = self.on_device(unit.index)
        if resident is not None:
            self._add_on_device(name, flat, resident[place.start : place.start + flat.numel()], last=last)
            return
        target = self._collecting(unit)[place.start : place.start + flat.numel()]
        if name not in self._arrived:
            self._arrived.add(name)
            if last:
                self._norms[name] = norm_of(flat)
            self._device.download(flat, target)
            return
        self._device.finish()
        target.add_(flat.to(target.device))
        if last:
            self._norms[name] = norm_of(target)

    def _add_on_device(self, name: str, flat: torch.Tensor, target: torch.Tensor, *, last: bool) -> None:
        if name in self._arrived:
            target.add_(flat)
        else:
            self._arrived.add(name)
            target.copy_(flat)
        if last:
            self._norms[name] = norm_of(target)

    def _collecting(self, unit: Unit) -> torch.Tensor:
        """Host memory in which the unit's sums are now."""
        inside = self.store.host(unit.index)
        if inside is not None:
            return inside
        ring = self._stagings[unit.block]
        staging = next((staging for staging in ring if staging.unit == unit.index), None)
        if staging is None:
            self._send(ring[-1])  # most likely complete; what still comes is added to it later
            staging = ring[0]
            ring.append(ring.pop(0))  # the one used longest ago is first
            self._settle(staging)
            part = staging.buffer[: unit.trained]
            if unit.index in self._written:
                for other in ring:
                    self._settle(other)
                self.store.read(unit.index, 0, part).wait()
            else:
                part.zero_()
            staging.unit = unit.index
        return staging.buffer[: unit.trained]

    def _settle(self, staging: _Staging) -> None:
        """What was in this buffer is on its drive."""
        if staging.writing is not None:
            staging.writing.wait()
            staging.writing = None

    def _send(self, staging: _Staging) -> None:
        """Start a unit's sums on their way to their drive."""
        if staging.unit is None:
            return
        self._device.finish()
        trained = self._units[staging.unit].trained
        staging.writing = self.store.write(staging.unit, 0, staging.buffer[:trained])
        self._written.add(staging.unit)
        staging.unit = None

    # -- after it -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All sums are in their homes when this returns."""
        for ring in self._stagings.values():
            for staging in ring:
                self._send(staging)
        for ring in self._stagings.values():
            for staging in ring:
                self._settle(staging)
        self._device.finish()

    def norm(self) -> float:
        """Global norm of the sums, as they are scaled: infinite or NaN if one of them is."""
        norms = [self._norm_of(name) for name in self._order if name in self._arrived]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def _norm_of(self, name: str) -> torch.Tensor:
        """What was taken on the way, or, for a weight that the last micro-batch did not use, the norm of its sums."""
        if name not in self._norms:
            unit, place = self._place[name]
            resident = self.on_device(unit.index)
            if resident is None:
                self._norms[name] = norm_of(self.store.get(unit.index, place.start, place.weight.numel))
            else:
                self._norms[name] = norm_of(resident[place.start : place.start + place.weight.numel])
        return self._norms[name].to(self._device.place)

    def on_device(self, unit: int) -> torch.Tensor | None:
        """A unit's sums, `trained` of them, where they live on the device: an update there reads them in place."""
        return self._on_device.of_unit.get(unit)

    def read(self, unit: int, start: int, buffer: torch.Tensor) -> Ticket:
        """Fill `buffer` (host memory) with a unit's sums from element `start` on, from the device or a drive."""
        resident = self.on_device(unit)
        if resident is not None:
            return self._device.download(resident[start : start + buffer.numel()], buffer)
        return self.store.read(unit, start, buffer)

    @property
    def arrived(self) -> frozenset[str]:
        """Names of the weights that got a gradient in this step."""
        return frozenset(self._arrived)

    def clear(self) -> None:
        """Begin the next step; what is in the homes is overwritten."""
        self._norms.clear()
        self._arrived.clear()
        self._written.clear()


class _Resident:
    """Sums that stay on the device: one flat tensor, a part of it for each unit whose home it is."""

    def __init__(self, units: Sequence[Unit], homes: Sequence[int], *, device: Device, dtype: torch.dtype) -> None:
        held = [unit for unit in units if homes[unit.index] == DEVICE]
        memory = device.buffer(sum(unit.trained for unit in held), dtype)
        parts = memory.split([unit.trained for unit in held])
        self.of_unit = {unit.index: part for unit, part in zip(held, parts, strict=True)}


def clip_factor(norm: float, *, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it is at most `limit`; 0: no limit, 1.

    In fp32 and operation by operation as torch.nn.utils.clip_grad_norm_ takes it, for the same bits.
    """
    if not limit:
        return 1.0
    return float(torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0))


def norm_of(flat: torch.Tensor) -> torch.Tensor:
    """fp32 norm of one 1-D gradient, on its device.

    On the CPU a piece at a time: torch makes an fp32 copy first, and adds up without a tree, 1 % off for 9e7 elements.
    Copy and results have memory of their own: small blocks between freed copies would leave a heap of holes.
    """
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32)
    pieces = flat.split(_NORM_PIECE)
    norms, copy = torch.empty(len(pieces)), torch.empty(min(_NORM_PIECE, flat.numel()))
    for index, piece in enumerate(pieces):
        torch.linalg.vector_norm(copy[: piece.numel()].copy_(piece), out=norms[index])
    return torch.linalg.vector_norm(norms)
