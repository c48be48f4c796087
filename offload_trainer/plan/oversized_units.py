"""Detect a unit of the model that is larger than the device's memory, so that no placement can help.

A unit is a block, or a module outside the blocks. Streamed weights are copied to the device one unit at a time, and the
whole unit is on the device while it runs. Pure arithmetic.
"""

from __future__ import annotations

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import CUDA_CONTEXT, gpu_reserve
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes


def too_large(work: Workload, machine: MachineProfile) -> str:
    """Return a sentence that names the largest unit if it alone exceeds the device's memory, else ""."""
    largest = max(units_of(work.shape), key=lambda unit: unit.elements)
    size, gpu = work.item_bytes * largest.elements, machine.gpu is not None
    room = machine.gpu_bytes - CUDA_CONTEXT - gpu_reserve(machine) if gpu else machine.ram_bytes
    if size <= room:
        return ""
    name = f"the block {largest.name}" if largest.name == largest.within else largest.name
    where = "a GPU has room for" if gpu else "RAM has room for"
    return (
        f"{name} alone has {format_bytes(size)} of weights, {where} {format_bytes(room)}, and it is fetched as a whole"
    )
