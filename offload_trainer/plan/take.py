"""How units of weights in RAM come to the GPUs of a node: each takes all of them, or a part that the others get of it.

    direct   each of n GPUs copies the T bytes of a unit from RAM, all at once      T / A
    parts    each copies T / n and gets the others' parts from their GPUs           T / n / A + (n - 1) / n T / G

A: bytes/s into each GPU while all copy; G: bytes/s that come to each GPU in an all-gather. Both are what `bench`
measures between ranks. Where A is not known it is one GPU's rate, or an n-th of the memory's if that is less, which all
of them read; where G is not known it is what the GPUs' own links have, and without those nobody claims that parts are
faster. Copy and all-gather of a unit follow each other. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from offload_trainer.plan.layout import ALIGN
from offload_trainer.plan.machine import MachineProfile, Rate
from offload_trainer.plan.time import Bound
from offload_trainer.units import format_bytes, format_seconds

NCCL_BYTES = 512 << 20  # of a GPU's memory, for the buffers of one communicator; an assumption
Take = Literal["auto", "direct", "gather"]


def even_part(elements: int, *, ranks: int) -> int:
    """Elements of a unit that each rank copies for all, a multiple of ALIGN; what is left each copies for itself."""
    return elements // ALIGN // ranks * ALIGN


@dataclass(frozen=True)
class Taken:
    """Bytes of weights into one GPU: from RAM, and of the other GPUs' parts."""

    from_ram: int
    from_others: int

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.from_ram + other.from_ram, self.from_others + other.from_others)

    def __rmul__(self, times: int) -> Taken:
        return Taken(times * self.from_ram, times * self.from_others)


def taken(elements: int, *, item_bytes: int, ranks: int, by_parts: bool) -> Taken:
    """Of a unit of so many elements, by one of the `ranks` of a node."""
    others = (ranks - 1) * even_part(elements, ranks=ranks) if by_parts else 0
    return Taken(item_bytes * (elements - others), item_bytes * others)


def at_once(machine: MachineProfile, *, ranks: int) -> MachineProfile:
    """The machine with the rates at which each of several of its GPUs copies while the others do."""
    rates, links = machine.rates, machine.links
    if machine.gpu is None or ranks == 1:
        return machine
    read, written = (
        together or _divided(alone, rates.memory, ranks=ranks)
        for together, alone in (
            (links.to_device_at_once, rates.to_device),
            (links.from_device_at_once, rates.from_device),
        )
    )
    both = rates.both_ways
    if both and read and written and rates.to_device and rates.from_device:
        slower = min(1.0, read.value / rates.to_device.value, written.value / rates.from_device.value)
        both = replace(both, value=slower * both.value)
    return replace(machine, rates=replace(rates, to_device=read, from_device=written, both_ways=both))


def _divided(alone: Rate | None, memory: Rate | None, *, ranks: int) -> Rate | None:
    if alone is None or memory is None or memory.value / ranks >= alone.value:
        return alone
    return Rate(memory.value / ranks, "assumed", f"memory, divided by {ranks} GPUs that copy at once: {memory.source}")


def seconds_of(size: Taken, machine: MachineProfile, *, ranks: int) -> float | None:
    """Of a copy from RAM, by rates `at_once`, and the all-gather behind it; None where one of them is not known.

    Where CPUs compute both are copies in memory, which reads and writes each byte.
    """
    into, joined = machine.rates.to_device, machine.links.all_gather or machine.links.between_gpus
    if machine.gpu is None:
        memory = machine.rates.memory
        into = machine.links.to_device_at_once or (
            replace(memory, value=memory.value / 2 / ranks) if memory is not None else None
        )
    if into is None or (joined is None and size.from_others):
        return None
    return size.from_ram / into.value + (size.from_others / joined.value if joined is not None else 0.0)


def is_by_parts(wish: Take, machine: MachineProfile, *, ranks: int) -> bool:
    """Whether weights in RAM come by parts, on a machine with rates `at_once`. Without a GPU only where it is asked."""
    if ranks == 1 or wish == "direct":
        return False
    if wish == "gather":
        return True
    whole, parts = (_of_unit(ALIGN * ranks, machine, ranks=ranks, by_parts=way) for way in (False, True))
    return machine.gpu is not None and whole is not None and parts is not None and parts < whole


def _of_unit(
    elements: int, machine: MachineProfile, *, ranks: int, by_parts: bool, item_bytes: int = 2
) -> float | None:
    return seconds_of(taken(elements, item_bytes=item_bytes, ranks=ranks, by_parts=by_parts), machine, ranks=ranks)


def bounds_by_parts(moved: Mapping[str, Taken], machine: MachineProfile, *, ranks: int) -> list[Bound]:
    """What the phases in which weights come by parts wait for."""
    return [
        Bound(
            phase,
            seconds_of(size, machine, ranks=ranks),
            f"{format_bytes(size.from_ram)} of weights from RAM to each device, and {format_bytes(size.from_others)} "
            "from the other ranks'",
            "gpus",
        )
        for phase, size in moved.items()
    ]


def describe_take(
    wish: Take, elements: int, machine: MachineProfile, *, ranks: int, item_bytes: int, by_parts: bool
) -> str:
    """Both ways with their seconds for a unit of so many elements, and which is taken."""
    told = []
    for way in (False, True):
        seconds = _of_unit(elements, machine, ranks=ranks, by_parts=way, item_bytes=item_bytes)
        told.append("not known" if seconds is None else format_seconds(seconds))
    asked = "" if wish == "auto" else f" (tiered.take={wish})"
    taken_so = "by parts" if by_parts else "all of it directly"
    return (
        f"weights: each of {ranks} GPUs takes all of the largest unit from RAM, {told[0]}; by parts and all-gather, "
        f"{told[1]}: {taken_so}{asked}"
    )
