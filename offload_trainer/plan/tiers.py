"""Tiers: GPU, RAM and each drive, where weights, gradients, state and block inputs may be; their names and numbers.

A plan names them (`gpu`, `ram`, a drive's directory); pages and units have numbers, their homes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from offload_trainer.plan.machine import MachineProfile

GPU_NAME, RAM_NAME = "gpu", "ram"  # names of tiers in a plan; a drive has its directory's


class TierKind(StrEnum):
    """A kind of tier, with the value that configuration keys have for it."""

    GPU = "gpu"  # the device that computes; without a GPU that is host memory
    RAM = "cpu"
    DRIVES = "nvme"


def kind_asked(value: str) -> TierKind | None:
    """Return the kind that a configuration key asks for; None for `auto`."""
    return None if value == "auto" else TierKind(value)


@dataclass(frozen=True)
class Placement:
    """The tiers of the 16-bit weights and of the optimizer state (masters and moments)."""

    params: TierKind
    optimizer: TierKind
    zero: int | None = None  # the requested stage

    @property
    def stage(self) -> int:
        """Return the ZeRO stage: as requested, else 2 with weights on the device and state in memory, else 3."""
        return self.zero or (2 if self.params == TierKind.GPU and self.optimizer != TierKind.DRIVES else 3)


@dataclass(frozen=True)
class Item:
    """Bytes on one tier, with a name and the reason."""

    tier: str  # `GPU_NAME`, `RAM_NAME`, or the directory of a drive
    name: str
    bytes: int
    why: str
    of_ranks: tuple[int, ...] = ()  # bytes on the device of each rank of a pipeline, if they differ


# Homes, the numbers of the tiers where pages and units are. Drives are 0, 1, ...; ELSEWHERE means that another node has
# the page. Manifests of page files store these numbers.
RAM, DEVICE, ELSEWHERE = NOT_DRIVES = (-1, -2, -3)
WHERE = {DEVICE: "on the GPU", RAM: "in RAM"}  # homes that a share of the optimizer state may have, in words


def on_drive(home: int) -> bool:
    """Return whether a page or a unit with this home is on one of the drives."""
    return home >= 0


def tier_names(machine: MachineProfile) -> dict[int, str]:
    """Return the name of the tier of each home that a page or a unit can have on this machine."""
    return {DEVICE: machine.device, RAM: RAM_NAME, **dict(enumerate(drive.directory for drive in machine.drives))}


def offsets(sizes: Sequence[int], homes: Sequence[int]) -> list[int]:
    """Return the byte offset of each item in its tier, where items of one tier follow each other."""
    ends = dict.fromkeys(homes, 0)
    starts = []
    for size, home in zip(sizes, homes, strict=True):
        starts.append(ends[home])
        ends[home] += size
    return starts


def size_of_home(sizes: Sequence[int], homes: Sequence[int], home: int) -> int:
    """Return the total bytes of the items in one tier."""
    return sum(size for size, its in zip(sizes, homes, strict=True) if its == home)
