"""The longest row that fits, found by planning rows of other lengths. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from offload_trainer.config import TrainConfig
from offload_trainer.plan.candidate import Candidate
from offload_trainer.plan.choose import engine_of, tiers_of, workload
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import saved_items
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.take import at_once
from offload_trainer.plan.workload import Workload, chunks_of

_ROWS = 256  # tokens that rows are looked for in multiples of


def longest_row(config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int, nodes: int) -> int:
    """Tokens of the longest row with which some homes fit, MLPs in pieces or not, as the wish leaves that open.

    Of micro-batches of as many rows as the wish says, where nothing is left open any more.
    """
    place, machine = config.placement, at_once(machine, ranks=max(1, world // nodes))
    if place.nvme and (place.optimizer, place.gpu_fraction) == ("auto", "auto"):  # none of the state is on the GPU then
        config = config.model_copy(update={"placement": place.model_copy(update={"gpu_fraction": 0.0})})
    engine = engine_of(config)

    def fits(seq_len: int) -> bool:
        rows = config.data.model_copy(update={"seq_len": seq_len})
        work = workload(config.model_copy(update={"data": rows}), shape, world=world, nodes=nodes)
        least = () if work.mlp_chunk else chunks_of(work)[-1:]  # longer pieces hold more
        tried = (*(replace(work, mlp_chunk=chunk) for chunk in least), work)
        for each in tried:
            candidates: Sequence[Candidate] = engine.candidates(each, machine)
            if any(_fits(one, each, machine) for one in reversed(candidates)):  # the roomiest first
                return True
        return False

    return longest(shape.context, fits)


def _fits(one: Candidate, work: Workload, machine: MachineProfile) -> bool:
    tiers = tiers_of([*one.items(), *saved_items(work, output=machine.output.directory)], work, machine)
    return all(room["need"] <= room["have"] for room in tiers.values())


def longest(context: int, fits: Callable[[int], bool]) -> int:
    """Tokens of the longest row that `fits`: the context, or a multiple of 256 below it, 0 where none does.

    To a 128th of the context. Whatever fits in some length fits in shorter ones.
    """
    if fits(context):
        return context
    step = max(1, context // 128 // _ROWS) * _ROWS
    lengths = range(step, context, step)
    found = bisect_left(lengths, True, key=lambda length: not fits(length))
    return lengths[found - 1] if found else 0
