"""Memory of the tiered engine in RAM, on the device and on each drive, item by item. Pure arithmetic.

The engine allocates by `plan/tiered/layout.py`, so the bytes of pages, weights and gradients are exact. Each rank has
a process, a device and buffers. State, weights and gradient sums in RAM and on drives exist once per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload_trainer.plan.memory.activation_offload import input_items
from offload_trainer.plan.memory.common import Item, activation_items, process_items
from offload_trainer.plan.tiered.layout import DEVICE, ELSEWHERE, RAM, PageGroup, TierMap, Unit, largest_range
from offload_trainer.plan.tiered.sequence_parallel import sequence_items
from offload_trainer.plan.tiered.spec import (
    GRADIENT_BUFFERS,
    GRADIENTS_IN_FLIGHT,
    OUTBOXES,
    SAVE_BUFFERS,
    SHARED_READS,
    TierSizes,
    exchange_bytes,
    gradient_ring,
)
from offload_trainer.plan.tiered.update_staging import Route, device_slot, host_slot, route_of
from offload_trainer.plan.tiered.weight_buffers import slot_sizes
from offload_trainer.plan.tiered.weight_transfer import NCCL_BYTES
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes


def tiered_items(
    work: Workload,
    units: Sequence[Unit],
    homes: TierMap,
    sizes: TierSizes,
    *,
    device: str,
    drives: Sequence[str],
) -> list[Item]:
    """Return the memory of a node's ranks at its peak. `device` is the tier that computes: "gpu", or "ram" on a CPU."""
    tiers = {DEVICE: device, RAM: "ram"} | dict(enumerate(drives))
    e, g, is_gpu = work.item_bytes, work.gradient_bytes, device == "gpu"
    items = process_items(device, here=work.here)
    items += _page_items(homes, sizes, tiers=tiers, e=e, g=g)
    items += _weight_items(units, homes.weights, sizes, tiers=tiers, e=e)
    items += _gradient_items(units, homes.gradients, sizes, tiers=tiers, g=g)
    if work.world == 1:
        ring = gradient_ring(units, homes.gradients, item_bytes=e, several=work.accumulate > 1, gpu=is_gpu)
        items.append(
            Item("ram", "gradient staging", ring, "buffer between the device and gradient sums in RAM or on drives")
        )
        items.append(Item(device, "gradients in flight", *_in_flight(units, homes.gradients, e=e, gpu=is_gpu)))
    else:
        items += _of_each_rank(_exchange_items(units, sizes=sizes, device=device, e=e), work.here)
        if device == "gpu" and DEVICE in homes.weights:
            why = "NCCL's buffers for broadcasting updated weights to the other ranks' devices; assumed"
            items += _of_each_rank([Item(device, "broadcasts", NCCL_BYTES, why)], work.here)
    pages = [one.page for one in homes.page_groups]
    stored = max((page.elements for page in pages if page.home not in (RAM, ELSEWHERE)), default=0)
    if stored and work.checkpoints != 0:
        why, size = f"{SAVE_BUFFERS} pages being written to a checkpoint", sizes.format.page_bytes(stored)
        items += _of_each_rank([Item("ram", "save buffers", SAVE_BUFFERS * size, why)], work.here)
    if sizes.remainders and work.checkpoints != 0:
        joined = (4 + e) * max((page.elements for page in pages), default=0)
        items += _of_each_rank(
            [Item("ram", "merged masters", joined, "one page of fp32 masters, merged from weights and their low bits")],
            work.here,
        )
    kept = _of_each_rank(input_items(work, device=device, drives=drives), work.here)
    if sizes.checksums:
        state = ("state", "state, second copy")  # pages of state have separate checksums of a few bytes each
        checked = sum(item.bytes for item in (*items, *kept) if item.tier in drives and item.name not in state)
        items.append(
            Item(
                "ram",
                "checksums",
                checked // 512,
                "8 bytes for each 4096 bytes of weights, gradients and block inputs on drives",
            )
        )
    tied = sum(weight.numel for weight in work.shape.weights if weight.trainable and weight.uses > 1)
    items += activation_items(work, device=device, kept=kept, gradients=True, waiting=e * tied)
    return items + sequence_items(work, device=device)


