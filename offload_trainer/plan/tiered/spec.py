"""The specification that the tiered engine is built from and its plan counts: shares of state per tier, and buffers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.layout import CutPages, Page, TierMap, Unit, first_block, pages_of, units_of
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import DEVICE, ELSEWHERE, RAM, Placement, TierKind, on_drive
from offload_trainer.plan.workload import Workload

GRADIENT_BUFFERS = 2  # blocks whose gradients are being written to a drive at a time
# Bytes of gradients on a GPU that wait for their copies, in addition to the largest: 20 ms of copies on a slow bus.
GRADIENTS_IN_FLIGHT = 256_000_000
OUTBOXES = 2  # units whose gradients a rank offers to the others at a time
SHARED_READS = 2  # units of weights that are being read from drives for all ranks at a time
SAVE_BUFFERS = 2  # pages on drives that are being copied into a checkpoint at a time
_RING_OF_GPU, _RING_OF_CPU, _LEAST_RING = 256_000_000, 32_000_000, 1_000_000  # bytes; a CPU's copies are synchronous


@dataclass(frozen=True)
class TierSizes:
    """All sizes and options that the tiered engine is built with."""

    gpu_fraction: float  # share of the optimizer state on the device
    ram_fraction: float  # share in RAM; the rest is on drives
    gradients: TierKind  # tier of the gradient sums that are not updated on the device
    page: int  # elements
    page_buffers: int
    unit_buffers: int  # blocks on the device at a time, if weights are elsewhere
    overlap: bool  # the update overlaps the next forward
    ahead: bool  # the update of pages on drives, and of pages with shadow memory, also overlaps the last backward
    speeds: tuple[float, ...]  # relative speed of each drive
    places: int = 1  # copies of each page of state on a drive (tiered.state_copies)
    by_parts: bool = False  # the ranks of a node fetch weights in RAM as shards and all-gather them
    shadow_fraction: float = 0.0  # largest share of the blocks' state in RAM that has shadow memory, if `ahead`
    device_sums: int = 0  # elements; the device adds gradients of units with at most as many, which then leave it once

    def adds_on_device(self, unit: Unit, home: int) -> bool:
        """Return whether the device adds a unit's gradients of all micro-batches; `home` is that of the sums."""
        return home != DEVICE and 0 < unit.trained <= self.device_sums

    @property
    def shares(self) -> dict[int, float]:
        """Return the shares of the optimizer state by home; the rest is on drives."""
        return {DEVICE: self.gpu_fraction, RAM: self.ram_fraction}

    @property
    def on_drives(self) -> float:
        """Return the share of the optimizer state on drives."""
        return round(1 - sum(self.shares.values()), 9)


class Layouts:
    """A model's units, and a cache of its most recent page layouts, which several candidates of a plan share."""

    def __init__(self, units: tuple[Unit, ...], *, ranks: int = 1, nodes: int = 1) -> None:
        self.units, self._nodes, self._here = units, nodes, ranks // nodes
        self._pages = lru_cache(8)(partial(pages_of, units, ranks=ranks))

    def homes(self, placement: Placement, sizes: TierSizes, *, node: int = 0) -> TierMap:
        """Return the tiers of pages, weights and gradients on node `node`; every node has all weights.

        `placement.params` and `sizes.gradients` apply to all units that are not small. Gradient sums of units whose
        state is entirely on the device stay there.

        Pages with shadow memory are spread evenly over the blocks, for each rank: what the backward cannot update is
        left to the next forward, and hides best there if no block has more of it than others. Gradients of units before
        the blocks come last, when the step is decided, so they have none.
        """
        units, speeds, ahead = self.units, sizes.speeds, sizes.ahead
        cut = self._pages(page=sizes.page, shares=tuple(sizes.shares.items()), speeds=speeds, ahead=ahead)
        # Unit -> drive of its weights and gradients, and the bytes on each drive, in proportion to `speeds`.
        drive, held = dict[int, int](), [0.0] * len(speeds)
        for unit in (unit for unit in units if speeds and not unit.small):
            size = unit.stored_bytes(item_bytes=2)
            after = [(here + size) / speed for here, speed in zip(held, speeds, strict=True)]
            drive[unit.index] = after.index(min(after))
            held[drive[unit.index]] += size
        place, params, sums = {TierKind.GPU: DEVICE, TierKind.RAM: RAM}, placement.params, sizes.gradients
        firsts = [one.page for one in cut.groups]
        updated = {page.unit for page in firsts} - {page.unit for page in firsts if page.home != DEVICE}

        def gradient(unit: Unit) -> int:
            if unit.index in updated:
                return DEVICE
            return place[sums] if sums in place else RAM if unit.small else drive[unit.index]

        first, kept, seen, has = first_block(units), set[int](), Counter[int](), Counter[int]()
        for number, page in enumerate(cut.pages) if ahead and sizes.shadow_fraction else ():
            if page.home == RAM and page.unit >= first:
                rank = cut.owners[number]
                seen[rank] += page.elements
                if has[rank] + page.elements <= sizes.shadow_fraction * seen[rank]:
                    has[rank] += page.elements
                    kept.add(number)
        weights = [DEVICE if unit.small else place[params] if params in place else drive[unit.index] for unit in units]
        if self._nodes > 1:
            pages, of_node = list(cut.pages), range(node * self._here, (node + 1) * self._here)
            for number, page in enumerate(pages):
                if cut.owners[number] not in of_node:
                    pages[number] = Page(page.unit, page.start, page.elements, ELSEWHERE, page.matrices)
            cut, kept = CutPages(tuple(pages), cut.owners), {one for one in kept if pages[one].home != ELSEWHERE}
        return TierMap(units, cut, tuple(weights), tuple(map(gradient, units)), frozenset(kept))


