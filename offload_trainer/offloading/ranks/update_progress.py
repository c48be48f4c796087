"""Create the `UpdateProgress` of several ranks: a unit is ready once all ranks have updated their pages of it."""

from __future__ import annotations

from collections.abc import Sequence

from offload_trainer.offloading.allocation import Layout
from offload_trainer.offloading.device import Device
from offload_trainer.offloading.ranks.fetch_matching import SideGroup
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.plan.tiered.layout import Page


def make_update_progress(
    layout: Layout, pages: Sequence[Page], *, weights: PlacedWeights, device: Device
) -> UpdateProgress:
    """Return the update progress for the `pages` that this rank updates.

    Ranks agree on each unit while later units are still being updated. Waiting for a unit therefore waits for all
    ranks, and raises TrainerError if one of them does not come: see `Node.exchange`.
    """
    node = layout.node
    if node.world == 1:
        return UpdateProgress(pages)
    beside, barrier = SideGroup(across=node.all_alike), node.exchange()

    def agree(unit: int) -> None:
        barrier(unit)
        with device.beside(after=device.mark()):
            weights.broadcast_unit(layout.units[unit], beside=beside)
            there = device.reached()
        there.wait()
        if len(node.nodes) > 1:
            barrier(unit)  # all ranks of this node wait until the other nodes' weights have arrived

    return UpdateProgress(pages, units=list(dict.fromkeys(page.unit for page in layout.homes.pages)), agree=agree)
