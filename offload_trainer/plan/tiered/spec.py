"""What the tiered engine is built with: shares and homes, and the sizes of what is on its way. Pure arithmetic.

The engine lays out with these functions what the plan counts with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

from offload_trainer.config import PlacementSection, TieredSection
from offload_trainer.plan.deepspeed.zero_buffers import Placement
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.layout import (
    RAM,
    Page,
    TierMap,
    Unit,
    homes_of,
    on_node,
    pages_of,
    stretch_of,
    units_of,
)
from offload_trainer.plan.tiered.state_formats import StateFormat, state_format
from offload_trainer.plan.tiered.weight_transfer import is_by_parts
from offload_trainer.plan.workload import Workload

GRADIENT_BUFFERS = 2  # blocks whose gradients are on their way to a drive at a time
# Bytes of gradients that wait on a GPU for their copies, beside the largest: 20 ms of copies on a slow bus.
GRADIENTS_IN_FLIGHT = 256_000_000
OUTBOXES = 2  # units whose gradients a rank has laid out for the others at a time
SHARED_READS = 2  # units of weights on their way from drives to all ranks at a time
SAVE_BUFFERS = 2  # pages of drives on their way into a checkpoint
_RING_OF_GPU, _RING_OF_CPU, _LEAST_RING = 256_000_000, 32_000_000, 1_000_000  # bytes; a CPU is not ahead of its copies
_KEPT = 8  # divisions of pages that a plan keeps for its other candidates

GradientHome = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True)
class TierSizes:
    """What the engine is built with."""

    gpu_fraction: float  # share of the optimizer state on the device
    ram_fraction: float  # share in RAM; what is left is on drives
    gradients: GradientHome  # of those that are not updated on the device
    activations: bool | Literal["cpu", "nvme"]  # home of what gradient checkpointing keeps; False: the device
    rule: str  # of the update
    states: str  # how its moments are stored
    page: int  # elements
    page_buffers: int
    unit_buffers: int  # blocks on the device at a time, where weights live elsewhere
    overlap: bool  # whether the update runs behind the next forward
    ahead: bool  # and that of pages on drives behind the last backward
    speeds: tuple[float, ...]  # of the drives, relative
    io: str  # what moves bytes to and from drives
    checksums: bool  # whether all that is read from drives is compared with what was written, not the state alone
    io_threads: int  # that read, and as many that write
    io_block_bytes: int  # of one request
    places: int = 1  # of each page of state on a drive
    remainders: bool = False  # of masters, instead of masters in fp32
    ranks: int = 1  # that divide the update
    nodes: int = 1  # that have as many of them each
    by_parts: bool = False  # whether the ranks of a node bring weights in RAM to their devices by parts

    @property
    def here(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes

    def trained_here(self, unit: Unit) -> int:
        """Elements of a unit that the ranks of the first node update; of all nodes they differ by ALIGN at most."""
        return stretch_of(unit, self.here - 1, ranks=self.ranks)[1]

    @property
    def format(self) -> StateFormat:
        return state_format(self.rule, self.states, remainders=self.remainders)


def tier_sizes(
    work: Workload,
    machine: MachineProfile,
    placement: Placement,
    *,
    wish: PlacementSection,
    tiered: TieredSection,
    gradients: GradientHome,
) -> TierSizes:
    """The sizes that are asked for; `auto` shares are all or nothing here, as `placement.optimizer` says.

    Requests to drives, and their shares, are as they were timed fastest on this machine, where nothing else is asked.
    """
    on_gpu = wish.gpu_fraction if wish.gpu_fraction != "auto" else 1.0 if placement.optimizer == "gpu" else 0.0
    in_ram = 0.0 if placement.optimizer == "nvme" else 1.0 - on_gpu
    timed = [drive.rates for drive in machine.drives if drive.rates is not None]
    io = {"tiered.io_threads": tiered.io_threads, "tiered.io_block_bytes": tiered.io_block_bytes}
    if timed:
        best = dict(word.split("=") for word in timed[0].words.split())
        io |= {key: int(n) for key, n in best.items() if key.partition(".")[2] not in tiered.model_fields_set}
    speeds = tiered.drive_speeds or (1.0,) * len(wish.nvme)
    if not tiered.drive_speeds and len(timed) == len(speeds):
        speeds = tuple(rates.mixed_read.value + rates.mixed_write.value for rates in timed)
    return TierSizes(
        gpu_fraction=on_gpu,
        ram_fraction=in_ram if wish.ram_fraction == "auto" else wish.ram_fraction,
        gradients=gradients,
        activations=work.offload_activations,
        rule=work.state.rule.name,
        states=work.state.moments.name,
        page=tiered.page_size,
        page_buffers=tiered.page_buffers,
        unit_buffers=tiered.weight_buffers,
        overlap=tiered.overlap in ("forward", "backward"),
        ahead=tiered.overlap == "backward",
        speeds=speeds,
        io=tiered.io,
        checksums=tiered.checksums or tiered.io == "async_io",
        io_threads=io["tiered.io_threads"],
        io_block_bytes=io["tiered.io_block_bytes"],
        places=2 if tiered.overlap == "backward" else 1 if tiered.state_copies == "auto" else tiered.state_copies,
        remainders=tiered.master_format == "split",
        ranks=work.world,
        nodes=work.nodes,
        by_parts=placement.params == "cpu" and is_by_parts(tiered.weight_transfer, machine, ranks=work.here),
    )


@dataclass(frozen=True)
class Layouts:
    """Of one model: its units, and for the candidates that have them alike the pages that were divided last."""

    shape: ModelShape

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return units_of(self.shape)

    @cached_property
    def pages(self) -> Callable[..., tuple[Page, ...]]:
        """As `pages_of` these units."""
        return lru_cache(_KEPT)(partial(pages_of, self.units))

    def homes(self, placement: Placement, sizes: TierSizes) -> TierMap:
        """As `homes_in` these units, on the first node."""
        return _homes_of(self.units, self.pages(**_divided(sizes)), placement, sizes, node=0)


def homes_in(units: Sequence[Unit], placement: Placement, sizes: TierSizes, *, node: int = 0) -> TierMap:
    """Where the engine puts everything on one of the nodes, and the plan counts it. All weights are on each."""
    return _homes_of(units, pages_of(units, **_divided(sizes)), placement, sizes, node=node)


def _divided(sizes: TierSizes) -> dict[str, Any]:
    """What pages depend on, beside the units."""
    names = ("page", "gpu_fraction", "ram_fraction", "speeds", "ranks", "ahead")
    return {name: getattr(sizes, name) for name in names}


def _homes_of(
    units: Sequence[Unit], pages: Sequence[Page], placement: Placement, sizes: TierSizes, *, node: int
) -> TierMap:
    homes = homes_of(
        units,
        pages,
        params=placement.params,
        gradients=sizes.gradients,
        speeds=sizes.speeds,
        ranks=sizes.ranks,
    )
    return on_node(homes, range(node * sizes.here, (node + 1) * sizes.here))


def exchange_bytes(units: Sequence[Unit], *, item_bytes: int) -> int:
    """Bytes that one of several ranks lays its gradients out in for the others: `OUTBOXES` of the largest unit."""
    return OUTBOXES * item_bytes * max((unit.trained for unit in units), default=0)


def gradient_ring(units: Sequence[Unit], homes: Sequence[int], *, item_bytes: int, several: bool, gpu: bool) -> int:
    """Bytes that gradients, of `item_bytes`, pass through on their way to sums in host memory or on drives.

    `several`: micro-batches. The first one of a weight is copied to its sum in RAM, if that has its dtype, and needs
    none.
    """
    through = [unit for unit, home in zip(units, homes, strict=True) if home >= 0 or (several and home == RAM)]
    size = item_bytes * sum(unit.trained for unit in through)
    return max(_LEAST_RING, min(_RING_OF_GPU if gpu else _RING_OF_CPU, size))