def layouts_of(work: Workload) -> Layouts:
    """Return the layouts of a workload's model; cached, since a plan asks for those of one model many times."""
    return _layouts(work.shape, work.state.rule.matrices, work.world, work.nodes)


@lru_cache(2)
def _layouts(shape: ModelShape, matrices: bool, ranks: int, nodes: int) -> Layouts:
    return Layouts(units_of(shape, matrices=matrices), ranks=ranks, nodes=nodes)


def exchange_bytes(units: Sequence[Unit], *, item_bytes: int) -> int:
    """Return the bytes of a rank's buffers from which others read its gradients: `OUTBOXES` times the largest unit."""
    return OUTBOXES * item_bytes * max((unit.trained for unit in units), default=0)


def gradient_ring(work: Workload, homes: TierMap, sizes: TierSizes, *, gpu: bool) -> int:
    """Return the bytes of the staging ring for gradients on their way to sums in host memory or on drives."""
    staged = work.added > 1 and gpu  # a CPU adds directly to sums in RAM, and a GPU's only gradient is copied there
    size = work.item_bytes * sum(
        unit.trained
        for unit, home in zip(homes.units, homes.gradients, strict=True)
        if on_drive(home) or (staged and home == RAM and not sizes.adds_on_device(unit, home))
    )
    return max(_LEAST_RING, min(_RING_OF_GPU if gpu else _RING_OF_CPU, size))


# -- the parts of a page that pass through staging buffers during the update, and the buffers' sizes. State on a drive
# passes through host memory; state in RAM and on the device is updated in place. Gradients and new weights that are
# not there are staged too.

Part = Literal["state", "gradient", "weights"]


@dataclass(frozen=True)
class Route:
    """The parts of one page that are staged during its update."""

    number: int
    page: Page
    through_host: frozenset[Part]  # parts staged in host memory
    through_device: frozenset[Part]  # parts staged on the device

    @property
    def on_device(self) -> bool:
        """Return whether the device computes the update."""
        return self.page.home == DEVICE


def route_of(number: int, page: Page, homes: TierMap, *, is_gpu: bool) -> Route:
    """Return the route of a page of this node; `is_gpu`: the CPU cannot write the device's memory directly."""
    parts: dict[Part, int] = {"gradient": homes.gradients[page.unit], "weights": homes.weights[page.unit]}
    if page.home == DEVICE:
        host = frozenset(part for part, home in parts.items() if on_drive(home))
        return Route(number, page, host, frozenset(part for part, home in parts.items() if home != DEVICE))
    parts["state"] = page.home
    direct = {part for part, home in parts.items() if home == RAM}
    if parts["weights"] == DEVICE and not is_gpu:
        direct.add("weights")
    return Route(number, page, frozenset(parts) - direct, frozenset())


def slot_bytes(
    routes: Sequence[Route], *, on_device: bool, format: StateFormat, gradient: int, weight: int
) -> dict[Part, int]:
    """Return the bytes of each part in one staging buffer, of the device or of the host; 0 if no page stages it there.

    `gradient` and `weight` are bytes per element.
    """
    sizes: dict[Part, int] = {"state": 0, "gradient": 0, "weights": 0}
    for route in routes:
        page, each = route.page, {"gradient": gradient, "weights": weight}
        for part in route.through_device if on_device else route.through_host:
            size = each[part] * page.elements if part in each else format.page_bytes(page)
            sizes[part] = max(sizes[part], size)
    return sizes
