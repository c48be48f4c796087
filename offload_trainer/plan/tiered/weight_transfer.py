"""Decide how the GPUs of a node fetch weights from RAM: each copies everything, or a shard for an all-gather.

    direct   each of n GPUs copies the T bytes of a unit from RAM concurrently       T / A
    gather   each copies T / n and receives the other shards in an all-gather        T / n / A + (n - 1) / n T / G

A is the bytes/s into each GPU while all of them copy; G the bytes/s that each GPU receives in an all-gather. `bench`
measures both between ranks. Without a measurement, A is one GPU's rate, or the memory's rate divided by n if that is
less, and G is the rate of the links between GPUs. Without such links `gather` is not chosen. A unit's copy and its
all-gather do not overlap. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from offload_trainer.plan.machine import MachineProfile, Rate
from offload_trainer.plan.tiered.layout import ALIGN
from offload_trainer.plan.time.step_time import Bound
from offload_trainer.units import format_bytes, format_seconds

NCCL_BYTES = 512 << 20  # GPU memory of one communicator's buffers; an assumption
Take = Literal["auto", "direct", "all_gather"]


def even_part(elements: int, *, ranks: int) -> int:
    """Return the elements of a unit in each rank's shard, a multiple of ALIGN; every rank copies the remainder."""
    return elements // ALIGN // ranks * ALIGN


@dataclass(frozen=True)
class TransferBytes:
    """Bytes of weights that one GPU receives from RAM and from the other GPUs."""

    from_ram: int
    from_others: int

    def __add__(self, other: TransferBytes) -> TransferBytes:
        return TransferBytes(self.from_ram + other.from_ram, self.from_others + other.from_others)

    def __rmul__(self, times: int) -> TransferBytes:
        return TransferBytes(times * self.from_ram, times * self.from_others)


def taken(elements: int, *, item_bytes: int, ranks: int, by_parts: bool) -> TransferBytes:
    """Return the bytes that one of a node's `ranks` receives for a unit of `elements`."""
    others = (ranks - 1) * even_part(elements, ranks=ranks) if by_parts else 0
    return TransferBytes(item_bytes * (elements - others), item_bytes * others)


def at_once(machine: MachineProfile, *, ranks: int) -> MachineProfile:
    """Return the machine with the copy rates of one GPU while all `ranks` GPUs copy."""
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


def seconds_of(size: TransferBytes, machine: MachineProfile, *, ranks: int) -> float | None:
    """Return the seconds of a copy from RAM followed by the all-gather, or None if a rate is unknown.

    `machine` has rates from `at_once`. On CPUs both steps are copies in memory, which reads and writes each byte.
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


def uses_all_gather(wish: Take, machine: MachineProfile, *, ranks: int) -> bool:
    """Return whether ranks fetch shards and all-gather them. Without a GPU this happens only on request."""
    if ranks == 1 or wish == "direct":
        return False
    if wish == "all_gather":
        return True
    whole, parts = (_of_unit(ALIGN * ranks, machine, ranks=ranks, by_parts=way) for way in (False, True))
    return machine.gpu is not None and whole is not None and parts is not None and parts < whole


def _of_unit(
    elements: int, machine: MachineProfile, *, ranks: int, by_parts: bool, item_bytes: int = 2
) -> float | None:
    return seconds_of(taken(elements, item_bytes=item_bytes, ranks=ranks, by_parts=by_parts), machine, ranks=ranks)


def bounds_by_parts(moved: Mapping[str, TransferBytes], machine: MachineProfile, *, ranks: int) -> list[Bound]:
    """Return the time bounds of the phases in which weights are gathered."""
    return [
        Bound(
            phase,
            seconds_of(size, machine, ranks=ranks),
            f"{format_bytes(size.from_ram)} of weights to each device from RAM, {format_bytes(size.from_others)} "
            "from other devices",
            "gpus",
        )
        for phase, size in moved.items()
    ]


def describe_weight_transfer(
    wish: Take, elements: int, machine: MachineProfile, *, ranks: int, item_bytes: int, by_parts: bool
) -> str:
    """Return a sentence with the seconds of both ways for a unit of `elements`, and the chosen one."""
    told = []
    for way in (False, True):
        seconds = _of_unit(elements, machine, ranks=ranks, by_parts=way, item_bytes=item_bytes)
        told.append("unknown" if seconds is None else format_seconds(seconds))
    asked = "" if wish == "auto" else f" (tiered.weight_transfer={wish})"
    taken_so = "all_gather" if by_parts else "direct"
    return (
        f"weight transfer for {ranks} GPUs: {taken_so}{asked}; the largest block takes {told[0]} if each GPU copies "
        f"all of it from RAM (direct), {told[1]} if each copies its shard and they exchange the shards (all_gather)"
    )
