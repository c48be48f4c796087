"""Determine whether a configuration fits in any placement, and the longest row (sequence length) that still fits.

Only bytes are computed here, no seconds, so that many variants can be tried. Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from offload_trainer.config import TrainConfig
from offload_trainer.plan.candidate import Candidate
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import reserve_items, saved_items
from offload_trainer.plan.planner import engine_of, tiers_of, workload
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.engine import Tiered
from offload_trainer.plan.tiered.spec import Layouts
from offload_trainer.plan.tiered.weight_transfer import at_once
from offload_trainer.plan.workload import Workload, chunks_of

_ROWS = 256  # row lengths are searched in multiples of this many tokens


def longest_row(config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int, nodes: int) -> int:
    """Return the tokens of the longest row that fits in some placement that the configuration allows.

    The number of rows in a micro-batch stays as configured. MLPs may run in chunks if the configuration allows it.
    """
    layouts = Layouts(shape)

    def fits(seq_len: int) -> bool:
        rows = config.data.model_copy(update={"seq_len": seq_len})
        return any_placement_fits(config.model_copy(update={"data": rows}), layouts, machine, world=world, nodes=nodes)

    return longest(shape.context, fits)


def with_fewer_buffers(config: TrainConfig) -> list[TrainConfig]:
    """Return the configuration, followed by variants with fewer weight buffers if their number is not set."""
    tiered = config.tiered
    said = engine_of(config).name != "tiered" or "weight_buffers" in tiered.model_fields_set
    counts = [tiered.weight_buffers] if said else range(tiered.weight_buffers, 0, -1)
    sections = [tiered.model_copy(update={"weight_buffers": count}) for count in counts]
    return [config.model_copy(update={"tiered": section}) for section in sections]


def any_placement_fits(
    config: TrainConfig, layouts: Layouts, machine: MachineProfile, *, world: int, nodes: int, saves: bool = True
) -> bool:
    """Return whether the configuration fits in any placement that it allows, with MLPs whole or in chunks.

    `saves`: see `make_plan`.
    """
    place, machine = config.placement, at_once(machine, ranks=max(1, world // nodes))
    if place.nvme and (place.optimizer, place.gpu_fraction) == ("auto", "auto"):  # needs least with no state on the GPU
        config = config.model_copy(update={"placement": place.model_copy(update={"gpu_fraction": 0.0})})
    engine = engine_of(config)
    if isinstance(engine, Tiered):
        engine = replace(engine, layouts=layouts)
    work = workload(config, layouts.shape, world=world, nodes=nodes, saves=saves)
    least = () if work.mlp_chunk else chunks_of(work)[-1:]  # the smallest chunks need the least memory
    for each in (*(replace(work, mlp_chunk=chunk) for chunk in least), work):
        candidates: Sequence[Candidate] = engine.candidates(each, machine)
        if any(_fits(one, each, machine) for one in reversed(candidates)):  # the ones with the least on the GPU first
            return True
    return False


def _fits(one: Candidate, work: Workload, machine: MachineProfile) -> bool:
    beside = [*reserve_items(machine, here=work.here), *saved_items(work, output=machine.output.directory)]
    tiers = tiers_of([*one.items(), *beside], work, machine)
    return all(room["need"] <= room["have"] for room in tiers.values())


def longest(context: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of tokens for which `fits` is true: `context`, or a multiple of 256 below it, or 0.

    The resolution is 1/128 of the context. If a length fits, shorter ones must fit too.
    """
    if fits(context):
        return context
    step = max(1, context // 128 // _ROWS) * _ROWS
    lengths = range(step, context, step)
    found = bisect_left(lengths, True, key=lambda length: not fits(length))
    return lengths[found - 1] if found else 0
