"""Streaming of weights to the device: their order of use, the device buffers, and copies or all-gathers.

The engine fetches by these rules, and the planner counts with them. There is one ring of buffers for blocks and one for
other modules. With several GPUs, each copies a whole unit from RAM, or a shard and receives the others in an
all-gather. Pure bookkeeping.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from offload_trainer.plan.machine import MachineProfile, Rate
from offload_trainer.plan.shape import ModelShape, Order
from offload_trainer.plan.tiered.layout import ALIGN, Unit, units_of
from offload_trainer.plan.tiers import DEVICE


@dataclass
class Slot:
    """A device buffer, and the unit whose weights it contains or is receiving."""

    block: bool  # the buffer is for blocks
    size: int
    unit: int | None = None
    used: int = 0  # clock value of the last use or fetch


class Rings:
    """The device buffers for `units`, which the model does not use where they are stored; up to `blocks` for blocks."""

    def __init__(self, units: Sequence[Unit], *, blocks: int) -> None:
        self._units = {unit.index: unit for unit in units}
        kinds = {kind: slot_sizes(units, blocks=blocks, of_blocks=kind) for kind in (True, False)}
        self.slots = [Slot(kind, size) for kind, sizes in kinds.items() for size in sizes]
        self.together = {True: 1, False: 1}  # number of units of each kind that one module uses together
        self._clock = 0

    def count(self, *, of_blocks: bool) -> int:
        """Return the number of buffers for blocks, or for other modules."""
        return sum(slot.block == of_blocks for slot in self.slots)

    def slot_of(self, unit: int) -> int | None:
        """Return the index of the unit's buffer, or None if the unit is not on the device."""
        return next((number for number, slot in enumerate(self.slots) if slot.unit == unit), None)

    def put(self, unit: int, number: int) -> None:
        """Record that the unit is being fetched into buffer `number`, or is used there now."""
        self._clock += 1  # a fetch counts as a use, otherwise the next fetch would evict it
        self.slots[number].unit, self.slots[number].used = unit, self._clock

    def empty(self, number: int) -> None:
        self.slots[number].unit, self.slots[number].used = None, 0

    def room_for(self, unit: int, keep: Collection[int] = ()) -> int | None:
        """Return the buffer for the unit, but not one of `keep`: the least recently used of the smallest that fit."""
        wanted = self._units[unit]
        fitting = [
            number
            for number, slot in enumerate(self.slots)
            if slot.block == wanted.block and slot.size >= wanted.elements and slot.unit not in keep
        ]
        return min(fitting, key=lambda number: (self.slots[number].size, self.slots[number].used), default=None)

    def ahead(self, current: int | None, following: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield (unit, buffer) for each unit of `following`, in the order of their use, that should be prefetched now.

        The caller must `put` each one before it asks for the next. Each ring keeps as many buffers free as one module
        uses at a time; if nothing is in use (`current` is None), all may be filled.
        """
        keep: set[int] = set() if current is None else {current}
        left = {}
        for kind in (True, False):
            left[kind] = count = self.count(of_blocks=kind)
            if current is not None:
                least = 0 if self._units[current].block == kind else min(1, count)
                left[kind] = max(least, count - self.together[kind])
        for unit in islice(following, 2 * len(self.slots)):
            if unit in keep:
                continue
            kind = self._units[unit].block
            if left[kind] == 0:
                return
            if self.slot_of(unit) is None:
                if (number := self.room_for(unit, keep)) is None:
                    return
                yield unit, number
            keep.add(unit)
            left[kind] -= 1


def slot_sizes(units: Sequence[Unit], *, blocks: int, of_blocks: bool) -> list[int]:
    """Return the sizes in elements of the buffers of one kind, at most `blocks` of them."""
    sizes = sorted((unit.elements for unit in units if unit.block == of_blocks), reverse=True)
    # Outside the blocks 2 suffice: one is fetched while the other (embedding, head) is used.
    return sizes[:1] * min(blocks, len(sizes)) if of_blocks else sizes[: min(blocks, 2)]


def packed_bytes(units: Sequence[Unit], homes: Sequence[int], *, of_blocks: bool, item_bytes: int) -> int:
    """Return the bytes of the second buffer that each buffer of one kind has for weights fetched as quantised."""
    fetched = [unit for unit, home in zip(units, homes, strict=True) if unit.quantised and home != DEVICE]
    return max((unit.stored_bytes(item_bytes) for unit in fetched if unit.block == of_blocks), default=0)


def fetches(units: Sequence[Unit], order: Sequence[int], *, blocks: int, times: int = 1) -> list[tuple[int, int]]:
    """Return (unit, position of its use) for each fetch while `order` is executed `times` times, from empty buffers.

    `order` lists unit indices by use; units that are not in `units` are resident and need no fetch. When buffers are in
    a state in which an earlier repetition began, the fetches repeat from there.
    """
    rings, indices = Rings(units, blocks=blocks), {unit.index for unit in units}
    needed = [(place, unit) for place, unit in enumerate(order) if unit in indices]
    far = 2 * len(rings.slots)  # prefetch distance
    following = [unit for _, unit in needed] * (1 + -(-far // max(1, len(needed))))
    coming = set[int]()  # fetched, and not used yet

    def look_ahead(current: int | None, done: int) -> None:
        for unit, number in rings.ahead(current, following[done : done + far]):
            rings.put(unit, number)
            coming.add(unit)

    look_ahead(None, 0)
    found, before = list[list[tuple[int, int]]](), dict[object, int]()
    for number in range(times):
        uses = sorted({slot.used for slot in rings.slots})
        state = tuple((slot.unit, uses.index(slot.used)) for slot in rings.slots), frozenset(coming)
        begun = before.setdefault(state, number)
        if begun < number:
            found += [found[begun + place % (number - begun)] for place in range(times - number)]
            break
        found.append([])
        for done, (place, unit) in enumerate(needed, 1):
            if (room := rings.slot_of(unit)) is None:
                room = rings.room_for(unit)
                assert room is not None
                coming.add(unit)
            if unit in coming:
                coming.remove(unit)
                found[-1].append((unit, place))
            rings.put(unit, room)
            look_ahead(unit, done)
    return [(unit, number * len(order) + place) for number, each in enumerate(found) for unit, place in each]


NCCL_BYTES = 512 << 20  # GPU memory of one communicator's buffers; an assumption


def even_part(elements: int, *, ranks: int) -> int:
    """Return the elements of a unit in each rank's shard, a multiple of ALIGN; every rank copies the remainder."""
    return elements // ALIGN // ranks * ALIGN


def transfer_bytes(size: int, *, item_bytes: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that each of `ranks` that gather a unit of `size` bytes gets from RAM, and from the others."""
    others = (ranks - 1) * item_bytes * even_part(size // item_bytes, ranks=ranks)
    return size - others, others


def at_once(machine: MachineProfile, *, ranks: int) -> MachineProfile:
    """Return the machine with the copy rates of one GPU while all `ranks` GPUs copy: as measured, or by memory."""
    rates, links = machine.rates, machine.links
    if machine.gpu is None or ranks == 1:
        return machine

    def of_each(alone: Rate | None, together: Rate | None) -> Rate | None:
        memory = rates.memory
        if together or alone is None or memory is None or memory.value / ranks >= alone.value:
            return together or alone
        source = f"memory, divided by {ranks} GPUs that copy at once: {memory.source}"
        return Rate(memory.value / ranks, "assumed", source)

    read = of_each(rates.to_device, links.to_device_at_once)
    written = of_each(rates.from_device, links.from_device_at_once)
    both, out = rates.both_ways, rates.both_ways_out
    if both and read and written and rates.to_device and rates.from_device:
        slower = min(1.0, read.value / rates.to_device.value, written.value / rates.from_device.value)
        both, out = replace(both, value=slower * both.value), out and replace(out, value=slower * out.value)
    rates = replace(rates, to_device=read, from_device=written, both_ways=both, both_ways_out=out)
    return replace(machine, rates=rates)


def seconds_of(moved: tuple[int, int], machine: MachineProfile, *, ranks: int) -> float | None:
    """Return the seconds of a copy from RAM followed by the all-gather, or None if a rate is unknown.

    `moved`: from `transfer_bytes`. `machine` has rates from `at_once`. On CPUs both are copies in memory.
    """
    into, joined = machine.rates.to_device, machine.links.all_gather or machine.links.between_gpus
    if machine.gpu is None:
        memory = machine.rates.memory
        into = machine.links.to_device_at_once or (memory and replace(memory, value=memory.value / 2 / ranks))
    from_ram, from_others = moved
    if into is None or (joined is None and from_others):
        return None
    return from_ram / into.value + (from_others / joined.value if joined is not None else 0.0)


def seconds_of_both(size: int, machine: MachineProfile, *, ranks: int, item_bytes: int) -> list[float | None]:
    """Return the seconds for a unit of `size` bytes if each of `ranks` copies all of it, and if they gather shards."""
    moved = (transfer_bytes(size, item_bytes=item_bytes, ranks=gathering) for gathering in (1, ranks))
    return [seconds_of(each, machine, ranks=ranks) for each in moved]


def uses_all_gather(setting: str, machine: MachineProfile, *, ranks: int) -> bool:
    """Return whether ranks fetch shards and all-gather them. Without a GPU this happens only on request."""
    if ranks == 1 or setting != "auto":
        return ranks > 1 and setting == "all_gather"
    whole, parts = seconds_of_both(2 * ALIGN * ranks, machine, ranks=ranks, item_bytes=2)
    return machine.gpu is not None and whole is not None and parts is not None and parts < whole


def with_order(shape: ModelShape, shown: Order) -> ModelShape:
    """Return the shape with the recorded order, or without one if the weights are registered in that order."""
    return replace(shape, order=None if shown == _registered(units_of(shape)) else shown)


def orders(units: Sequence[Unit], shape: ModelShape, *, checkpointing: bool) -> tuple[list[int], list[int]]:
    """Return unit indices in the order of use by a forward and by a backward.

    With `checkpointing` of any block, frozen blocks with nothing trained before them have a backward too, because
    transformers makes the first checkpointed block's input require a gradient.
    """
    order, index = shape.order or _registered(units), {unit.name: unit.index for unit in units}
    forward, backward = ([index[name] for name in names] for names in (order.forward, order.backward))
    if checkpointing:
        images = shape.images.units if shape.images else ()  # `text_alone_requires_grads` in model/images.py
        frozen = {unit.index for unit in units if unit.block and unit.name not in images}.difference(backward)
        backward += [unit for unit in forward[::-1] if unit in frozen]
    return forward, backward


def breadth_first(
    forward: Sequence[int], backward: Sequence[int], units: Sequence[Unit], *, times: int
) -> tuple[list[int], list[int]]:
    """Return the order of use if `times` micro-batches pass through each block before the next.

    Each uses the modules before the blocks and the first block before the next one begins, and in the backward the
    modules behind the blocks.
    """

    def cut(order: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        blocks = [place for place, unit in enumerate(order) if units[unit].block] or [len(order) - 1]
        first, end = blocks[0], blocks[-1] + 1
        return list(order[:first]), list(order[first:end]), list(order[end:])

    before, inside, behind = cut(forward)
    behind_back, inside_back, before_back = cut(backward)
    return (
        (before + inside[:1]) * times + inside[1:],
        (behind + behind_back) * times + inside_back[:-1] + (inside_back[-1:] + before_back) * times,
    )


def as_gradients_come(units: Sequence[Unit], shape: ModelShape) -> list[int]:
    """Return unit indices in the order in which a backward completes their gradients: where a unit runs first."""
    forward, _ = orders(units, shape, checkpointing=False)
    return list(dict.fromkeys(forward))[::-1]


def block_numbers(units: Sequence[Unit], shape: ModelShape) -> dict[int, int]:
    """Return the number of the block that each unit is or precedes, in the order of `as_gradients_come`."""
    found, number = dict[int, int](), len(shape.blocks)
    for unit in as_gradients_come(units, shape):
        number = shape.blocks.index(units[unit].name) if units[unit].block else number
        found[unit] = number
    return found


def _registered(units: Sequence[Unit]) -> Order:
    first, names = next((unit.index for unit in units if unit.block), len(units)), [unit.name for unit in units]
    tied = [unit.name for unit in units[:first] if any(place.weight.uses > 1 for place in unit.places)]
    return Order((*names, *tied), (*tied[::-1], *names[first:][::-1]))
