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
    """Of the `pages` that this rank updates. Ranks agree on each unit where the update goes on behind the forward."""
    if not layout.behind or layout.node.world == 1:
        return Renewal(pages)
    beside = Beside(across=layout.node.all_alike)

    def agree(unit: int) -> None:
        beside.meet()
        with device.beside(after=device.mark()):
            weights.spread_unit(layout.units[unit], beside=beside)
            there = device.reached()
        there.wait()
        if len(layout.node.nodes) > 1:
            beside.meet()  # what other nodes have sent is there for all ranks of this one

    return Renewal(pages, units=list(dict.fromkeys(page.unit for page in layout.homes.pages)), agree=agree)
