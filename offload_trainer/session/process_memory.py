"""What a plan counts for a process, in one that runs already, with the caller's own libraries and data in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import PROCESS, Item, cuda_process
from offload_trainer.plan.plan import Plan


@dataclass(frozen=True)
class ThisProcess:
    """Bytes of host memory that it holds: of what a plan counts for a process, beside that, and of the model."""

    counted: int
    beside: int
    moves: int

    @classmethod
    def now(cls, machine: MachineProfile, *, moves: int) -> ThisProcess:
        """`moves`: bytes of the model, which go as its homes are filled."""
        found = psutil.Process().memory_info()
        usual = PROCESS + cuda_process("gpu" if machine.gpu else "ram")
        own = found.rss - found.shared - moves  # files that are mapped give way, and count nowhere as taken
        return cls(counted=max(0, min(own, usual)), beside=max(0, found.rss - moves - usual), moves=moves)

    def free(self, machine: MachineProfile) -> MachineProfile:
        """The machine with the RAM as free that the plan counts once more."""
        return replace(machine, ram_bytes=machine.ram_bytes + self.counted + self.moves)

    def count_in(self, plan: Plan) -> Plan:
        """The plan with what is here beside the usual, as needed and as had."""
        if not self.beside:
            return plan
        item = Item("ram", "libraries and data", self.beside, "of the caller, in this process when it was planned")
        ram = {key: size + self.beside for key, size in plan.tiers["ram"].items()}
        return replace(plan, items=(*plan.items, item), tiers=plan.tiers | {"ram": ram})
