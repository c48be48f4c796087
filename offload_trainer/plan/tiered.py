"""Sizes and bytes of the tiered engine: what lies in memory, on the device and on each drive. Pure arithmetic.

The engine lays out exactly what `plan/layout.py` says, so the bytes of pages, weights and gradients are not estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offload_trainer.config import TrainConfig
from offload_trainer.plan.layout import (
    RAM,
    Page,
    Unit,
    bytes_of_state,
    drive_of_unit,
    largest,
    page_bytes,
    pages_of,
    units_of,
)
from offload_trainer.plan.memory import Item, activation_items, item_bytes
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.zero import Placement

PROCESS = 400_000_000  # interpreter, torch, transformers and their libraries (380 MB), and what the allocator keeps
MARGIN = 0.05  # of the RAM that there is: `auto` leaves this much free
STATE_IN_RAM = "state in RAM"  # name of that item
GRADIENT_BUFFERS = 2  # blocks whose gradients are on their way to a drive at a time


@dataclass(frozen=True)
class TierSizes:
    """What the engine is built with."""

    ram_fraction: float  # share of the optimizer state in RAM
    gradients: Literal["cpu", "nvme"]
    states: str  # how moments are stored
    page: int  # elements
    page_buffers: int
    unit_buffers: int  # blocks on the device at a time, where weights live elsewhere
    speeds: tuple[float, ...]  # of the drives, relative


def tier_sizes(config: TrainConfig, placement: Placement, *, gradients: Literal["cpu", "nvme"]) -> TierSizes:
    """The sizes that `config` asks for; an `auto` share is all or nothing here, as `placement.optimizer` says."""
    wish = config.placement.ram_fraction
    drives = len(config.placement.nvme)
    share = wish if wish != "auto" else 0.0 if placement.optimizer == "nvme" else 1.0
    return TierSizes(
        ram_fraction=share,
        gradients=gradients,
        states=config.optim.states,
        page=config.tiered.page_size,
        page_buffers=config.tiered.page_buffers,
        unit_buffers=config.tiered.unit_buffers,
        speeds=config.tiered.drive_speeds or (1.0,) * drives,
    )


def gradient_bytes(config: TrainConfig) -> int:
    """Bytes of an element of the sums: 16 bit for one micro-batch, else as `optim.accumulate_dtype` says."""
    if config.train.accumulate > 1 and config.optim.accumulate_dtype == "fp32":
        return 4
    return item_bytes(config.model.dtype)


def tiered_items(
    config: TrainConfig,
    shape: ModelShape,
    placement: Placement,
    sizes: TierSizes,
    *,
    device: str,
    drives: Sequence[str],
    checkpointing: bool,
    seq_len: int,
) -> list[Item]:
    """What the tiered engine holds at its peak. `device` is the tier that computes: "gpu", or "ram" on a CPU."""
    units = units_of(shape)
    pages = pages_of(units, page=sizes.page, ram_fraction=sizes.ram_fraction, speeds=sizes.speeds)
    e, g = item_bytes(config.model.dtype), gradient_bytes(config)
    on_gpu = device == "gpu"
    items = [Item("ram", "process", PROCESS, "interpreter, torch and transformers")]
    items += _page_items(units, pages, placement, sizes, drives=drives, e=e, g=g, on_gpu=on_gpu)
    items += _weight_items(units, placement, sizes, device=device, drives=drives, e=e)
    items += _gradient_items(units, sizes, device=device, drives=drives, e=e, g=g)
    # A tied embedding's gradient comes from both ends; autograd makes a third of the two.
    in_flight = max(weight.numel * (weight.uses + (weight.uses > 1)) for weight in shape.weights if weight.trainable)
    items.append(Item(device, "gradient in flight", e * in_flight, "of the largest weight, before it is home"))
    if config.tiered.checksums or config.tiered.io == "async_io":
        on_drives = sum(item.bytes for item in items if item.tier in drives)
        items.append(Item("ram", "checksums", on_drives // 512, "8 bytes for each 4096 on a drive"))
    items += activation_items(config, shape, device=device, world=1, checkpointing=checkpointing, seq_len=seq_len)
    return items


def _page_items(
    units: Sequence[Unit],
    pages: Sequence[Page],
    placement: Placement,
    sizes: TierSizes,
    *,
    drives: Sequence[str],
    e: int,
    g: int,
    on_gpu: bool,
) -> list[Item]:
    def held(home: int) -> int:
        return sum(page_bytes(page.elements, states=sizes.states) for page in pages if page.home == home)

    each = bytes_of_state(sizes.states)
    why = f"fp32 master, {sizes.states} moments: {each:.3g} B a parameter"
    items = [Item("ram", STATE_IN_RAM, held(RAM), f"{why}, {sizes.ram_fraction:.0%} of it")]
    for home, directory in enumerate(drives):
        items.append(Item(directory, "state", held(home), why))
    staged = placement.params == "nvme" or (placement.params == "gpu" and on_gpu)
    moved = [page for page in pages if page.home != RAM or staged or sizes.gradients == "nvme"]
    if moved:
        elements = max(page.elements for page in moved)
        each_slot = max((page_bytes(p.elements, states=sizes.states) for p in pages if p.home != RAM), default=0)
        each_slot += elements * (e * staged + g * (sizes.gradients == "nvme"))
        count = min(sizes.page_buffers, len(moved))
        items.append(Item("ram", "page buffers", count * each_slot, f"{count}, each with a page on its way"))
    return items


def _weight_items(
    units: Sequence[Unit], placement: Placement, sizes: TierSizes, *, device: str, drives: Sequence[str], e: int
) -> list[Item]:
    total = sum(unit.elements for unit in units)
    if placement.params == "gpu":
        return [Item(device, "weights", e * total, f"{e} B a parameter")]
    away = [unit for unit in units if not unit.small]
    items = [Item(device, "small weights", e * (total - sum(unit.elements for unit in away)), "never moved")]
    if placement.params == "cpu":
        items.append(Item("ram", "weights", e * sum(unit.elements for unit in away), f"{e} B a parameter"))
    else:
        items += _on_drives("weights", [e * unit.elements for unit in away], away, sizes, drives)
    blocks = min(sizes.unit_buffers, sum(unit.block for unit in away))
    others = min(1, sum(not unit.block for unit in away))
    ring = blocks * largest(units, block=True) + others * largest(units, block=False)
    items.append(Item(device, "weights in use", e * ring, f"{blocks} blocks and {others} other module"))
    if device == "gpu" and placement.params == "nvme":
        staging = 2 * e * max(largest(units, block=True), largest(units, block=False))
        items.append(Item("ram", "weight staging", staging, "2 of the largest unit, between drive and GPU"))
    return items


def _gradient_items(
    units: Sequence[Unit], sizes: TierSizes, *, device: str, drives: Sequence[str], e: int, g: int
) -> list[Item]:
    if sizes.gradients == "cpu":
        return [Item("ram", "gradients", g * sum(unit.trained for unit in units), f"{g} B a trained parameter")]
    away = [unit for unit in units if not unit.small]
    inside = sum(unit.trained for unit in units) - sum(unit.trained for unit in away)
    blocks = min(GRADIENT_BUFFERS, sum(unit.block for unit in away))
    others = min(1, sum(not unit.block for unit in away))
    most = {block: max((unit.trained for unit in away if unit.block == block), default=0) for block in (True, False)}
    staging = blocks * most[True] + others * most[False]
    return [
        Item("ram", "gradients", g * (inside + staging), f"{blocks} blocks and {others} other module on their way"),
        *_on_drives("gradients", [g * unit.trained for unit in away], away, sizes, drives),
    ]


def _on_drives(
    name: str, sizes_of: Sequence[int], units: Sequence[Unit], sizes: TierSizes, drives: Sequence[str]
) -> list[Item]:
    homes = drive_of_unit(units, sizes.speeds)
    return [
        Item(directory, name, sum(size for size, home in zip(sizes_of, homes, strict=True) if home == drive), "")
        for drive, directory in enumerate(drives)
    ]


def with_share_that_fits(shape: ModelShape, sizes: TierSizes, *, spare_bytes: int) -> TierSizes:
    """The largest share, in thousandths, for which the state in RAM takes at most `spare_bytes`."""
    each = bytes_of_state(sizes.states)
    total = each * sum(unit.trained for unit in units_of(shape))
    return replace(sizes, ram_fraction=int(1000 * min(1.0, spare_bytes / total)) / 1000)
