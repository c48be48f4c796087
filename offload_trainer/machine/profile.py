"""What a machine has: facts with where each comes from. Standard library only, so that plans need nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Origin = Literal["measured", "specified", "assumed"]


@dataclass(frozen=True)
class DriveFacts:
    """A directory that state may live in."""

    directory: str
    free_bytes: int
    filesystem: str
    device: int | None = None  # directories with the same one share its free bytes; None: nobody else's


@dataclass(frozen=True)
class MachineProfile:
    """Bytes that a run on this machine may use, and what computes."""

    gpu: str | None  # name of the device, None: the CPU computes
    gpu_bytes: int  # free on the device
    ram_bytes: int  # available, within the cgroup's limit
    cores: int
    drives: tuple[DriveFacts, ...]
    output: DriveFacts  # where the run directory will be
    origin: Origin = "measured"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
