"""From a layout to the memory and the files in which state, weights and gradients live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload_trainer import ranks
from offload_trainer.offloading.device.base import Device
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.checksums import PageChecksums
from offload_trainer.offloading.pages.drive_dirs import Drives
from offload_trainer.offloading.pages.shadow_pages import ShadowPages
from offload_trainer.offloading.pages.store import PageStore, UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import AnyGradients, SharedGradients
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.optim.checksum import Sum, zlib_sum
from offload_trainer.plan.tiered.layout import TierMap, Unit
from offload_trainer.plan.tiered.spec import GRADIENT_BUFFERS, GRADIENTS_IN_FLIGHT
from offload_trainer.plan.tiered.state_formats import StateFormat


@dataclass(frozen=True)
class Layout:
    """Where everything lies, and in what form."""

    units: tuple[Unit, ...]
    homes: TierMap
    dtype: torch.dtype  # of the weights that the model computes with
    gradient_dtype: torch.dtype  # of a step's sums
    format: StateFormat  # of the optimizer state
    page_buffers: int  # pages in memory on their way to or from a drive
    unit_buffers: int  # blocks on the device at a time, where weights live elsewhere
    behind: bool  # whether the update runs behind what follows it
    ahead: bool  # whether it begins behind the backward, on pages on drives
    ring_bytes: int  # that gradients pass through on their way to sums in host memory or on drives
    places: int  # of each page on a drive
    node: Node = field(default_factory=Node)  # the ranks that have all of it together


@dataclass(frozen=True)
class Stores:
    """The homes of what a layout lays out."""

    state: PageStore
    weights: PlacedWeights
    gradients: AnyGradients


def homes_made(
    layout: Layout, *, device: Device, drives: Drives, order: Sequence[str], page_sum: Sum = zlib_sum
) -> Stores:
    """Make homes in memory, and in files on the drives. `order`: of the trained weights, as the norm adds them up."""
    units, homes, transfers = layout.units, layout.homes, drives.transfers
    pages = [layout.places * layout.format.page_bytes(page.elements) for page in homes.pages]
    places = ShadowPages(homes.pages, count=layout.places, node=layout.node)
    state = PageStore(
        homes.pages,
        format=layout.format,
        files=drives.files("state", pages, [page.home for page in homes.pages], shared=False),
        transfers=drives.unchecked,
        device=device,
        node=layout.node,
        sums=PageChecksums(homes.pages, format=layout.format, places=places, node=layout.node, compute=page_sum),
    )
    _write_first(state, homes, layout.node)
    sizes = [unit.elements * layout.dtype.itemsize for unit in units]
    weights = PlacedWeights(
        units,
        homes.weights,
        dtype=layout.dtype,
        device=device,
        files=drives.files("weights", sizes, homes.weights),
        transfers=transfers,
        node=layout.node,
    )
    return Stores(state, weights, _gradients(layout, device=device, drives=drives, order=order))


def _write_first(state: PageStore, homes: TierMap, node: Node) -> None:
    """Each of several ranks writes its pages in RAM before others do: near its CPUs the system then places them."""
    if len(node.here) == 1:
        return
    for number in range(len(homes.pages)):
        memory = state.in_memory(number) if homes.of_rank(number, node.rank) else None
        if memory is not None:
            memory.zero_()
    ranks.wait_for_all()  # then they are filled


def _gradients(layout: Layout, *, device: Device, drives: Drives, order: Sequence[str]) -> AnyGradients:
    units, homes, transfers = layout.units, layout.homes, drives.transfers
    sums = [unit.trained * layout.gradient_dtype.itemsize for unit in units]
    files = drives.files("gradients", sums, homes.gradients)
    if layout.node.world > 1:
        trained = [unit.trained for unit in units]
        dtype, node = layout.gradient_dtype, layout.node
        store = UnitStore(
            trained, homes.gradients, dtype=dtype, files=files, transfers=transfers, pinned=False, node=node
        )
        return SharedGradients(units, store, given=layout.dtype, device=device, order=order, node=node)
    return Gradients(
        units,
        homes.gradients,
        dtype=layout.gradient_dtype,
        device=device,
        files=files,
        transfers=transfers,
        stagings=GRADIENT_BUFFERS,
        ring_bytes=layout.ring_bytes,
        in_flight_bytes=GRADIENTS_IN_FLIGHT,
        order=order,
    )
