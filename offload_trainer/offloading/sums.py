"""Sums of gradients in host memory and on drives: a thread of their own adds to them.

    ring ──job, in the order of arrival──> sums in host memory
                                           staging ──a unit at a time──> drive (and back, for the next micro-batch)

All that waits, for copies, drives and additions, waits there, and so does what takes time in host memory. Once
something went wrong nothing more is added, and everybody who waits is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload_trainer.offloading.node import Node
from offload_trainer.offloading.store import UnitStore
from offload_trainer.plan.layout import Unit, stretch_of
from offload_trainer.storage.transfer import Future, Workers, done, ending

# Elements. From here on torch starts a team of threads, which on a CPU would take the cores from what computes.
_ALONE = (1 << 15) - 1


@dataclass
class _Staging:
    """Host memory in which a unit's sums are collected before they go to their drive."""

    buffer: torch.Tensor
    unit: int | None = None
    brought: bool = False  # whether the unit's sums so far are in it
    writing: Future | None = None


class Staged:
    """The sums in `store` where they can be added to: in host memory, which is their home or before their drive.

    Of several ranks each brings and sends its stretch of a unit, through buffers that all of them see. Nobody may
    write into a buffer before all have met after their `claim` of it.
    """

    def __init__(self, units: Sequence[Unit], store: UnitStore, *, stagings: int, node: Node) -> None:
        """`stagings`: buffers for blocks whose sums go to a drive; all other units share one."""
        self._units, self._store, self._node = tuple(units), store, node
        away = [unit for unit in units if store.homes[unit.index] >= 0]
        self._stagings = {
            True: self._make([unit for unit in away if unit.block], stagings),
            False: self._make([unit for unit in away if not unit.block], 1),
        }
        self._written: set[int] = set()  # units whose sums so far are on their drive

    def _make(self, units: Sequence[Unit], count: int) -> list[_Staging]:
        dtype = self._store.dtype
        size = max((unit.trained for unit in units), default=0) * dtype.itemsize
        return [_Staging(self._node.memory(size).view(dtype)) for _ in range(min(count, len(units)))]

    def claim(self, unit: int) -> None:
        """A buffer is the unit's when this returns, and what this rank had in it is on its drive."""
        if self._store.host(unit) is not None or self._staging_of(unit) is not None:
            return
        ring = self._stagings[self._units[unit].block]
        self._send(ring[-1])  # most likely complete; what still comes is added to it later
        staging = ring[0]
        ring.append(ring.pop(0))  # the one used longest ago is first
        self._settle(staging)
        staging.unit, staging.brought = unit, False

    def collecting(self, unit: int) -> torch.Tensor:
        """Host memory in which the unit's sums are now."""
        inside = self._store.host(unit)
        if inside is not None:
            return inside
        self.claim(unit)
        staging = self._staging_of(unit)
        assert staging is not None
        if not staging.brought:
            self._bring(self._units[unit], staging)
        return staging.buffer[: self._units[unit].trained]

    def _staging_of(self, unit: int) -> _Staging | None:
        ring = self._stagings[self._units[unit].block]
        return next((staging for staging in ring if staging.unit == unit), None)

    def _bring(self, unit: Unit, staging: _Staging) -> None:
        """Bring a unit's sums so far from the drive, if there are any."""
        first, end = self._stretch(unit)
        if unit.index not in self._written:
            _clear_between(unit, staging.buffer, first=first, end=end)
        elif first < end:
            for other in self._stagings[unit.block]:
                self._settle(other)
            self._store.read(unit.index, first, staging.buffer[first:end]).wait()
        staging.brought = True

    def _stretch(self, unit: Unit) -> tuple[int, int]:
        return stretch_of(unit, self._node.rank, ranks=self._node.world)

    def _send(self, staging: _Staging) -> None:
        """Start a unit's sums on their way to their drive."""
        unit, staging.unit = staging.unit, None
        if unit is None or not staging.brought:
            return
        first, end = self._stretch(self._units[unit])
        if first < end:
            staging.writing = self._store.write(unit, first, staging.buffer[first:end])
        self._written.add(unit)

    def send(self, unit: int) -> Future:
        """Start the sums of a unit that was added to last on their way; done when they are in their home."""
        staging = self._staging_of(unit)
        if staging is None:
            return done()  # they are collected there
        self._send(staging)
        return staging.writing or done()

    def _settle(self, staging: _Staging) -> None:
        """What was in this buffer is on its drive."""
        if staging.writing is not None:
            staging.writing.wait()
            staging.writing = None

    def send_all(self) -> None:
        """All sums of this rank are in their homes when this returns."""
        stagings = [staging for ring in self._stagings.values() for staging in ring]
        for staging in stagings:
            self._send(staging)
        for staging in stagings:
            self._settle(staging)

    def clear(self) -> None:
        """The next step begins. After `send_all`."""
        self._written.clear()


class HostSums:
    """Adds to the sums in `store`, whose homes are host memory (RAM) or drives."""

    def __init__(self, units: Sequence[Unit], store: UnitStore, *, stagings: int, alone: bool) -> None:
        """`stagings`: see `Staged`. `alone`: without a team of threads, since the cores compute."""
        self._staged, self._alone = Staged(units, store, stagings=stagings, node=Node()), alone
        self._error: BaseException | None = None
        self._worker = Workers(1, "sums")

    def put(self, work: Callable[[], object], future: Future) -> None:
        """Do `work` after all that was put before; then, or with what went wrong here, the future ends."""

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
        """Everything is added and in its home when this returns. Raises what went wrong on the way."""
        future = Future()
        self.put(self._staged.send_all, future)
        future.wait()

    def complete(self, unit: int) -> Future:
        """Done when all that was put so far is added, and this unit's sums, the last that got any of it, are home."""
        begun, home = Future(), Future()
        begun.then(lambda error: home.finish_part(error) if error is not None else None)
        self.put(lambda: self._staged.send(unit).then(home.finish_part), begun)
        return home

    def clear(self) -> None:
        """The next step begins. After `finish`."""
        self._staged.clear()

    def close(self) -> None:
        self._worker.close()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def add(self, unit: int, start: int, values: torch.Tensor, *, first: bool) -> None:
        """Add to a unit's sums from element `start` on, or, if these are the first, let them be the sums."""
        target = self.collecting(unit)[start : start + values.numel()]
        size = _ALONE if self._alone else max(1, values.numel())
        for part, more in zip(target.split(size), values.split(size), strict=True):
            part.copy_(more) if first else part.add_(more)

    def collecting(self, unit: int) -> torch.Tensor:
        """Host memory in which the unit's sums are now."""
        return self._staged.collecting(unit)


def _clear_between(unit: Unit, sums: torch.Tensor, *, first: int, end: int) -> None:
    """Zeros in [first, end) where no weight lies: the update reads these elements too, and they share scales with
    weights.

    A weight itself begins with its first gradient, and without one nobody reads it.
    """
    places = [place for place in unit.places if place.weight.trainable]
    starts = [place.start for place in places[1:]] + [unit.trained]
    for place, start in zip(places, starts, strict=True):
        between = slice(max(first, place.start + place.weight.numel), min(end, start))
        if between.start < between.stop:
            sums[between].zero_()