def _page_items(homes: TierMap, sizes: TierSizes, *, tiers: dict[int, str], e: int, g: int) -> list[Item]:
    moments = f"{sizes.states} moment{'s' * (len(sizes.format.rule.moments) > 1)}"
    master = "low 16 bits of the master" if sizes.remainders else "fp32 master"
    why = f"{master}, {moments}: {sizes.format.bytes_each:.3g} B a parameter"
    items = []
    for home, tier in tiers.items():
        held = sum(
            one.count * sizes.format.page_bytes(one.page.elements) for one in homes.page_groups if one.page.home == home
        )
        if home == RAM:
            items.append(Item(tier, "state in RAM", held, f"{sizes.ram_fraction:.0%} of the optimizer state; {why}"))
        elif home == DEVICE:
            share = f"{sizes.gpu_fraction:.0%} of the optimizer state"
            items.append(Item(tier, "state on the GPU", held, f"{share}; {why}"))
        else:
            items.append(Item(tier, "state", held, why))
            if sizes.places > 1:
                items.append(Item(tier, "state, second copy", held, "of the previous step (tiered.state_copies=2)"))
    is_gpu = tiers[DEVICE] == "gpu"
    routes = [
        (route_of(one.number, one.page, homes, is_gpu=is_gpu), one)
        for one in homes.page_groups
        if one.page.home != ELSEWHERE
    ]
    if any(route.through_host for route, _ in routes):
        slots = [_slots(routes, sizes, rank=rank, e=e, g=g) for rank in range(sizes.here)]
        count = sum(count for count, _ in slots)
        items.append(
            Item(
                "ram",
                "page buffers",
                sum(count * each for count, each in slots),
                f"{count}, each for one page in transfer",
            )
        )
    each = device_slot([route for route, _ in routes], gradient=g, weight=e).total
    if each:
        items.append(
            Item(tiers[DEVICE], "update buffers", each, "one page of gradients or updated weights in transfer")
        )
    return items


def _slots(
    routes: Sequence[tuple[Route, PageGroup]], sizes: TierSizes, *, rank: int, e: int, g: int
) -> tuple[int, int]:
    """Return the number of a rank's page buffers and the bytes of each; `routes` has one page per group."""
    mine = [(route, one) for route, one in routes if one.rank == rank]
    moved = sum(one.count for route, one in mine if route.through_host)
    slot = host_slot([route for route, _ in mine], format=sizes.format, gradient=g, weight=e)
    return min(sizes.page_buffers, moved), slot.total


def _of_each_rank(items: Sequence[Item], world: int) -> list[Item]:
    return [replace(item, bytes=item.bytes * world) for item in items]


def _exchange_items(units: Sequence[Unit], *, sizes: TierSizes, device: str, e: int) -> list[Item]:
    """Return the buffers of one rank for gradients in transfer to the ranks that add them up."""
    size = exchange_bytes(units, item_bytes=e)
    items = [
        Item(
            "ram",
            "gradient exchange",
            size,
            f"{OUTBOXES} buffers for the largest block's gradients, shared by all ranks",
        )
    ]
    if sizes.nodes > 1:
        inboxes = (sizes.ranks - sizes.here) * e * largest_range(units, ranks=sizes.ranks)
        items.append(
            Item("ram", "gradient receive buffers", inboxes, "the largest shard from each rank of other nodes")
        )
    if device == "gpu":
        items.append(
            Item(
                device,
                "gradients in flight",
                size // OUTBOXES,
                "of one block, until they are copied to the exchange buffers",
            )
        )
    return items


