"""Count the bytes that each phase of the tiered engine's step moves. Pure arithmetic.

The counts are exact: weights are fetched by the same ring buffers (`plan/tiered/weight_buffers.py`), and gradients are
visited in the order of `offloading/gradients/collector.py`. A prefetch counts in the phase that uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from offload_trainer.plan.memory.activation_offload import BlockInputs, inputs_of
from offload_trainer.plan.tiered.access_order import as_gradients_come, orders
from offload_trainer.plan.tiered.layout import DEVICE, ELSEWHERE, RAM, TierMap, Unit
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiered.weight_buffers import fetches
from offload_trainer.plan.tiered.weight_transfer import TransferBytes, taken
from offload_trainer.plan.time.traffic import Traffic
from offload_trainer.plan.workload import Workload


class _Moved:
    """Accumulate bytes by tier and phase."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, str], list[int]] = {}

    def __call__(self, home: int, phase: str, *, read: int = 0, written: int = 0) -> None:
        for index, size in enumerate((read, written)):
            self.bytes.setdefault((home, phase), [0, 0])[index] += size


def tiered_traffic(
    work: Workload, units: Sequence[Unit], homes: TierMap, sizes: TierSizes, *, drives: Sequence[str]
) -> list[Traffic]:
    """Return the bytes that one node moves in a step."""
    move = _Moved()
    _move_pages(move, work, homes, format=sizes.format)
    _move_units(move, work, units, homes, sizes)
    if work.inputs_away:
        places = inputs_of(work).homes(len(drives)) if sizes.activations == "nvme" else []
        _move_inputs(move, inputs_of(work), places, times=work.accumulate, ranks=work.here)
    names = {DEVICE: "device"} | dict(enumerate(drives))
    return [Traffic(names[home], phase, *sizes) for (home, phase), sizes in move.bytes.items() if home in names]


def _move_pages(move: _Moved, work: Workload, homes: TierMap, *, format: StateFormat) -> None:
    """Count state, gradients and new weights of the update; split masters also need the old weights."""
    e, g = work.item_bytes, work.gradient_bytes
    old = e if format.remainders else 0
    for one in homes.page_groups:
        weights, gradients, inside = one.weights, one.gradients, one.page.home == DEVICE
        elements = one.count * one.page.elements
        if one.page.home == ELSEWHERE:
            if weights != DEVICE:
                move(weights, "update", written=e * elements)
            continue
        if not inside:
            state = one.count * format.page_bytes(one.page.elements)
            move(one.page.home, "update", read=state, written=state)
        if weights != DEVICE:
            move(weights, "update", read=old * elements, written=e * elements)
        if gradients != DEVICE:
            move(gradients, "update", read=g * elements)
        if inside != (gradients == DEVICE):  # the gradient and its page are on different sides of the bus
            move(DEVICE, "update", **{"read" if inside else "written": g * elements})
        if inside != (weights == DEVICE):
            new, before = ("written", "read") if inside else ("read", "written")
            move(DEVICE, "update", **{new: e * elements, before: old * elements})


def _move_units(move: _Moved, work: Workload, units: Sequence[Unit], homes: TierMap, sizes: TierSizes) -> None:
    """Count weights fetched to the device, and gradients copied from it."""
    e, g, micro = work.item_bytes, work.gradient_bytes, work.accumulate
    for (unit, phase), times in fetched(work, units, homes, sizes).items():
        elements, by_parts = units[unit].elements, sizes.by_parts and homes.weights[unit] == RAM
        into = taken(elements, item_bytes=e, ranks=sizes.here, by_parts=by_parts).from_ram
        move(homes.weights[unit], phase, read=times * e * elements)
        move(DEVICE, phase, read=times * into)
    collected = {unit.index for unit in units if homes.gradients[unit.index] >= 0}
    gradients = as_gradients_come(units, work.shape)
    for unit, visits in _visits(units, collected, gradients, times=micro).items():
        size = g * sizes.trained_here(units[unit])
        move(homes.gradients[unit], "backward", read=(visits - 1) * size, written=visits * size)
    outside = [units[unit] for unit in set(gradients) if homes.gradients[unit] != DEVICE]
    handed_over = [place.weight for unit in outside for place in unit.places]
    move(DEVICE, "backward", written=e * micro * sum(weight.numel for weight in handed_over if weight.trainable))


def fetched(work: Workload, units: Sequence[Unit], homes: TierMap, sizes: TierSizes) -> Counter[tuple[int, str]]:
    """Return how often a rank fetches each unit in each phase of a step, by (unit, phase)."""
    forward, backward = orders(units, work.shape, again=work.checkpointing)
    away = [unit for unit in units if homes.weights[unit.index] != DEVICE]
    needed = fetches(away, [*forward, *backward], blocks=sizes.unit_buffers, times=work.accumulate)
    passes = len(forward) + len(backward)
    return Counter((unit, "forward" if place % passes < len(forward) else "backward") for unit, place in needed)


def taken_by_parts(work: Workload, units: Sequence[Unit], homes: TierMap, sizes: TierSizes) -> dict[str, TransferBytes]:
    """Return the weights that each device receives by all-gather, by phase; empty if ranks copy whole units."""
    found: dict[str, TransferBytes] = {}
    for (unit, phase), times in fetched(work, units, homes, sizes).items() if sizes.by_parts else ():
        if homes.weights[unit] == RAM:
            one = taken(units[unit].elements, item_bytes=work.item_bytes, ranks=sizes.here, by_parts=True)
            found[phase] = found.get(phase, TransferBytes(0, 0)) + times * one
    return found


def _move_inputs(move: _Moved, inputs: BlockInputs, places: Sequence[int], *, times: int, ranks: int) -> None:
    """Count offloaded inputs of checkpointed blocks; `places` lists the drive of each, if they go to drives.

    Each rank has its own inputs.
    """
    every = times * inputs.count * inputs.size
    move(DEVICE, "forward", written=every)
    move(DEVICE, "backward", read=every)
    for number, home in enumerate(places):
        move(home, "forward", written=ranks * times * inputs.size)
        move(home, "backward", read=ranks * times * inputs.size if number in inputs.read_back else 0)


def bytes_of_additions(work: Workload, units: Sequence[Unit], homes: TierMap) -> int:
    """Return the bytes of host memory that accumulating gradients in RAM and on drives reads and writes in a step.

    Each micro-batch after the first reads and writes every sum and reads the gradient.
    """
    added = sum(unit.trained for unit in units if homes.gradients[unit.index] != DEVICE)
    return (work.added - 1) * (2 * work.gradient_bytes + work.item_bytes) * added


def _visits(units: Sequence[Unit], collected: set[int], order: Sequence[int], *, times: int) -> Counter[int]:
    """Return how often each unit's gradient sums are written to a drive: once per visit in the backward's order.

    Consecutive visits of the same unit count as one. `order` is repeated `times` times.
    """
    found: list[Counter[int]] = []
    last: dict[bool, int] = {}
    for _ in range(min(2, times)):
        found.append(Counter())
        for unit in order:
            if unit in collected and last.get(units[unit].block) != unit:
                found[-1][unit] += 1
                last[units[unit].block] = unit
    again = found[-1]
    return found[0] + Counter({unit: (times - 1) * visits for unit, visits in again.items()})
