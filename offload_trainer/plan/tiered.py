"""Sizes and bytes of the tiered engine: what lies in memory, on the device and on each drive. Pure arithmetic.

The engine lays out exactly what `plan/layout.py` says, so the bytes of pages, weights and gradients are not estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_trainer.config import TrainConfig
from offload_trainer.plan.formats import StateFormat, state_format
from offload_trainer.plan.kept import input_items, kept_inputs
from offload_trainer.plan.layout import DEVICE, RAM, Homes, Page, Unit, homes_of, units_of
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import PROCESS, Item, activation_items, cuda_process, item_bytes
from offload_trainer.plan.rings import slot_sizes
from offload_trainer.plan.routes import device_slot, host_slot, routes_of
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.zero import Placement
from offload_trainer.units import format_bytes

MARGIN = 0.05  # of the RAM that there is: `auto` leaves this much free
GRADIENT_BUFFERS = 2  # blocks whose gradients are on their way to a drive at a time
# Bytes of gradients that wait on a GPU for their copies, beside the largest: 20 ms of copies on a slow bus.
GRADIENTS_IN_FLIGHT = 256_000_000
_RING_OF_GPU, _RING_OF_CPU, _LEAST_RING = 256_000_000, 32_000_000, 1_000_000  # bytes; a CPU is not ahead of its copies
SAVE_BUFFERS = 2  # pages of drives on their way into a checkpoint


GradientHome = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True)
class TierSizes:
    """What the engine is built with."""

    gpu_fraction: float  # share of the optimizer state on the device
    ram_fraction: float  # share in RAM; what is left is on drives
    gradients: GradientHome  # of those that are not updated on the device
    activations: bool | Literal["cpu", "nvme"]  # home of what gradient checkpointing keeps; False: the device
    rule: str  # of the update
    states: str  # how its moments are stored
    page: int  # elements
    page_buffers: int
    unit_buffers: int  # blocks on the device at a time, where weights live elsewhere
    speeds: tuple[float, ...]  # of the drives, relative
    io_threads: int  # that read, and as many that write
    io_block_bytes: int  # of one request

    @property
    def format(self) -> StateFormat:
        return state_format(self.rule, self.states)


def tier_sizes(
    config: TrainConfig, placement: Placement, machine: MachineProfile, *, gradients: GradientHome
) -> TierSizes:
    """The sizes that `config` asks for; `auto` shares are all or nothing here, as `placement.optimizer` says.

    Requests to drives, and their shares, are as they were timed fastest on this machine, where nothing else is asked.
    """
    wish, place = config.placement, placement.optimizer
    on_gpu = wish.gpu_fraction if wish.gpu_fraction != "auto" else 1.0 if place == "gpu" else 0.0
    in_ram = wish.ram_fraction if wish.ram_fraction != "auto" else 0.0 if place == "nvme" else 1.0 - on_gpu
    tiered, timed = config.tiered, [drive.rates for drive in machine.drives if drive.rates is not None]
    io = {"tiered.io_threads": tiered.io_threads, "tiered.io_block_bytes": tiered.io_block_bytes}
    if timed:
        best = dict(word.split("=") for word in timed[0].words.split())
        io |= {key: int(n) for key, n in best.items() if key.partition(".")[2] not in tiered.model_fields_set}
    speeds = tiered.drive_speeds or (1.0,) * len(config.placement.nvme)
    if not tiered.drive_speeds and len(timed) == len(speeds):
        speeds = tuple(rates.mixed_read.value + rates.mixed_write.value for rates in timed)
    return TierSizes(
        gpu_fraction=on_gpu,
        ram_fraction=in_ram,
        gradients=gradients,
        activations=config.model.offload_activations,
        rule=config.optim.name,
        states=config.optim.states,
        page=tiered.page_size,
        page_buffers=tiered.page_buffers,
        unit_buffers=tiered.unit_buffers,
        speeds=speeds,
        io_threads=io["tiered.io_threads"],
        io_block_bytes=io["tiered.io_block_bytes"],
    )


def gradient_bytes(config: TrainConfig) -> int:
    """Bytes of an element of the sums: 16 bit for one micro-batch, else as `optim.accumulate_dtype` says."""
    if config.train.accumulate > 1 and config.optim.accumulate_dtype == "fp32":
        return 4
    return item_bytes(config.model.dtype)


def gradient_ring(config: TrainConfig, units: Sequence[Unit], homes: Sequence[int], *, gpu: bool) -> int:
    """Bytes that gradients pass through on their way to sums in host memory or on drives.

    The first one of a weight is copied to its sum in RAM, if that has its dtype, and needs none.
    """
    several = config.train.accumulate > 1
    through = [unit for unit, home in zip(units, homes, strict=True) if home >= 0 or (several and home == RAM)]
    size = item_bytes(config.model.dtype) * sum(unit.trained for unit in through)
    return max(_LEAST_RING, min(_RING_OF_GPU if gpu else _RING_OF_CPU, size))


def homes_in(units: Sequence[Unit], placement: Placement, sizes: TierSizes) -> Homes:
    """Where the engine puts everything, and the plan counts it."""
    return homes_of(
        units,
        params=placement.params,
        gradients=sizes.gradients,
        page=sizes.page,
        gpu_fraction=sizes.gpu_fraction,
        ram_fraction=sizes.ram_fraction,
        speeds=sizes.speeds,
    )


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
    homes = homes_in(units, placement, sizes)
    tiers = {DEVICE: device, RAM: "ram"} | dict(enumerate(drives))
    e, g = item_bytes(config.model.dtype), gradient_bytes(config)
    items = [Item("ram", "process", PROCESS + cuda_process(device), "interpreter, torch and transformers")]
    items += _page_items(units, homes, sizes, tiers=tiers, e=e, g=g)
    items += _weight_items(units, homes.weights, sizes, tiers=tiers, e=e)
    items += _gradient_items(units, homes.gradients, tiers=tiers, g=g)
    ring = gradient_ring(config, units, homes.gradients, gpu=device == "gpu")
    items.append(Item("ram", "gradient ring", ring, "from the device to sums in memory or on drives"))
    items.append(Item(device, "gradients in flight", *_in_flight(units, homes.gradients, e=e, gpu=device == "gpu")))
    stored = [sizes.format.page_bytes(page.elements) for page in homes.pages if page.home != RAM]
    if stored and config.save.every != 0:
        why = f"{SAVE_BUFFERS} pages on their way into a checkpoint"
        items.append(Item("ram", "save buffers", SAVE_BUFFERS * max(stored), why))
    inputs = kept_inputs(config, shape, seq_len=seq_len)
    kept = input_items(config, inputs, device=device, drives=drives) if checkpointing else []
    if config.tiered.checksums or config.tiered.io == "async_io":
        on_drives = sum(item.bytes for item in (*items, *kept) if item.tier in drives)
        items.append(Item("ram", "checksums", on_drives // 512, "8 bytes for each 4096 on a drive"))
    items += activation_items(
        config,
        shape,
        device=device,
        world=1,
        checkpointing=checkpointing,
        seq_len=seq_len,
        kept=kept,
        gradients=True,
        waiting=e * sum(weight.numel for weight in shape.weights if weight.trainable and weight.uses > 1),
    )
    return items


def _page_items(
    units: Sequence[Unit], homes: Homes, sizes: TierSizes, *, tiers: dict[int, str], e: int, g: int
) -> list[Item]:
    def state(page: Page) -> int:
        return sizes.format.page_bytes(page.elements)

    moments = f"{sizes.states} moment{'s' * (len(sizes.format.rule.moments) > 1)}"
    why = f"fp32 master, {moments}: {sizes.format.bytes_each:.3g} B a parameter"
    items = []
    for home, tier in tiers.items():
        held = sum(state(page) for page in homes.pages if page.home == home)
        if home == RAM:
            items.append(Item(tier, "state in RAM", held, f"{why}, {sizes.ram_fraction:.0%} of it"))
        elif home == DEVICE:
            items.append(Item(tier, "state on the GPU", held, f"{why}, {sizes.gpu_fraction:.0%} of it"))
        else:
            items.append(Item(tier, "state", held, why))
    routes = routes_of(homes, is_gpu=tiers[DEVICE] == "gpu")
    moved = [route for route in routes if route.through_host]
    if moved:
        each = host_slot(routes, format=sizes.format, gradient=g, weight=e).total
        count = min(sizes.page_buffers, len(moved))
        items.append(Item("ram", "page buffers", count * each, f"{count}, each with a page on its way"))
    each = device_slot(routes, gradient=g, weight=e).total
    if each:
        items.append(Item(tiers[DEVICE], "update buffers", each, "a page's gradient or new weights on their way"))
    return items


def _weight_items(
    units: Sequence[Unit], homes: Sequence[int], sizes: TierSizes, *, tiers: dict[int, str], e: int
) -> list[Item]:
    held = _held([e * unit.elements for unit in units], homes)
    away = [unit for unit, home in zip(units, homes, strict=True) if home != DEVICE]
    if not away:
        return [Item(tiers[DEVICE], "weights", held[DEVICE], f"{e} B a parameter")]
    items = [Item(tiers[DEVICE], "small weights", held.pop(DEVICE, 0), "never moved")]
    items += [Item(tiers[home], "weights", size, f"{e} B a parameter") for home, size in held.items()]
    blocks, others = (slot_sizes(away, blocks=sizes.unit_buffers, of_blocks=kind) for kind in (True, False))
    words = f"{len(blocks)} blocks and {len(others)} other module{'s' * (len(others) != 1)}"
    items.append(Item(tiers[DEVICE], "weights in use", e * (sum(blocks) + sum(others)), words))
    if tiers[DEVICE] == "gpu" and max(homes) >= 0:
        staging = 2 * e * max(unit.elements for unit in units)
        items.append(Item("ram", "weight staging", staging, "2 of the largest unit, between drive and GPU"))
    return items


def _gradient_items(units: Sequence[Unit], homes: Sequence[int], *, tiers: dict[int, str], g: int) -> list[Item]:
    why = f"{g} B a trained parameter"
    held = _held([g * unit.trained for unit in units], homes)
    items = [Item(tiers[home], "gradients", size, why) for home, size in held.items()]
    away = {unit: unit.trained for unit, home in zip(units, homes, strict=True) if home >= 0}
    if away:
        staging, words = _buffers(away, GRADIENT_BUFFERS)
        items.append(Item("ram", "gradient buffers", g * staging, f"{words} on their way"))
    return items


def _in_flight(units: Sequence[Unit], homes: Sequence[int], *, e: int, gpu: bool) -> tuple[int, str]:
    """Bytes of gradients that were handed over and still are on the device, beside the sums there, and what they are.

    A CPU's copies are made at once; on a GPU the largest and `GRADIENTS_IN_FLIGHT` may be on their way. That which is
    being made, and those of a tied weight that wait for each other, are among the activations' moments.
    """
    trained = [(place.weight, unit) for unit in units for place in unit.places if place.weight.trainable]
    copied = [e * weight.numel for weight, unit in trained if homes[unit.index] != DEVICE]
    if not gpu or not copied:
        return 0, "handed over at once"
    most = min(sum(copied), max(copied) + GRADIENTS_IN_FLIGHT)
    return most, f"handed over: the largest weight's, and at most {format_bytes(GRADIENTS_IN_FLIGHT)} more"


def _held(sizes: Sequence[int], homes: Sequence[int]) -> dict[int, int]:
    """Bytes in each home that has any."""
    held: dict[int, int] = {}
    for size, home in zip(sizes, homes, strict=True):
        held[home] = held.get(home, 0) + size
    return held


def _buffers(away: dict[Unit, int], count: int) -> tuple[int, str]:
    """Elements of the buffers for units that are away, and what they are: `count` for blocks, one for all else."""
    blocks = [elements for unit, elements in away.items() if unit.block]
    others = [elements for unit, elements in away.items() if not unit.block]
    many, one = min(count, len(blocks)), min(1, len(others))
    words = f"{many} blocks and {one} other module"
    return many * max(blocks, default=0) + one * max(others, default=0), words
