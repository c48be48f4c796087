"""Which buffer on the device a unit's weights go to: one ring for the blocks, one for the modules outside them.

The engine fetches by this, and the plan counts with it. What has been unused for longest makes room; what comes next
is on its way while others compute. Pure bookkeeping, in elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from offload_trainer.plan.layout import Unit

# Of modules outside blocks, at most: an embedding and a head, each on its way while the other one is used.
OTHERS = 2


@dataclass
class Slot:
    """A buffer, and the unit whose weights are in it or on their way to it."""

    block: bool  # for blocks
    size: int
    unit: int | None = None
    used: int = 0  # when it was last needed, or sent on its way


class Rings:
    """The slots for `units`, which live away from the device."""

    def __init__(self, units: Sequence[Unit], *, blocks: int) -> None:
        """`blocks`: slots for those that are blocks."""
        self._units = {unit.index: unit for unit in units}
        self.slots = [
            *(Slot(True, size) for size in slot_sizes(units, blocks=blocks, of_blocks=True)),
            *(Slot(False, size) for size in slot_sizes(units, blocks=blocks, of_blocks=False)),
        ]
        self.together = {True: 1, False: 1}  # units of each kind that one module runs with
        self._clock = 0

    def count(self, *, of_blocks: bool) -> int:
        """Slots of one kind."""
        return sum(slot.block == of_blocks for slot in self.slots)

    def slot_of(self, unit: int) -> int | None:
        """The number of the slot that the unit is in."""
        return next((number for number, slot in enumerate(self.slots) if slot.unit == unit), None)

    def use(self, unit: int) -> None:
        """It is needed now."""
        number = self.slot_of(unit)
        assert number is not None
        self._clock += 1
        self.slots[number].used = self._clock

    def put(self, unit: int, number: int) -> None:
        """It is on its way into that slot."""
        self._clock += 1  # on its way counts as used, or the next one would take its place
        self.slots[number].unit, self.slots[number].used = unit, self._clock

    def empty(self, number: int) -> None:
        self.slots[number].unit, self.slots[number].used = None, 0

    def room_for(self, unit: int, keep: Collection[int] = ()) -> int | None:
        """The slot for it, which holds none of `keep`: of the smallest that suffice the one unused for longest."""
        wanted = self._units[unit]
        fitting = [
            number
            for number, slot in enumerate(self.slots)
            if slot.block == wanted.block and slot.size >= wanted.elements and slot.unit not in keep
        ]
        return min(fitting, key=lambda number: (self.slots[number].size, self.slots[number].used), default=None)

    def ahead(self, current: int | None, following: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(unit, slot) of what is to be sent on its way now: those of `following` for which there is room.

        They come in the order in which they are needed, and each is `put` before the next is asked for. Of each ring
        as many slots are left alone as one module needs at a time; all may be filled where nothing is in use
        (`current` None).
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
    """Elements of the slots of one kind, no more than `blocks`; of modules outside them the largest have one each."""
    sizes = sorted((unit.elements for unit in units if unit.block == of_blocks), reverse=True)
    return sizes[:1] * min(blocks, len(sizes)) if of_blocks else sizes[: min(blocks, OTHERS)]


def fetches(units: Sequence[Unit], order: Sequence[int], *, blocks: int, times: int = 1) -> list[tuple[int, int]]:
    """(unit, place where it is needed) of each time that one of `units` has to be brought; `order` comes so many times.

    `order`: indices of units as they are needed; those that are not among `units` are where they are needed. Where the
    order begins anew with the buffers as they once were, all goes on as it did then.
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
    """Rings, as units are needed in turn, over and over."""

    def __init__(self, units: Sequence[Unit], needed: Sequence[tuple[int, int]], *, blocks: int) -> None:
        """`needed`: (place, unit)."""
        self._rings, self._needed = Rings(units, blocks=blocks), needed
        self._far = 2 * len(self._rings.slots)  # ahead
        self._following = [unit for _, unit in needed] * (1 + -(-self._far // max(1, len(needed))))
        self._coming: set[int] = set()  # on its way, and not needed yet
        self._look_ahead(None, 0)

    @property
    def state(self) -> object:
        """All that the fetches from here on depend on: the slots, in the order of their use, and what is coming."""
        slots = self._rings.slots
        uses = sorted({slot.used for slot in slots})
        return tuple((slot.unit, uses.index(slot.used)) for slot in slots), frozenset(self._coming)

    def once(self) -> list[tuple[int, int]]:
        """(unit, place) of what has to be brought until the order is through."""
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
