"""Bytes that a step moves between drives and host memory, phase by phase. Pure arithmetic.

The tiered engine's are exact: weights are fetched by the same rings (`plan/rings.py`), gradients walked as
`offload/gradients.py` walks them. What is fetched ahead of its phase counts where it is needed.
DeepSpeed's are what was counted (docs/benchmarks/placements-354m.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_trainer.config import TrainConfig
from offload_trainer.plan.kept import KeptInputs
from offload_trainer.plan.layout import DEVICE, Unit, units_of
from offload_trainer.plan.memory import item_bytes
from offload_trainer.plan.rings import fetches
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered import TierSizes, gradient_bytes, homes_in
from offload_trainer.plan.zero import Placement


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step in one phase. `place` is a drive's directory, or "device" for the way to a GPU and back."""

    place: str
    phase: str
    read: int  # towards the accelerator
    written: int


def tiered_traffic(
    config: TrainConfig,
    shape: ModelShape,
    placement: Placement,
    sizes: TierSizes,
    *,
    drives: Sequence[str],
    inputs: KeptInputs | None = None,
) -> list[Traffic]:
    """What the tiered engine moves. `inputs`: of blocks, where they do not stay on the device."""
    units = units_of(shape)
    homes = homes_in(units, placement, sizes)
    e, g, micro = item_bytes(config.model.dtype), gradient_bytes(config), config.train.accumulate
    moved: dict[tuple[int, str], list[int]] = {}

    def move(home: int, phase: str, *, read: int = 0, written: int = 0) -> None:
        for index, size in enumerate((read, written)):
            moved.setdefault((home, phase), [0, 0])[index] += size

    for page in homes.pages:
        weights, gradients, inside = homes.weights[page.unit], homes.gradients[page.unit], page.home == DEVICE
        if not inside:
            state = sizes.format.page_bytes(page.elements)
            move(page.home, "update", read=state, written=state)
        if weights != DEVICE:
            move(weights, "update", written=e * page.elements)
        if gradients != DEVICE:
            move(gradients, "update", read=g * page.elements)
        if inside != (gradients == DEVICE):  # up to the page, or down to it
            move(DEVICE, "update", **{"read" if inside else "written": g * page.elements})
        if inside != (weights == DEVICE):
            move(DEVICE, "update", **{"written" if inside else "read": e * page.elements})
    forward, backward = _orders(units)
    away = [unit for unit in units if homes.weights[unit.index] != DEVICE]
    for unit, place in fetches(away, [*forward, *backward] * micro, blocks=sizes.unit_buffers):
        phase = "forward" if place % (len(forward) + len(backward)) < len(forward) else "backward"
        move(homes.weights[unit], phase, read=e * units[unit].elements)
        move(DEVICE, phase, read=e * units[unit].elements)
    collected = {unit.index for unit in units if homes.gradients[unit.index] >= 0}
    written: set[int] = set()
    for unit in _visits(units, collected, list(reversed(forward)) * micro):
        size = g * units[unit].trained
        move(homes.gradients[unit], "backward", read=size if unit in written else 0, written=size)
        written.add(unit)
    handed_over = [place.weight for unit in units if homes.gradients[unit.index] != DEVICE for place in unit.places]
    move(DEVICE, "backward", written=e * micro * sum(weight.numel for weight in handed_over if weight.trainable))
    if inputs is not None:
        every = micro * inputs.count * inputs.size
        move(DEVICE, "forward", written=every)
        move(DEVICE, "backward", read=every)
        for number, home in enumerate(inputs.homes(len(drives)) if sizes.activations == "nvme" else ()):
            move(home, "forward", written=micro * inputs.size)
            move(home, "backward", read=micro * inputs.size if number in inputs.read_back else 0)
    names = {DEVICE: "device"} | dict(enumerate(drives))
    return [Traffic(names[home], phase, *sizes) for (home, phase), sizes in moved.items() if home in names]


def bytes_of_additions(config: TrainConfig, shape: ModelShape, placement: Placement, sizes: TierSizes) -> int:
    """Bytes of host memory that a thread reads and writes for a step's sums in RAM and on drives.

    From the second micro-batch on each sum, twice, and the gradient that is added to it.
    """
    units = units_of(shape)
    homes = homes_in(units, placement, sizes)
    added = sum(unit.trained for unit in units if homes.gradients[unit.index] != DEVICE)
    each = 2 * gradient_bytes(config) + item_bytes(config.model.dtype)
    return (config.train.accumulate - 1) * each * added


def _orders(units: Sequence[Unit]) -> tuple[list[int], list[int]]:
    """Units as a forward and a backward pass need their weights. Embeddings are not needed in the backward."""
    first = next((unit.index for unit in units if unit.block), len(units))
    before = [unit.index for unit in units if unit.index < first]
    rest = [unit.index for unit in units if unit.index >= first]
    tied = [unit for unit in before if any(place.weight.uses > 1 for place in units[unit].places)]
    return before + rest + tied, list(reversed(rest + tied))


def _visits(units: Sequence[Unit], collected: set[int], order: Sequence[int]) -> list[int]:
    """The units whose gradients are written, once for each time that another one of their kind follows."""
    visits: list[int] = []
    last: dict[bool, int] = {}
    for unit in order:
        if unit in collected and last.get(units[unit].block) != unit:
            visits.append(unit)
            last[units[unit].block] = unit
    return visits


def deepspeed_traffic(
    config: TrainConfig, shape: ModelShape, placement: Placement, *, drive: str | None
) -> list[Traffic]:
    """What stock DeepSpeed moves: 16 bytes a parameter each way, since it swaps fp32 gradients with the state."""
    e, micro = item_bytes(config.model.dtype), config.train.accumulate
    trained, total = shape.trainable, shape.parameters
    found = [Traffic("device", "backward", 0, e * trained * micro), Traffic("device", "update", e * trained, 0)]
    if placement.optimizer == "nvme" and drive:
        found.append(Traffic(drive, "update", 16 * trained, 16 * trained))
    if placement.params != "gpu":
        found += [Traffic("device", phase, e * total * micro, 0) for phase in ("forward", "backward")]
    if placement.params == "nvme" and drive:
        found += [Traffic(drive, phase, e * total * micro, 0) for phase in ("forward", "backward")]
        found.append(Traffic(drive, "update", 0, e * total))
    return found
