"""Accumulate gradients over a step's micro-batches where their sums are placed, and measure each weight's sum.

A CPU's gradients are added to sums in RAM in one pass. A GPU copies a weight's first gradient of a step straight to its
sum in RAM, and the others to a ring buffer. A thread adds them from there, and also adds to sums on drives. Sums on the
device are added there, and breadth-first also a block's other sums if there is room (`TierSizes.adds_on_device`). Norms
have the same bits for every placement and order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offload_trainer import ranks
from offload_trainer.common.errors import TrainerError
from offload_trainer.offloading.device import Device, cores_beside, limit_cores
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.cuda_adam import CudaKernel
from offload_trainer.optim.norms import Pieces, norm_of
from offload_trainer.plan.tiered.layout import Unit, range_of_rank
from offload_trainer.plan.tiered.spec import GRADIENT_BUFFERS, GRADIENTS_IN_FLIGHT
from offload_trainer.plan.tiers import DEVICE, on_drive
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, Workers, done, ending, together

if TYPE_CHECKING:
    from offload_trainer.offloading.allocation import EngineParts

_ALIGN = 64  # bytes
_TOGETHER = 32_000_000  # bytes; a copy of so many takes a GPU a millisecond, so that further ones need not wait for it

# Callback for a unit whose sums are complete and stored: (unit, event after which they are complete, error or None)
Complete = Callable[[int, Any, BaseException | None], None]


class GradientIntake:
    """The weights that gradients come for, which of them have one in this step, and partial gradients of tied ones."""

    def __init__(self, units: Sequence[Unit]) -> None:
        trained = {unit.index: [place for place in unit.places if place.weight.trainable] for unit in units}
        self.place = {place.weight.name: (unit, place) for unit in units for place in trained[unit.index]}
        self.names = {unit: [place.weight.name for place in places] for unit, places in trained.items()}
        self.arrived: set[str] = set()  # weights with a gradient in this step
        self.micro_batch = 0  # number of the micro-batch whose gradients arrive
        # By micro-batch and weight: number of uses so far, and their sum.
        self._partial: dict[tuple[int, str], tuple[int, torch.Tensor]] = {}

    def add(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return a weight's gradient (1-D), the sum over its uses in the micro-batch; None if a use is missing yet."""
        flat, uses = gradient.detach().reshape(-1), self.place[name][1].weight.uses
        if uses == 1:
            return flat
        key = self.micro_batch, name
        seen, before = self._partial.pop(key, (0, None))
        flat = flat if before is None else before.add_(flat)
        if seen + 1 == uses:
            return flat
        self._partial[key] = seen + 1, flat
        return None

    def rest(self) -> list[tuple[str, torch.Tensor]]:
        """Return and drop the partial sums of weights of which the micro-batch did not reach all uses."""
        partial, self._partial = self._partial, {}
        return [(name, flat) for (_, name), (_, flat) in sorted(partial.items(), key=lambda one: one[0][0])]

    def clear(self) -> None:
        """Begin the next step, also after a micro-batch that failed."""
        self.arrived.clear()
        self._partial.clear()

    def norms_of_all(
        self, norms: Mapping[str, torch.Tensor], *, order: Sequence[str], node: Node
    ) -> dict[str, torch.Tensor]:
        """Return all weights' norms, of which each rank of a pipeline has some, and note that these have a gradient."""
        found = torch.zeros(2, len(order))
        for number, name in enumerate(order):
            if name in norms:
                found[0, number], found[1, number] = norms[name], 1
        node.all_reduce(found)
        if twice := [name for name, has in zip(order, found[1], strict=True) if has > 1]:
            raise TrainerError(f"several ranks have gradients of {', '.join(twice)}: leave parallel.pipeline out")
        all_norms = {name: norm for name, norm, has in zip(order, *found, strict=True) if has}
        self.arrived.update(all_norms)
        return all_norms


