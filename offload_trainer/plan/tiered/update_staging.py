"""Decide which parts of a page pass through staging buffers during the update, and the buffers' sizes.

    state on a drive      ──> buffer in host memory ──CPU──> back, with gradients and new weights that are not in RAM
    state in RAM          ──CPU──> in place
    state on the device   ──device──> in place; a device buffer stages gradients and new weights that are not there

The engine updates by these routes, and the planner counts with them. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_trainer.plan.tiered.layout import DEVICE, ELSEWHERE, Page, TierMap
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import in_memory, on_drive

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


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of one staging buffer by part; 0 if no page stages that part there."""

    state: int
    gradient: int
    weights: int

    @property
    def total(self) -> int:
        return self.state + self.gradient + self.weights


def routes_of(homes: TierMap, *, is_gpu: bool) -> tuple[Route, ...]:
    """Return the route of each page of this node.

    `is_gpu`: the device has separate memory, so the CPU cannot write weights there directly.
    """
    here = [(number, page) for number, page in enumerate(homes.pages) if page.home != ELSEWHERE]
    return tuple(route_of(number, page, homes, is_gpu=is_gpu) for number, page in here)


def route_of(number: int, page: Page, homes: TierMap, *, is_gpu: bool) -> Route:
    """Return the route of one page; see `routes_of`."""
    parts: dict[Part, int] = {"gradient": homes.gradients[page.unit], "weights": homes.weights[page.unit]}
    if page.home == DEVICE:
        host = frozenset(part for part, home in parts.items() if on_drive(home))
        return Route(number, page, host, frozenset(part for part, home in parts.items() if home != DEVICE))
    parts["state"] = page.home
    direct = {part for part, home in parts.items() if in_memory(home)}
    if parts["weights"] == DEVICE and not is_gpu:
        direct.add("weights")
    return Route(number, page, frozenset(parts) - direct, frozenset())


def host_slot(routes: Sequence[Route], *, format: StateFormat, gradient: int, weight: int) -> SlotBytes:
    """Return the size of one host staging buffer; `gradient` and `weight` are bytes per element."""
    inside = {part: [route.page for route in routes if part in route.through_host] for part in _PARTS}
    state = max((format.page_bytes(page) for page in inside["state"]), default=0)
    return SlotBytes(state, gradient * _largest(inside["gradient"]), weight * _largest(inside["weights"]))


def device_slot(routes: Sequence[Route], *, gradient: int, weight: int) -> SlotBytes:
    """Return the size of one device staging buffer; `gradient` and `weight` are bytes per element."""
    inside = {part: [route.page for route in routes if part in route.through_device] for part in _PARTS}
    return SlotBytes(0, gradient * _largest(inside["gradient"]), weight * _largest(inside["weights"]))


_PARTS: tuple[Part, ...] = ("state", "gradient", "weights")


def _largest(pages: Sequence[Page]) -> int:
    return max((page.elements for page in pages), default=0)
