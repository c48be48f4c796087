"""Accumulate gradients in host memory and on drives, on a separate thread.

    ring ──job, in the order of arrival──> sums in host memory
                                           staging ──a unit at a time──> drive (and back, for the next micro-batch)

The thread waits for copies and drives and does the additions, so that autograd's thread does not. After an error
nothing more is added, and every wait raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload_trainer.offloading.device import limit_cores
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import Unit, range_of_rank
from offload_trainer.plan.tiered.spec import GRADIENT_BUFFERS
from offload_trainer.plan.tiers import on_drive
from offload_trainer.storage.transfer import Future, Workers, done, ending


@dataclass
class _Staging:
    """A host buffer in which a unit's sums are accumulated before they are written to their drive."""

    buffer: torch.Tensor
    unit: int | None = None
    loaded: bool = False  # the buffer contains the unit's earlier sums
    writing: Future | None = None


class StagedSums:
    """The sums of `store` in host memory, either permanently or in staging buffers in front of drives.

    With several ranks each one reads and writes its range of a unit, through buffers that all ranks share. No rank may
    write into a buffer before a barrier after all ranks' `claim`.
    """

    def __init__(self, units: Sequence[Unit], store: UnitStore, *, node: Node) -> None:
        """Allocate buffers for blocks with sums on a drive; all other such units share one buffer."""
        self._units, self._store, self._node = tuple(units), store, node
        on_drives = [unit for unit in units if on_drive(store.homes[unit.index])]
        self._stagings = {
            True: self._make([unit for unit in on_drives if unit.block], GRADIENT_BUFFERS),
            False: self._make([unit for unit in on_drives if not unit.block], 1),
        }
        self._written: set[int] = set()  # units whose earlier sums are on their drive

    def _make(self, units: Sequence[Unit], count: int) -> list[_Staging]:
        dtype = self._store.dtype
        size = max((unit.trained for unit in units), default=0) * dtype.itemsize
        return [_Staging(self._node.memory(size).view(dtype)) for _ in range(min(count, len(units)))]

    def claim(self, unit: int) -> None:
        """Assign a staging buffer to the unit, after writing this rank's earlier contents to their drive."""
        if self._store.host(unit) is not None or self._staging_of(unit) is not None:
            return
        ring = self._stagings[self._units[unit].block]
        self._send(ring[-1])  # most likely complete; later gradients are added to it after reading it back
        staging = ring[0]
        ring.append(ring.pop(0))  # the least recently used buffer is first
        self._wait_for_write(staging)
        staging.unit, staging.loaded = unit, False

    def collecting(self, unit: int) -> torch.Tensor:
        """Return the host memory that currently holds the unit's sums."""
        inside = self._store.host(unit)
        if inside is not None:
            return inside
        self.claim(unit)
        staging = self._staging_of(unit)
        assert staging is not None
        if not staging.loaded:
            first, end = self._own_range(self._units[unit])
            if unit not in self._written:
                _clear_between(self._units[unit], staging.buffer, first=first, end=end)
            elif first < end:  # read back the earlier sums
                for other in self._stagings[self._units[unit].block]:
                    self._wait_for_write(other)
                self._store.read(unit, first, staging.buffer[first:end]).wait()
            staging.loaded = True
        return staging.buffer[: self._units[unit].trained]

    def _staging_of(self, unit: int) -> _Staging | None:
        ring = self._stagings[self._units[unit].block]
        return next((staging for staging in ring if staging.unit == unit), None)

    def _own_range(self, unit: Unit) -> tuple[int, int]:
        return range_of_rank(unit, self._node.rank, ranks=self._node.world)

    def _send(self, staging: _Staging) -> None:
        """Start writing a unit's sums to their drive."""
        unit, staging.unit = staging.unit, None
        if unit is None or not staging.loaded:
            return
        first, end = self._own_range(self._units[unit])
        if first < end:
            staging.writing = self._store.write(unit, first, staging.buffer[first:end])
        self._written.add(unit)

    def send(self, unit: int) -> Future:
        """Start writing the sums of the most recent unit; the future completes when they are stored."""
        staging = self._staging_of(unit)
        if staging is None:
            return done()  # the sums are permanently in host memory
        self._send(staging)
        return staging.writing or done()

    def _wait_for_write(self, staging: _Staging) -> None:
        if staging.writing is not None:
            staging.writing.wait()
            staging.writing = None

    def send_all(self) -> None:
        """Write all sums of this rank, and wait until they are stored."""
        stagings = [staging for ring in self._stagings.values() for staging in ring]
        for staging in stagings:
            self._send(staging)
        for staging in stagings:
            self._wait_for_write(staging)

    def clear(self) -> None:
        """Begin the next step, which reads no earlier sums from drives; call it after `send_all`."""
        self._written.clear()


class HostAccumulator:
    """The thread that adds gradients to the sums in `store`, in RAM or on drives."""

    def __init__(self, units: Sequence[Unit], store: UnitStore, *, cores: int) -> None:
        """Start the thread, which uses `cores` cores."""
        self.staged = StagedSums(units, store, node=Node())
        self._error: BaseException | None = None
        self._worker = Workers(1, "sums")
        limit_cores(self._worker, cores)

    def put(self, work: Callable[[], object], future: Future) -> None:
        """Queue `work`; the future completes after it, or with the first error of this thread."""

        def unless_broken() -> None:
            if self._error is not None:
                raise self._error
            try:
                work()
            except BaseException as error:
                self._error = error
                raise

        self._worker.put(ending(future, unless_broken))

    def finish(self) -> None:
        """Wait until everything is added and stored; raise the first error."""
        future = Future()
        self.put(self.staged.send_all, future)
        future.wait()

    def complete(self, unit: int) -> Future:
        """Return a future that completes when all queued work is done and the most recent unit's sums are stored."""
        begun, stored = Future(), Future()
        begun.then(lambda error: stored.finish_part(error) if error is not None else None)
        self.put(lambda: self.staged.send(unit).then(stored.finish_part), begun)
        return stored

    def close(self) -> None:
        self._worker.close()


def _clear_between(unit: Unit, sums: torch.Tensor, *, first: int, end: int) -> None:
    """Set the padding between weights in [first, end) to zero, because the update reads it and it shares scales.

    The sums of a weight start with its first gradient; without a gradient they are not read.
    """
    places = [place for place in unit.places if place.weight.trainable]
    starts = [place.start for place in places[1:]] + [unit.trained]
    for place, start in zip(places, starts, strict=True):
        between = slice(max(first, place.start + place.weight.numel), min(end, start))
        if between.start < between.stop:
            sums[between].zero_()
