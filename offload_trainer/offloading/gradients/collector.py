"""A step's gradients on their way from autograd to the update: the sums of each weight's, and their norm.

    autograd ──add──> sums on the device                                              one operation of its stream
             ──copy─────────────────────> sums in host memory                         the first gradient of a weight
             ──copy──> ring ──a thread──> sums in host memory, or on drives    the others (host_accumulator.py)

Autograd's thread waits for none of this, but when more than its share is on its way (offloading/device/d2h_limits).
What a tied weight gets from its several uses is added up on the device first, as autograd would. Norms are taken on the
way; `norm` adds them up in the model's order, so that neither the homes nor the order of arrival changes a bit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload_trainer.offloading.device.base import Device
from offload_trainer.offloading.device.d2h_limits import InFlight, Ring
from offload_trainer.offloading.gradients.host_accumulator import HostAccumulator
from offload_trainer.offloading.gradients.norms import norm_of, ordered_norm
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import DEVICE, Place, Unit
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done, together

# Told of a unit whose sums are complete and in their home: the device's mark at which they are made, or what went wrong
Complete = Callable[[int, Any, BaseException | None], None]


class TiedGradients:
    """What a tied weight gets in a micro-batch from its several uses, until it is complete."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts
        self._partial: dict[str, tuple[int, torch.Tensor]] = {}  # from so many of their uses

    def add(self, name: str, flat: torch.Tensor) -> torch.Tensor | None:
        """The sum over all uses, once there is one of each; None before."""
        if self._counts[name] == 1:
            return flat
        seen, before = self._partial.pop(name, (0, None))
        flat = flat if before is None else before.add_(flat)
        if seen + 1 == self._counts[name]:
            return flat
        self._partial[name] = seen + 1, flat
        return None

    def rest(self) -> list[tuple[str, torch.Tensor]]:
        """What there is of weights of which the micro-batch used a part."""
        rest = [(name, flat) for name, (_, flat) in self._partial.items()]
        self._partial.clear()
        return rest


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
        ring_bytes: int,
        in_flight_bytes: int,
        order: Sequence[str],
    ) -> None:
        """`order`: the weights' names as the norm adds them up. `stagings`: see `HostAccumulator`.

        `ring_bytes` are needed where sums in host memory get a second gradient or one of another dtype, or are on a
        drive; `in_flight_bytes` may wait on the device for their copies, beside the largest gradient.
        """
        self.dtype = dtype
        self._device = device
        self._place: dict[str, tuple[Unit, Place]] = {
            place.weight.name: (unit, place) for unit in units for place in unit.places if place.weight.trainable
        }
        pinned = device.is_cuda
        trained = [unit.trained for unit in units]
        self.store = UnitStore(
            trained, homes, dtype=dtype, files=files, transfers=transfers, pinned=pinned, node=Node()
        )
        self._on_device = _resident(units, homes, device=device, dtype=dtype)
        self._host = HostAccumulator(units, self.store, stagings=stagings, alone=not device.is_cuda)
        self._ring, self._in_flight = Ring(host_buffer(ring_bytes, pinned=pinned)), InFlight(in_flight_bytes)
        self._order = tuple(name for name in order if name in self._place)
        self._norms: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()  # in this step
        self._uses = TiedGradients({name: place.weight.uses for name, (_, place) in self._place.items()})
        self._landing: dict[str, Future] = {}  # gradients that are copied to where they stay
        self._complete: Complete | None = None
        self._lacking: dict[int, set[str]] = {}  # of each unit, what the last micro-batch has given nothing yet

    def watch(self, complete: Complete) -> None:
        """Tell of each unit, in the step's last backward, once all of its weights have got their gradients there.

        On any thread, autograd's too. A unit of which one weight gets none in that backward is not told of.
        """
        self._complete = complete

    # -- during backward ----------------------------------------------------------------------------------------------

    def add(self, name: str, gradient: torch.Tensor, *, last: bool) -> None:
        """Add a gradient of this micro-batch from one use of a weight, and keep it as long as that takes.

        `last`: it is the step's last micro-batch, so the norm of the sum counts.
        """
        flat = self._uses.add(name, gradient.detach().reshape(-1))
        if flat is not None:
            self._add(name, flat, last=last)

    def end_of_backward(self, *, last: bool) -> None:
        """A micro-batch is through: tied weights of which it used a part get what there is."""
        for name, flat in self._uses.rest():
            self._add(name, flat, last=last)

    def _add(self, name: str, flat: torch.Tensor, *, last: bool) -> None:
        unit, place = self._place[name]
        first = name not in self._arrived
        self._arrived.add(name)
        if first and last:
            self._norms[name] = norm_of(flat)
        resident, host = self.on_device(unit.index), self.store.host(unit.index)
        here = slice(place.start, place.start + flat.numel())
        if resident is not None:
            target = resident[here]
            target.copy_(flat) if first else target.add_(flat)
            if last and not first:
                self._norms[name] = self._norm_of_sum(target)
        elif first and host is not None and flat.dtype is self.dtype:
            self._landing[name] = self._device.download(flat, host[here])
            self._in_flight.add(flat.nbytes, self._landing[name])
        else:
            self._add_in_host_memory(name, flat, first=first, norm=last and not first)
        if last and self._complete is not None:
            self._got(name, unit, self._complete)

    def _got(self, name: str, unit: Unit, complete: Complete) -> None:
        """A weight has got its last gradient; with the last one of its unit, whoever watches is told when all lie."""
        lacking = self._lacking.setdefault(unit.index, _trained(unit))
        lacking.discard(name)
        if not lacking:
            made, landing = self._device.mark(), [self._landing.get(one) for one in _trained(unit)]
            added = done() if unit.index in self._on_device else self._host.complete(unit.index)
            home = together([added, *(future for future in landing if future is not None)])
            home.then(lambda error: complete(unit.index, made, error))

    def _add_in_host_memory(self, name: str, flat: torch.Tensor, *, first: bool, norm: bool) -> None:
        """Through the ring, a piece at a time; the thread of the sums does the rest."""
        unit, place = self._place[name]
        pieces = flat.split(self._ring.largest_piece // flat.itemsize)
        gone = Future(parts=len(pieces))
        landing = self._landing.pop(name, None)
        start = place.start
        for piece in pieces:
            memory, read = self._ring.take(piece.nbytes)
            values = memory.view(piece.dtype)
            arrived = self._device.download(piece, values)
            arrived.then(gone.finish_part)
            self._host.put(self._adding(unit.index, start, values, [landing, arrived], first=first), read)
            start += piece.numel()
        self._in_flight.add(flat.nbytes, gone)
        if norm:
            self._host.put(lambda: self._take_norm(name), Future())

    def _adding(
        self, unit: int, start: int, values: torch.Tensor, after: Sequence[Future | None], *, first: bool
    ) -> Callable[[], None]:
        def work() -> None:
            for future in after:
                if future is not None:
                    future.wait()
            self._host.add(unit, start, values, first=first)

        return work

    def _take_norm(self, name: str) -> None:
        unit, place = self._place[name]
        sums = self._host.collecting(unit.index)
        self._norms[name] = self._norm_of_sum(sums[place.start : place.start + place.weight.numel])

    def _norm_of_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Of several micro-batches' gradients; `values` may lie on the device or not."""
        return norm_of(values) if self._device.place.type == "cpu" else ordered_norm(values)

    # -- after it -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All sums are in their homes when this returns. Raises what went wrong on the way."""
        self._in_flight.synchronize()
        self._host.finish()

    def norm(self) -> float:
        """Global norm of the sums, as they are scaled: infinite or NaN if one of them is. After `finish`."""
        norms = self.norms()
        return float(torch.linalg.vector_norm(torch.stack(list(norms.values())))) if norms else 0.0

    def norms(self, order: float = 2.0) -> dict[str, torch.Tensor]:
        """The norm of each weight's sum, in the model's order: fp32, 0-dim, on the CPU. After `finish`.

        An `order` other than 2 reads every sum.
        """
        arrived = [name for name in self._order if name in self._arrived]
        if order != 2.0:
            return {
                name: torch.linalg.vector_norm(self.sums(name), order, dtype=torch.float32).cpu() for name in arrived
            }
        norms = {name: self._norm_of(name) for name in arrived}
        far = [name for name, norm in norms.items() if norm.device.type != "cpu"]
        if far:
            norms |= zip(far, torch.stack([norms[name] for name in far]).cpu(), strict=True)
        return norms

    def _norm_of(self, name: str) -> torch.Tensor:
        """What was taken on the way, or, for a weight that the last micro-batch did not use, the norm of its sums."""
        if name not in self._norms:
            self._norms[name] = self._norm_of_sum(self.sums(name))
        return self._norms[name]

    def sums(self, name: str) -> torch.Tensor:
        """The sum of one weight, 1-D: the memory itself where it is on the device, else a copy. After `finish`."""
        unit, place = self._place[name]
        resident = self.on_device(unit.index)
        if resident is None:
            return self.store.get(unit.index, place.start, place.weight.numel)
        return resident[place.start : place.start + place.weight.numel]

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Set the sum of one weight that got a gradient. After `finish`."""
        unit, place = self._place[name]
        resident, flat = self.on_device(unit.index), values.reshape(-1)
        if resident is None:
            self.store.replace(unit.index, place.start, flat)
        else:
            resident[place.start : place.start + place.weight.numel].copy_(flat)
        self._norms.pop(name, None)

    def scale(self, factor: float) -> None:
        """Multiply all sums by `factor`, as torch multiplies gradients: rounded to their dtype. After `finish`."""
        for name in self._arrived:
            self.replace(name, self.sums(name).mul_(factor))

    def forget(self, name: str) -> None:
        """Drop the sum of one weight, as if it had got no gradient in this step. After `finish`."""
        self._arrived.discard(name)
        self._norms.pop(name, None)
        self._landing.pop(name, None)

    def on_device(self, unit: int) -> torch.Tensor | None:
        """A unit's sums, `trained` of them, where they live on the device: an update there reads them in place."""
        return self._on_device.get(unit)

    def read(self, unit: int, start: int, buffer: torch.Tensor, *, after: Any) -> Future:
        """Fill `buffer` (host memory) with a unit's sums from element `start` on, from the device or a drive.

        `after`: the device's mark at which they are made.
        """
        resident = self.on_device(unit)
        if resident is not None:
            return self._device.download(resident[start : start + buffer.numel()], buffer, after=after)
        return self.store.read(unit, start, buffer)

    def has(self, name: str) -> bool:
        """Whether the weight got a gradient in this step."""
        return name in self._arrived

    @property
    def arrived(self) -> frozenset[str]:
        """Names of the weights that got a gradient in this step."""
        return frozenset(self._arrived)

    def clear(self) -> None:
        """Begin the next step; what is in the homes is overwritten."""
        self._norms.clear()
        self._arrived.clear()
        self._landing.clear()
        self._lacking.clear()
        self._host.clear()

    def close(self) -> None:
        """What was begun is done or has failed when this returns."""
        self._host.close()


def _trained(unit: Unit) -> set[str]:
    return {place.weight.name for place in unit.places if place.weight.trainable}


def _resident(
    units: Sequence[Unit], homes: Sequence[int], *, device: Device, dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Sums that stay on the device: one flat tensor, a part of it for each unit whose home it is."""
    held = [unit for unit in units if homes[unit.index] == DEVICE]
    sizes = [unit.trained for unit in held]
    parts = device.buffer(sum(sizes), dtype).split(sizes)
    return {unit.index: part for unit, part in zip(held, parts, strict=True)}
