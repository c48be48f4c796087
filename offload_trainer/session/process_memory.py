"""Account for memory that the caller's process already uses when a plan is made inside it.

A plan reserves RAM for a fresh process. This module avoids counting that part twice, and adds the caller's libraries
and data to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import PROCESS, Item, cuda_process
from offload_trainer.plan.plan import Plan


@dataclass(frozen=True)
class ThisProcess:
    """Host memory of this process in bytes, divided by how a plan treats it."""

    counted: int  # part of the plan's reserve for a process that is already in use
    beside: int  # use beyond that reserve
    moves: int  # parameters of the model, freed while they are placed

    @classmethod
    def now(cls, machine: MachineProfile, *, moves: int) -> ThisProcess:
        """Measure this process. `moves`: bytes of the model, which are freed while its weights are placed."""
        found = psutil.Process().memory_info()
        usual = PROCESS + cuda_process("gpu" if machine.gpu else "ram")
        own = found.rss - found.shared - moves  # mapped files are reclaimable
        return cls(counted=max(0, min(own, usual)), beside=max(0, found.rss - moves - usual), moves=moves)

    def free(self, machine: MachineProfile) -> MachineProfile:
        """Return the machine with the RAM as free that is in use now and that the plan counts again."""
        return replace(machine, ram_bytes=machine.ram_bytes + self.counted + self.moves)

    def count_in(self, plan: Plan) -> Plan:
        """Add the memory beyond the usual reserve to the plan, both as needed and as available."""
        if not self.beside:
            return plan
        item = Item("ram", "libraries and data", self.beside, "of the caller, in this process when it was planned")
        ram = {key: size + self.beside for key, size in plan.tiers["ram"].items()}
        return replace(plan, items=(*plan.items, item), tiers=plan.tiers | {"ram": ram})
