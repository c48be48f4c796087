"""What passes through buffers in the update of a page, and how large they are. Pure arithmetic.

state on a drive       ──> slot in host memory ──CPU──> back; with it gradients and new weights that live elsewhere
state in RAM           ──CPU──> in place
state on the device    ──device──> in place; through a slot there: gradients and new weights that live elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_trainer.plan.formats import StateFormat
from offload_trainer.plan.layout import DEVICE, ELSEWHERE, RAM, Homes, Page

Part = Literal["state", "gradient", "weights"]


@dataclass(frozen=True)
class Route:
    """One page's way through the update."""

    number: int
    page: Page
    through_host: frozenset[Part]  # what passes through a slot in host memory
    through_device: frozenset[Part]  # what passes through a slot on the device

    @property
    def on_device(self) -> bool:
        """Whether the device computes it."""
        return self.page.home == DEVICE


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of one slot, for each part that it holds; 0 where no page has it there."""

    state: int
    gradient: int
    weights: int

    @property
    def total(self) -> int:
        return self.state + self.gradient + self.weights


def routes_of(homes: Homes, *, is_gpu: bool) -> tuple[Route, ...]:
    """Of each page of this node. `is_gpu`: the device's memory is its own, and the CPU cannot write weights there."""
    here = [(number, page) for number, page in enumerate(homes.pages) if page.home != ELSEWHERE]
    return tuple(route_of(number, page, homes, is_gpu=is_gpu) for number, page in here)


def route_of(number: int, page: Page, homes: Homes, *, is_gpu: bool) -> Route:
    """Of one of them."""
    gradient, weights = homes.gradients[page.unit], homes.weights[page.unit]
    host: set[Part] = set()
    device: set[Part] = set()
    if page.home == DEVICE:
        if gradient != DEVICE:
            device.add("gradient")
        if weights != DEVICE:
            device.add("weights")
        if gradient >= 0:
            host.add("gradient")
        if weights >= 0:
            host.add("weights")
        return Route(number, page, frozenset(host), frozenset(device))
    if page.home != RAM:
        host.add("state")
    if gradient != RAM:
        host.add("gradient")
    if weights != RAM and (is_gpu or weights != DEVICE):
        host.add("weights")
    return Route(number, page, frozenset(host), frozenset())


def host_slot(routes: Sequence[Route], *, format: StateFormat, gradient: int, weight: int) -> SlotBytes:
    """One slot in host memory, for elements of so many bytes."""
    inside = {part: [route.page for route in routes if part in route.through_host] for part in _PARTS}
    state = max((format.page_bytes(page.elements) for page in inside["state"]), default=0)
    return SlotBytes(state, gradient * _largest(inside["gradient"]), weight * _largest(inside["weights"]))


def device_slot(routes: Sequence[Route], *, gradient: int, weight: int) -> SlotBytes:
    """One slot on the device, for elements of so many bytes."""
    inside = {part: [route.page for route in routes if part in route.through_device] for part in _PARTS}
    return SlotBytes(0, gradient * _largest(inside["gradient"]), weight * _largest(inside["weights"]))


_PARTS: tuple[Part, ...] = ("state", "gradient", "weights")


def _largest(pages: Sequence[Page]) -> int:
    return max((page.elements for page in pages), default=0)
