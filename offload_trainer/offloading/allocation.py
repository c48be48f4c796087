"""Allocate memory and files for optimizer state, weights and gradients as a layout places them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload_trainer import ranks
from offload_trainer.offloading.device import Device
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.checksums import PageChecksums
from offload_trainer.offloading.pages.drive_dirs import Drives
from offload_trainer.offloading.pages.shadow_pages import ShadowPages
from offload_trainer.offloading.pages.store import PageStore, UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import AnyGradients, SharedGradients
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.optim.native_adam import Sum, zlib_sum
from offload_trainer.plan.tiered.layout import TierMap, Unit
from offload_trainer.plan.tiered.spec import GRADIENT_BUFFERS, GRADIENTS_IN_FLIGHT
from offload_trainer.plan.tiered.state_formats import StateFormat


@dataclass(frozen=True)
class Layout:
    """The placement of state, weights and gradients, their formats, and the sizes of the buffers between tiers."""

    units: tuple[Unit, ...]
    homes: TierMap
    dtype: torch.dtype  # dtype of the model's weights
    gradient_dtype: torch.dtype  # dtype of the accumulated gradients
    format: StateFormat  # format of the optimizer state
    page_buffers: int  # host buffers for pages that are read from or written to a drive
    unit_buffers: int  # device buffers for blocks whose weights are offloaded
    behind: bool  # the update runs on a thread and overlaps the next forward
    ahead: bool  # the update of pages on drives may start during the backward
    ring_bytes: int  # size of the host ring buffer between the device and gradient sums in RAM or on drives
    places: int  # copies of each page on a drive, 1 or 2
    node: Node = field(default_factory=Node)  # the ranks that share this placement


@dataclass(frozen=True)
class Stores:
    """The allocated storage for optimizer state, weights and gradients."""

    state: PageStore
    weights: PlacedWeights
    gradients: AnyGradients


def allocate_stores(
    layout: Layout, *, device: Device, drives: Drives, order: Sequence[str], page_sum: Sum = zlib_sum
) -> Stores:
    """Allocate memory on the device and in RAM, and files on the drives.

    `order` lists the trainable weights in the order in which their norms are summed. `page_sum` computes page
    checksums. All ranks call it.
    """
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
    """Touch this rank's pages in RAM first, so that the system allocates them on the rank's NUMA node."""
    if len(node.here) == 1:
        return
    for number in range(len(homes.pages)):
        memory = state.in_memory(number) if homes.of_rank(number, node.rank) else None
        if memory is not None:
            memory.zero_()
    ranks.wait_for_all()  # no page may be filled before its rank has touched it


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