def _weight_items(
    units: Sequence[Unit], homes: Sequence[int], sizes: TierSizes, *, tiers: dict[int, str], e: int
) -> list[Item]:
    held = _held([e * unit.elements for unit in units], homes)
    held[DEVICE] = held.get(DEVICE, 0) * sizes.here
    away = [unit for unit, home in zip(units, homes, strict=True) if home != DEVICE]
    if not away:
        return [Item(tiers[DEVICE], "weights", held[DEVICE], f"{e} B a parameter")]
    items = [Item(tiers[DEVICE], "small weights", held.pop(DEVICE), "always on the device")]
    items += [Item(tiers[home], "weights", size, f"{e} B a parameter") for home, size in held.items()]
    blocks, others = (slot_sizes(away, blocks=sizes.unit_buffers, of_blocks=kind) for kind in (True, False))
    of_block = "part" if any(unit.is_part for unit in away) else "block"
    counts = ((len(blocks), of_block), (len(others), "other module"))
    words = " and ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
    in_use = sizes.here * e * (sum(blocks) + sum(others))
    items.append(Item(tiers[DEVICE], "weights in use", in_use, words))
    if sizes.by_parts and tiers[DEVICE] == "gpu":
        items.append(
            Item("gpu", "all-gather", sizes.here * NCCL_BYTES, "NCCL's buffers for gathering weights; assumed")
        )
    stored = max((e * unit.elements for unit, home in zip(units, homes, strict=True) if home >= 0), default=0)
    if sizes.nodes > 1 and stored:
        through = sizes.here * e * largest_range(away, ranks=sizes.ranks)
        items.append(
            Item("ram", "weights between nodes", through, "one shard of each rank, between drives of different nodes")
        )
    if tiers[DEVICE] == "gpu" and stored:
        staging = 2 * e * max(unit.elements for unit in units)
        words = "2 buffers for the largest block, between drive and GPU"
        items.append(Item("ram", "weight staging", sizes.here * staging, words))
    if sizes.ranks > 1 and stored:
        words = f"{SHARED_READS} buffers for the largest block, read once for all ranks"
        items.append(Item("ram", "weights read", SHARED_READS * stored, words))
    return items


def _gradient_items(
    units: Sequence[Unit], homes: Sequence[int], sizes: TierSizes, *, tiers: dict[int, str], g: int
) -> list[Item]:
    why = f"{g} B a trainable parameter"
    placed = zip(units, homes, strict=True)  # files have all elements; untouched memory takes no physical pages
    held = _held([g * (sizes.trained_here(unit) if home == RAM else unit.trained) for unit, home in placed], homes)
    items = [Item(tiers[home], "gradients", size, why) for home, size in held.items()]
    away = {unit: unit.trained for unit, home in zip(units, homes, strict=True) if home >= 0}
    if away:
        staging, words = _buffers(away, GRADIENT_BUFFERS)
        items.append(Item("ram", "gradient buffers", g * staging, f"{words} in transfer"))
    return items


def _in_flight(units: Sequence[Unit], homes: Sequence[int], *, e: int, gpu: bool) -> tuple[int, str]:
    """Return the bytes of gradients on the device that the engine is still copying to the host, and a description.

    On a CPU copies are synchronous. On a GPU the largest gradient and up to `GRADIENTS_IN_FLIGHT` bytes may be waiting.
    The gradient being computed, and those of a tied weight that wait for each other, count as activations.
    """
    trained = [(place.weight, unit) for unit in units for place in unit.places if place.weight.trainable]
    copied = [e * weight.numel for weight, unit in trained if homes[unit.index] != DEVICE]
    if not gpu or not copied:
        return 0, "copied immediately"
    most = min(sum(copied), max(copied) + GRADIENTS_IN_FLIGHT)
    return most, f"being copied off the GPU: the largest weight's, and at most {format_bytes(GRADIENTS_IN_FLIGHT)} more"


def _held(sizes: Sequence[int], homes: Sequence[int]) -> dict[int, int]:
    """Return the sum of the sizes by tier, for each tier that occurs."""
    held: dict[int, int] = {}
    for size, home in zip(sizes, homes, strict=True):
        held[home] = held.get(home, 0) + size
    return held


def _buffers(away: dict[Unit, int], count: int) -> tuple[int, str]:
    """Return the elements of the buffers for units on drives, and a description.

    There are up to `count` buffers for blocks, and one for all other modules.
    """
    blocks = [elements for unit, elements in away.items() if unit.block]
    others = [elements for unit, elements in away.items() if not unit.block]
    many, one = min(count, len(blocks)), min(1, len(others))
    words = f"{many} blocks and {one} other module"
    return many * max(blocks, default=0) + one * max(others, default=0), words
