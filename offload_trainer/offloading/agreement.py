"""When a unit's new weights are home on every rank: once all ranks have updated their pages of it."""

from __future__ import annotations

from collections.abc import Sequence

from offload_trainer.offloading.device import Device
from offload_trainer.offloading.homes import Layout
from offload_trainer.offloading.renewal import Renewal
from offload_trainer.offloading.rounds import Beside
from offload_trainer.offloading.weights import Weights
from offload_trainer.plan.layout import Page


def renewal_of(layout: Layout, pages: Sequence[Page], *, weights: Weights, device: Device) -> Renewal:
    """Of the `pages` that this rank updates. Ranks agree on each unit while the others are still under way.

    Who waits for an update so waits for all ranks', TrainerError where one does not come: see `Node.exchange`.
    """
    node = layout.node
    if node.world == 1:
        return Renewal(pages)
    beside, meet = Beside(across=node.all_alike), node.exchange()

    def agree(unit: int) -> None:
        meet(unit)
        with device.beside(after=device.mark()):
            weights.spread_unit(layout.units[unit], beside=beside)
            there = device.reached()
        there.wait()
        if len(node.nodes) > 1:
            meet(unit)  # what other nodes have sent is there for all ranks of this one

    return Renewal(pages, units=list(dict.fromkeys(page.unit for page in layout.homes.pages)), agree=agree)
