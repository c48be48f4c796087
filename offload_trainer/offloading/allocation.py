"""Allocate memory and files for optimizer state, weights and gradients as a layout places them.

Only this module distinguishes one rank from several: it chooses gradient sums, fetches and update progress.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_trainer import ranks
from offload_trainer.offloading.device import Device
from offload_trainer.offloading.gradients.collector import Gradients, StagedSums
from offload_trainer.offloading.pages.store import PageStore, UnitStore
from offload_trainer.offloading.ranks.collective_fetch import WeightFetches
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import GradientSums, ShardedGradients
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.optim.kernel_api import Kernel
from offload_trainer.optim.kernels import CpuKernel
from offload_trainer.plan.tiered.layout import TierMap, Unit
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import size_of_home
from offload_trainer.storage.transfer import DriveFile, Transfers


class Drives:
    """A run's private directories on drives, the files in them, and the transfers to and from these files."""

    def __init__(self, directories: Sequence[Path], transfers: Transfers) -> None:
        self.directories, self.transfers = tuple(directories), transfers
        self._files = ExitStack()

    def files(self, name: str, sizes: Sequence[int], homes: Sequence[int]) -> list[DriveFile]:
        """Create one file `name` on each drive for the items of `sizes` bytes that `homes` places there."""
        return [
            self._files.enter_context(closing(DriveFile(directory / name, size_of_home(sizes, homes, home))))
            for home, directory in enumerate(self.directories)
        ]

    def close(self) -> None:
        self.transfers.close()  # before the files, because transfers may still be in flight
        self._files.close()


@dataclass(frozen=True)
class EngineParts:
    """The placement of state, weights and gradients, and the objects that move and update them."""

    units: tuple[Unit, ...]
    homes: TierMap
    sizes: TierSizes  # sizes of the buffers between tiers, and when the update runs
    format: StateFormat  # format of the optimizer state
    dtype: torch.dtype  # dtype of the model's weights
    gradient_dtype: torch.dtype  # dtype of the accumulated gradients
    ring_bytes: int  # size of the host ring buffer between the device and gradient sums in RAM or on drives
    node: Node  # the ranks that share this placement
    # The units of each block and the rank of a pipeline that computes it, in the order of a backward; else all units.
    stages: Sequence[tuple[int, Sequence[Unit]]]
    device: Device
    drives: Drives
    kernels: tuple[CpuKernel, Kernel]  # the CPU's kernel, and the kernel for pages on the device


@dataclass(frozen=True)
class Stores:
    """The allocated storage for optimizer state, weights and gradients, and what tracks the update of these."""

    state: PageStore
    weights: PlacedWeights
    fetches: WeightFetches
    gradients: GradientSums
    update_progress: UpdateProgress


def allocate_stores(parts: EngineParts, *, order: Sequence[str]) -> Stores:
    """Allocate memory and files. All ranks call it. Norms are summed in the `order` of the trainable weights."""
    homes, node, state = parts.homes, parts.node, PageStore(parts)
    if len(node.local_ranks) > 1:
        for number, rank in enumerate(homes.cut.owners):  # first touched here, so allocated on this rank's NUMA node
            memory = state.in_memory(number) if rank == node.rank else None
            if memory is not None:
                memory.zero_()
        ranks.wait_for_all()  # no page may be filled before its rank has touched it
    weights = PlacedWeights(parts)
    fetches = WeightFetches(weights.store, node=node.peers, gpus=parts.device.is_cuda)
    gradients = _gradients(parts, order=order)
    return Stores(state, weights, fetches, gradients, _update_progress(parts, weights))


def _gradients(parts: EngineParts, *, order: Sequence[str]) -> GradientSums:
    units, homes, dtype, node = parts.units, parts.homes.gradients, parts.gradient_dtype, parts.node
    sizes, alone = [unit.trained * dtype.itemsize for unit in units], node.peers.world == 1
    files, transfers = parts.drives.files("gradients", sizes, homes), parts.drives.transfers
    pinned = parts.device.is_cuda and alone
    store = UnitStore(sizes, homes, dtype=dtype, files=files, transfers=transfers, pinned=pinned, node=node)
    if alone:
        return Gradients(parts, store, order=order)
    sums, number = StagedSums(units, store, node=node.peers), node.rank % (node.world // node.peers.world)
    own = [stage for owner, stage in parts.stages if owner == number]
    return ShardedGradients(parts, own, sums, order=order)


def _update_progress(parts: EngineParts, weights: PlacedWeights) -> UpdateProgress:
    """Return the progress of this rank's updates; with several ranks, a unit is ready once all have updated it."""
    homes, node, device = parts.homes, parts.node, parts.device
    pages = [page for page, rank in zip(homes.pages, homes.cut.owners, strict=True) if rank == node.rank]
    if node.world == 1:
        return UpdateProgress(pages)
    connections, barrier = node.side_connections(), node.exchange()

    def agree(unit: int) -> None:
        barrier(unit)
        with device.side_stream(after=device.mark()):
            weights.broadcast_unit(parts.units[unit], connections=connections)
            there = device.reached()
        there.wait()
        if len(node.nodes) > 1:
            barrier(unit)  # all ranks of this node wait until the other nodes' weights have arrived

    return UpdateProgress(pages, units=list(dict.fromkeys(page.unit for page in homes.pages)), agree=agree)