class Gradients:
    """The gradient sums of one step, each of which one rank adds up, stored and accumulated in `dtype`."""

    def __init__(self, parts: EngineParts, store: UnitStore, *, order: Sequence[str]) -> None:
        """Allocate the sums on the device; `store` has the others, and the home and the dtype of all.

        `order` lists the weights in the order in which their norms are summed. The first kernel of `parts` adds
        gradients to sums in host memory and measures them; the second does on the device, if it is a `CudaKernel`.
        """
        self._device, self._node = device, node = parts.device, parts.node
        self.store, self.dtype, units = store, store.dtype, parts.units
        self._kernel, device_kernel = parts.kernels
        self._ordered = device.torch_device.type != "cpu"  # sums may be on a GPU, so their norms are ordered
        fits, self._device_kernel = self._ordered and self.dtype is torch.float32, None
        if fits and isinstance(device_kernel, CudaKernel) and device_kernel.adds_gradients:
            self._device_kernel = device_kernel
        self._intake = GradientIntake(units)
        self.arrived: Set[str] = self._intake.arrived  # weights that have a gradient in this step
        self._complete: Complete | None = None
        self._missing: dict[int, set[str]] = {}  # unit -> weights whose last gradient is missing
        self._own: dict[int, Future] = {}  # this rank's units, which it reports to the others of the pipeline
        if node.world > 1:
            self._group, self._reports = ranks.group_of(in_step=False), Workers(1, "reports")
        there = [unit for unit in units if store.homes[unit.index] == DEVICE]
        shares = device.buffer(sum(unit.trained for unit in there), self.dtype).split([unit.trained for unit in there])
        # The sums on the device by unit (1-D, `unit.trained` elements).
        self.on_device = {unit.index: part for unit, part in zip(there, shares, strict=True)}
        adds_there = parts.sizes.adds_on_device
        self._added_there = {unit.index for unit in units if adds_there(unit, store.homes[unit.index])}
        self._device_sums: dict[str, torch.Tensor] = {}  # weight -> its sum, for units of `_added_there`, until sent
        self._order = tuple(name for name in order if name in self._intake.place)
        self._norms: dict[str, torch.Tensor] = {}
        self._direct: dict[str, Future] = {}  # direct copies to host memory in flight
        self._downloads = Downloads(device, host_buffer(parts.ring_bytes, pinned=device.is_cuda))
        # A thread adds gradients to sums in RAM or on drives in the order of their arrival. It waits for copies and
        # drives, so that autograd's thread does not. After an error it adds nothing more, and every wait raises it.
        self._staged, self._adding = StagedSums(units, store, node=Node()), Workers(1, "sums")
        self._error: BaseException | None = None
        limit_cores(self._adding, cores_beside(device))

    def report_to(self, complete: Complete | None, *, owners: Mapping[int, int]) -> None:
        """Begin a step's last backward: call `complete`, if given, for each unit whose weights all have gradients.

        It is called from any thread when the sums are stored and no rank uses the unit's weights in this step any more.
        `owners`: of a pipeline, the rank that computes each unit, in the order in which a backward completes them; all
        ranks hear of all of these units.
        """
        self._complete, self._own = complete, {}
        if complete is not None and self._node.world > 1:
            self._own = own = {unit: Future() for unit, owner in owners.items() if owner == self._node.rank}
            self._complete = lambda unit, _, error: own.get(unit, Future()).finish_part(error)
            self._reports.put(partial(self._report_of_all, complete, owners, own))

    def _report_of_all(self, complete: Complete, owners: Mapping[int, int], own: Mapping[int, Future]) -> None:
        """Report the units of all ranks in the same order on a thread of each rank."""
        unit = -1
        try:
            self._group.all_gather_numbers(0)  # rank 0 has recorded the last update, whose old pages may be overwritten
            for unit, owner in owners.items():
                whole = torch.zeros(1, dtype=torch.uint8)
                if unit in own:
                    own[unit].wait()
                    whole.fill_(not self._missing.get(unit, True))
                ranks.broadcast(whole, source=owner, group=self._group)
                if whole:
                    complete(unit, self._device.mark(), None)
        except BaseException as error:
            complete(unit, None, error)

    def turn_to(self, micro_batch: int) -> None:
        """Announce the micro-batch whose gradients arrive next; number 0 begins the next block."""
        if micro_batch == 0 and self._added_there:
            self._send_sums()
            self._downloads.begin_block()
        self._intake.micro_batch = micro_batch

    def add(self, name: str, gradient: torch.Tensor, *, last: bool) -> None:
        """Add a gradient of one use of a weight, asynchronously; in the `last` micro-batch the sum is measured."""
        if (flat := self._intake.add(name, gradient)) is not None:
            self._add(name, flat, last=last)

    def end_of_backward(self, *, last: bool) -> None:
        """End a micro-batch: add the partial gradients of tied weights of which not all uses were reached."""
        for name, flat in self._intake.rest():
            self._add(name, flat, last=last)
        self._send_sums()
        self._downloads.queue()
        for unit, stored in self._own.items() if last else ():
            if self._missing.get(unit, True):
                stored.finish_part()

    def _add(self, name: str, flat: torch.Tensor, *, last: bool) -> None:
        unit, place = self._intake.place[name]
        first, at_hand = name not in self._intake.arrived, self._device.in_host_memory
        self._intake.arrived.add(name)
        measured = last and (at_hand or not first)  # its norm is computed in host memory as the gradient is added
        resident, host = self.on_device.get(unit.index), self.store.host(unit.index)
        here = slice(place.start, place.start + flat.numel())
        if last and not measured:
            self._norms[name] = norm_of(flat)
        if first and unit.index in self._added_there:
            self._device_sums[name] = torch.empty_like(flat, dtype=self.dtype)
        target = self._device_sums.get(name) if resident is None else resident[here]
        if target is not None:
            if measured and self._device_kernel is not None:
                self._norms[name] = self._device_kernel.add_gradient(target, flat.contiguous())
            else:
                target.copy_(flat) if first else target.add_(flat)
                if measured:
                    self._norms[name] = self._norm_of_sum(name, target)
        elif host is not None and at_hand:
            pieces = self._pieces(name) if measured else None
            results = self._kernel.add(host[here], flat.contiguous(), first=first, pieces=pieces)
            if pieces is not None:
                self._norms[name] = pieces.norm(results)
        else:
            self._downloads.hold(flat.nbytes, self._send(name, flat, first=first, measured=measured))
        if last and name in self._device_sums:
            self._send_sums(name)
        if last and self._complete is not None:
            self._note_last(name, unit, self._complete)

    def _note_last(self, name: str, unit: Unit, complete: Complete) -> None:
        """Note a weight's last gradient; when its unit has all of them, report the unit once the sums are stored."""
        names = self._intake.names[unit.index]
        missing = self._missing.setdefault(unit.index, set(names))
        missing.discard(name)
        if missing:
            return
        self._downloads.queue()
        made, stored = self._device.mark(), [self._direct[one] for one in names if one in self._direct]
        if unit.index not in self.on_device:  # after everything that is queued, and after the write to a drive
            stored.append(self._put(lambda: self._staged.send(unit.index)))
        together(stored).then(lambda error: complete(unit.index, made, error))

    def _send_sums(self, *names: str) -> None:
        """Start copying the sums of these weights, or of all, from the device. `turn_to` bounds their bytes there."""
        for name in names or [*self._device_sums]:
            self._downloads.hold(0, self._send(name, self._device_sums.pop(name), first=True, measured=False))

    def _send(self, name: str, flat: torch.Tensor, *, first: bool, measured: bool) -> Future:
        """Start copying a gradient, or the first sum, to host memory; return a future for the end of the copy."""
        unit, place = self._intake.place[name]
        host = self.store.host(unit.index)
        if not first or host is None or flat.dtype is not self.dtype:
            return self._add_in_host_memory(name, flat, first=first, measured=measured)
        self._direct[name] = self._downloads.add(unit.index, flat, host[place.start :][: flat.numel()])
        return self._direct[name]

    def _add_in_host_memory(self, name: str, flat: torch.Tensor, *, first: bool, measured: bool) -> Future:
        """Copy a gradient through the ring buffer in parts, which the thread adds to the sums; return the copies' end.

        `measured`: compute the norm of the new sum, with each part if the parts can consist of whole pieces.
        """
        unit, place = self._intake.place[name]
        collecting = self._staged.collecting
        pieces, size = self._pieces(name), self._downloads.largest_piece // flat.itemsize
        at_once = measured and size >= pieces.width
        parts, results = flat.split(size - size % pieces.width if at_once else size), list[torch.Tensor]()
        gone, download, start = Future(parts=len(parts)), self._direct.pop(name, None) or done(), place.start
        for part in parts:
            memory, read = self._downloads.take(part.nbytes)
            values = memory.view(part.dtype)
            arrived = self._downloads.add(unit.index, part, values)
            arrived.then(gone.finish_part)

            def add(start: int = start, values: torch.Tensor = values, arrived: Future = arrived) -> None:
                download.wait()
                arrived.wait()
                target = collecting(unit.index)[start : start + values.numel()]
                results.append(self._kernel.add(target, values, first=first, pieces=pieces if at_once else None))

            self._put(add, read)
            start += part.numel()
        if measured:

            def take_norm() -> None:
                if not at_once:
                    sums = collecting(unit.index)[place.start : start]
                    results[:] = [self._kernel.add(sums, None, pieces=pieces)]
                self._norms[name] = pieces.norm(torch.cat(results))

            self._put(take_norm)
        return gone

    def _put(self, work: Callable[[], object], future: Future | None = None) -> Future:
        """Queue `work` for the adding thread; the future completes after it, or with the first error of this thread."""
        future = future or Future()

        def unless_broken() -> object:
            if self._error is not None:
                raise self._error
            try:
                return work()
            except BaseException as error:
                self._error = error
                raise

        self._adding.put(ending(future, unless_broken))
        return future

    def _pieces(self, name: str) -> Pieces:
        """Return the pieces in which a weight's sum over micro-batches is measured in host memory."""
        return Pieces.of(self._intake.place[name][1].weight.numel, ordered=self._ordered)

    def _norm_of_sum(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the norm of a weight's sum over micro-batches; `values` may be on the device or in host memory."""
        if values.device.type != "cpu":
            if self._device_kernel is not None:
                return self._device_kernel.add_gradient(values)
            return norm_of(values, ordered=True)
        pieces = self._pieces(name)
        return pieces.norm(self._kernel.add(values.contiguous(), None, pieces=pieces))

    def finish(self) -> None:
        """Wait until all sums are stored in their tier; raise errors of copies, additions and drives."""
        self._downloads.synchronize()
        self._put(self._staged.send_all).wait()

    def norms(self, order: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the norm of each weight's sum in the model's order (fp32, 0-dim, on the CPU). Call `finish` before."""
        arrived = [name for name in self._order if name in self.arrived]
        if order != 2.0:
            measure = partial(torch.linalg.vector_norm, ord=order, dtype=torch.float32)
            return {name: measure(self.sums(name)).cpu() for name in arrived}
        for name in arrived:
            if name not in self._norms:  # the last micro-batch did not use the weight
                self._norms[name] = self._norm_of_sum(name, self.sums(name))
        norms = {name: self._norms[name] for name in arrived}
        if far := [name for name, norm in norms.items() if norm.device.type != "cpu"]:
            norms |= zip(far, torch.stack([norms[name] for name in far]).cpu(), strict=True)
        return norms if self._node.world == 1 else self._intake.norms_of_all(norms, order=self._order, node=self._node)

    def sums(self, name: str) -> torch.Tensor:
        """Return the sum of one weight (1-D): a view on the device, else a copy. Call `finish` before."""
        unit, place = self._intake.place[name]
        if (resident := self.on_device.get(unit.index)) is not None:
            return resident[place.start : place.start + place.weight.numel]
        return self.store.get(unit.index, place.start, place.weight.numel)

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Set the sum of one weight that has a gradient. Call `finish` before."""
        unit, place = self._intake.place[name]
        if unit.index in self.on_device:
            self.sums(name).copy_(values.reshape(-1))
        else:
            self.store.put(unit.index, place.start, values.reshape(-1))
        self._norms.pop(name, None)

    def scale(self, factor: float) -> None:
        """Multiply all sums by `factor`, rounded to their dtype as in torch. Call `finish` before."""
        for name in self.arrived:
            self.replace(name, self.sums(name).mul_(factor))

    def forget(self, name: str) -> None:
        """Drop the sum of one weight, as if it had no gradient in this step. Call `finish` before."""
        self._intake.arrived.discard(name)
        self._norms.pop(name, None)
        self._direct.pop(name, None)

    def read(self, unit: int, start: int, buffer: torch.Tensor, *, after: Any) -> Future:
        """Fill `buffer` (host memory) with a unit's sums from element `start` on, complete after the event `after`."""
        if (resident := self.on_device.get(unit)) is not None:
            return self._device.download([(resident[start : start + buffer.numel()], buffer)], after=after)
        return self.store.read(unit, start, buffer)

    def clear(self) -> None:
        """Begin the next step, whose gradients overwrite the stored sums."""
        self._norms.clear()
        self._intake.clear()
        self._direct.clear()
        self._device_sums.clear()
        self._missing.clear()
        self._staged.clear()

    def close(self) -> None:
        """Wait for the adding thread's queued work, successful or not, and end the thread."""
        with suppress(Exception):  # the adding thread waits for all copies, and some may have failed
            self._downloads.queue()
        self._adding.close()
        if self._node.world > 1:
            self._reports.close(patience=1.0)


class Downloads:
    """Copies of gradients from the device to host memory, directly or through a ring buffer, in bounded numbers.

    A GPU's copies for one unit are queued together, with one event and one wait, for which Python takes 100 us.
    """

    def __init__(self, device: Device, ring: torch.Tensor) -> None:
        """Use the host memory `ring` (uint8), whose pieces are reused after they have been read."""
        self._device, self._ring, self._next = device, ring, 0
        # In bytes: a quarter of the ring, so that a large tensor is read while more of it arrives.
        self.largest_piece = len(ring) // 4 // _ALIGN * _ALIGN
        self._taken: deque[tuple[int, int, Future]] = deque()  # pieces of the ring: start, end, future that frees it
        self._held: deque[tuple[int, Future]] = deque()  # bytes on the device, and the future that frees them
        self._unit, self._arrived = -1, Future()
        self._before = done()  # the last copy of the block before
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, unit: int, values: torch.Tensor, into: torch.Tensor) -> Future:
        """Add a copy of `values` (on the device), and return a future that completes with it, after `queue`."""
        if self._device.in_host_memory:
            return self._device.download([(values, into)])
        if unit != self._unit:
            self.queue()
        self._unit, arrived = unit, self._arrived
        self._copies.append((values, into))
        if sum(values.nbytes for values, _ in self._copies) >= _TOGETHER:
            self.queue()
        return arrived

    def queue(self) -> None:
        """Queue the copies on the device."""
        if self._copies:
            copies, arrived = self._copies, self._arrived
            self._copies, self._arrived = [], Future()
            try:
                self._device.download(copies).then(arrived.finish_part)
            except BaseException as error:
                arrived.finish_part(error)
                raise

    def hold(self, size: int, gone: Future) -> None:
        """Count `size` bytes on the device until `gone` completes, after waiting for room; raise errors of such copies.

        The bound does not count the largest tensor. Otherwise a head's gradient, larger than everything else, would
        block the following copies until it has left.
        """
        self._held.append((size, gone))
        sizes = deque(size for size, _ in self._held)
        while sizes and (self._held[0][1].done or sum(sizes) - max(sizes) > GRADIENTS_IN_FLIGHT):
            sizes.popleft()
            self._wait(self._held.popleft()[1])

    def begin_block(self) -> None:
        """Wait until the copies before those of the last block have left the device."""
        self.queue()
        before, self._before = self._before, self._held[-1][1] if self._held else done()
        self._wait(before)

    def take(self, size: int) -> tuple[torch.Tensor, Future]:
        """Return the next `size` bytes of the ring, and the future to complete when they have been read."""
        assert size <= self.largest_piece
        start = self._next if self._next + size <= len(self._ring) else 0
        end = start + size
        while any(first < end and start < last for first, last, _ in self._taken):
            self._wait(self._taken.popleft()[2])
        future = Future()
        self._taken.append((start, end, future))
        self._next = -(-end // _ALIGN) * _ALIGN
        return self._ring[start:end], future

    def _wait(self, future: Future) -> None:
        if not future.done:
            self.queue()
        future.wait()

    def synchronize(self) -> None:
        """Wait until all copies have completed."""
        self.queue()
        while self._held:
            self._held.popleft()[1].wait()


@dataclass
class _Staging:
    """A host buffer in which a unit's sums are accumulated before they are written to their drive."""

    buffer: torch.Tensor
    unit: int | None = None
    loaded: bool = False  # the buffer contains the unit's earlier sums
    written: Future = field(default_factory=done)


class StagedSums:
    """The sums of `store` in host memory, either permanently or in staging buffers in front of drives.

    With several ranks each one reads and writes its range of a unit, through buffers that all ranks share. No rank may
    write into a buffer before a barrier after all ranks' `claim`.
    """

    def __init__(self, units: Sequence[Unit], store: UnitStore, *, node: Node) -> None:
        """Allocate buffers for blocks with sums on a drive; all other such units share one buffer."""
        self._units, self.store = tuple(units), store
        self._own = [range_of_rank(unit, node.rank, ranks=node.world) for unit in units]
        self._stagings: dict[bool, list[_Staging]] = {}  # key: for blocks or not; the least recently used is first
        for block, count in ((True, GRADIENT_BUFFERS), (False, 1)):
            sizes = [unit.trained for unit in units if unit.block == block and on_drive(store.homes[unit.index])]
            size = max(sizes, default=0) * store.dtype.itemsize
            buffers = [node.memory(size).view(store.dtype) for _ in range(min(count, len(sizes)))]
            self._stagings[block] = [_Staging(buffer) for buffer in buffers]
        self._on_drive: set[int] = set()  # units whose earlier sums are on their drive

    def claim(self, unit: int) -> None:
        """Assign a staging buffer to the unit, after writing this rank's earlier contents to their drive."""
        if self.store.host(unit) is not None or self._staging_of(unit) is not None:
            return
        ring = self._stagings[self._units[unit].block]
        self._send(ring[-1])  # most likely complete; later gradients are added to it after reading it back
        staging = ring.pop(0)
        ring.append(staging)
        staging.written.wait()
        staging.unit, staging.loaded = unit, False

    def collecting(self, unit: int) -> torch.Tensor:
        """Return the host memory that currently holds the unit's sums."""
        if (inside := self.store.host(unit)) is not None:
            return inside
        self.claim(unit)
        staging = self._staging_of(unit)
        assert staging is not None
        if not staging.loaded:
            first, end = self._own[unit]
            if unit not in self._on_drive:
                self._clear_padding(unit, staging.buffer)
            elif first < end:  # read back the earlier sums
                for other in self._stagings[self._units[unit].block]:
                    other.written.wait()
                self.store.read(unit, first, staging.buffer[first:end]).wait()
            staging.loaded = True
        return staging.buffer[: self._units[unit].trained]

    def _clear_padding(self, unit: int, sums: torch.Tensor) -> None:
        """Set this rank's padding between weights to zero, because the update reads it and it shares scales."""
        first, end = self._own[unit]
        places = [place for place in self._units[unit].places if place.weight.trainable]
        starts = [place.start for place in places[1:]] + [self._units[unit].trained]
        for place, start in zip(places, starts, strict=True):
            between = slice(max(first, place.start + place.weight.numel), min(end, start))
            if between.start < between.stop:
                sums[between].zero_()

    def _staging_of(self, unit: int) -> _Staging | None:
        return next((one for one in self._stagings[self._units[unit].block] if one.unit == unit), None)

    def _send(self, staging: _Staging) -> None:
        unit, staging.unit = staging.unit, None
        if unit is None or not staging.loaded:
            return
        first, end = self._own[unit]
        if first < end:
            staging.written = self.store.write(unit, first, staging.buffer[first:end])
        self._on_drive.add(unit)

    def send(self, unit: int) -> Future:
        """Start writing the sums of the most recent unit; the future completes when they are stored."""
        if (staging := self._staging_of(unit)) is None:
            return done()  # the sums are permanently in host memory
        self._send(staging)
        return staging.written

    def send_all(self) -> None:
        """Write all sums of this rank, and wait until they are stored."""
        stagings = [staging for ring in self._stagings.values() for staging in ring]
        for staging in stagings:
            self._send(staging)
        for staging in stagings:
            staging.written.wait()

    def clear(self) -> None:
        """Begin the next step, which reads no earlier sums from drives; call it after `send_all`."""
        self._on_drive.clear()
