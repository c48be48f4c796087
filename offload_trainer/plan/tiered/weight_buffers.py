"""Assign streamed weights to device buffers and decide what to prefetch: one ring for blocks, one for other modules.

The least recently used unit is evicted, and the next units are prefetched while the current one computes. The engine
fetches by these rules, and the planner counts the drive and copy traffic with them. Pure bookkeeping, in elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from offload_trainer.plan.tiered.layout import Unit

# Largest number of buffers for modules outside the blocks: one is fetched while the other (embedding, head) is used.
OTHERS = 2


@dataclass
class Slot:
    """A device buffer, and the unit whose weights it contains or is receiving."""

    block: bool  # the buffer is for blocks
    size: int
    unit: int | None = None
    used: int = 0  # clock value of the last use or fetch


class Rings:
    """The device buffers for `units`, whose weights are kept in RAM or on drives."""

    def __init__(self, units: Sequence[Unit], *, blocks: int) -> None:
        """Allocate buffers; `blocks` is the number of buffers for blocks."""
        self._units = {unit.index: unit for unit in units}
        self.slots = [
            *(Slot(True, size) for size in slot_sizes(units, blocks=blocks, of_blocks=True)),
            *(Slot(False, size) for size in slot_sizes(units, blocks=blocks, of_blocks=False)),
        ]
        self.together = {True: 1, False: 1}  # number of units of each kind that one module uses together
        self._clock = 0

    def count(self, *, of_blocks: bool) -> int:
        """Return the number of buffers for blocks, or for other modules."""
        return sum(slot.block == of_blocks for slot in self.slots)

    def slot_of(self, unit: int) -> int | None:
        """Return the index of the unit's buffer, or None if the unit is not on the device."""
        return next((number for number, slot in enumerate(self.slots) if slot.unit == unit), None)

    def use(self, unit: int) -> None:
        """Mark the unit as used now."""
        number = self.slot_of(unit)
        assert number is not None
        self._clock += 1
        self.slots[number].used = self._clock

    def put(self, unit: int, number: int) -> None:
        """Record that the unit is being fetched into buffer `number`."""
        self._clock += 1  # a fetch counts as a use, otherwise the next fetch would evict it
        self.slots[number].unit, self.slots[number].used = unit, self._clock

    def empty(self, number: int) -> None:
        self.slots[number].unit, self.slots[number].used = None, 0

    def room_for(self, unit: int, keep: Collection[int] = ()) -> int | None:
        """Return the buffer to fetch the unit into: the least recently used of the smallest that are large enough.

        Buffers of units in `keep` are not considered.
        """
        wanted = self._units[unit]
        fitting = [
            number
            for number, slot in enumerate(self.slots)
            if slot.block == wanted.block and slot.size >= wanted.elements and slot.unit not in keep
        ]
        return min(fitting, key=lambda number: (self.slots[number].size, self.slots[number].used), default=None)

    def ahead(self, current: int | None, following: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield (unit, buffer) for each unit of `following` that should be prefetched now.

        `following` lists units in the order of their use. The caller must `put` each one before it asks for the next.
        Each ring keeps as many buffers free as one module uses at a time; if nothing is in use (`current` is None), all
        may be filled.
        """
        keep: set[int] = set() if current is None else {current}
        left = {kind: self._left(current, of_blocks=kind) for kind in (True, False)}
        for unit in islice(following, 2 * len(self.slots)):
            if unit in keep:
                continue
            kind = self._units[unit].block
            if left[kind] == 0:
                return
            if self.slot_of(unit) is None:
                number = self.room_for(unit, keep)
                if number is None:
                    return
                yield unit, number
            keep.add(unit)
            left[kind] -= 1

    def _left(self, current: int | None, *, of_blocks: bool) -> int:
        count = self.count(of_blocks=of_blocks)
        if current is None:
            return count
        least = 0 if self._units[current].block == of_blocks else min(1, count)
        return max(least, count - self.together[of_blocks])


def slot_sizes(units: Sequence[Unit], *, blocks: int, of_blocks: bool) -> list[int]:
    """Return the sizes in elements of the buffers of one kind, at most `blocks` of them."""
    sizes = sorted((unit.elements for unit in units if unit.block == of_blocks), reverse=True)
    return sizes[:1] * min(blocks, len(sizes)) if of_blocks else sizes[: min(blocks, OTHERS)]


def fetches(units: Sequence[Unit], order: Sequence[int], *, blocks: int, times: int = 1) -> list[tuple[int, int]]:
    """Return (unit, position of its use) for each fetch while `order` is executed `times` times.

    `order` lists unit indices by use; units that are not in `units` are resident and need no fetch. When a repetition
    starts with buffers in a state that an earlier one started with, the fetches repeat from there and are not simulated
    again.
    """
    away = {unit.index for unit in units}
    needed = [(place, unit) for place, unit in enumerate(order) if unit in away]
    walk, found, before = _Walk(units, needed, blocks=blocks), list[list[tuple[int, int]]](), dict[object, int]()
    for number in range(times):
        begun = before.setdefault(walk.state, number)
        if begun < number:
            found += [found[begun + place % (number - begun)] for place in range(times - number)]
            break
        found.append(walk.once())
    return [(unit, number * len(order) + place) for number, each in enumerate(found) for unit, place in each]


class _Walk:
    """Simulate the rings while units are used in a fixed order, repeatedly."""

    def __init__(self, units: Sequence[Unit], needed: Sequence[tuple[int, int]], *, blocks: int) -> None:
        """Start with empty buffers; `needed` lists (position, unit)."""
        self._rings, self._needed = Rings(units, blocks=blocks), needed
        self._far = 2 * len(self._rings.slots)  # prefetch distance
        self._following = [unit for _, unit in needed] * (1 + -(-self._far // max(1, len(needed))))
        self._coming: set[int] = set()  # fetched, and not used yet
        self._look_ahead(None, 0)

    @property
    def state(self) -> object:
        """Return everything that later fetches depend on: buffers by recency, and pending fetches."""
        slots = self._rings.slots
        uses = sorted({slot.used for slot in slots})
        return tuple((slot.unit, uses.index(slot.used)) for slot in slots), frozenset(self._coming)

    def once(self) -> list[tuple[int, int]]:
        """Execute the order once and return (unit, position) for each fetch."""
        rings, found = self._rings, []
        for done, (place, unit) in enumerate(self._needed, 1):
            if rings.slot_of(unit) is None:
                number = rings.room_for(unit)
                assert number is not None
                self._bring(unit, number)
            if unit in self._coming:
                self._coming.remove(unit)
                found.append((unit, place))
            rings.use(unit)
            self._look_ahead(unit, done)
        return found

    def _look_ahead(self, current: int | None, done: int) -> None:
        for unit, number in self._rings.ahead(current, self._following[done : done + self._far]):
            self._bring(unit, number)

    def _bring(self, unit: int, number: int) -> None:
        self._rings.put(unit, number)
        self._coming.add(unit)
