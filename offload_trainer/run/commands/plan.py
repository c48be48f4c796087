"""The `plan` command for other machines: plans from a machine file, and a comparison of parallelism modes.

`run/planning.py` plans runs on this machine. An unmodified preset is planned without importing torch. Other models are
sized from a transformers model on the meta device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from offload_trainer.config import (
    DeepSpeedSection,
    ModelSection,
    ParallelSection,
    TieredSection,
    TrainConfig,
    TrainSection,
)
from offload_trainer.errors import UserError
from offload_trainer.model.presets import preset_shape
from offload_trainer.plan.defaults import row_length, with_dtype_of_card
from offload_trainer.plan.machine import MachineProfile, refuse_card
from offload_trainer.plan.parallel.tables import Comparison, Mode, compare
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import any_placement_fits, combination_mistakes, make_plan, resolve_and_plan, workload
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.spec import Layouts
from offload_trainer.plan.workload import item_bytes
from offload_trainer.run.planning import (
    MemoryFallbacks,
    machine_here,
    model_of,
    planned,
    with_longest_row,
)
from offload_trainer.settings import values_given

_MOST_NODES = 1024
_MICRO = (16, 4, 1)  # micro-batch sizes to try for the tiered engine in a comparison, the first that fits


def plan_elsewhere(config: TrainConfig, machine: MachineProfile) -> Plan:
    """Plan a run on a described machine, with the longest row that fits."""
    models = _models(config)
    found = planned(config, models, machine, world=config.placement.gpus)
    return with_longest_row(found, config, models).plan


def plan_cluster(config: TrainConfig, machine: MachineProfile, nodes: str) -> list[Plan]:
    """Plan a run for each number of nodes in `nodes`, such as "2" or "1,2,4", in ascending order.

    Each node has as many ranks as --gpus says, or else as the machine has GPUs. Raises UserError for invalid numbers.
    """
    counts = nodes.split(",")
    if not all(count.isdigit() and 0 < int(count) <= _MOST_NODES for count in counts):
        raise UserError(f"--nodes {nodes}: whole numbers from 1 to {_MOST_NODES}, such as 2 or 1,2,4")
    gpus = config.placement.gpus if "gpus" in config.placement.model_fields_set else machine.gpus
    numbers = sorted(set(map(int, counts)))
    models = _models(config)
    return [planned(config, models, machine, world=gpus * count, nodes=count).plan for count in numbers]


def compare_modes(config: TrainConfig, machine: MachineProfile | None, nodes: str | None) -> Comparison:
    """Compare the ways to divide a step over ranks.

    `machine`: the described machine; None: this one. `nodes`: the number of such machines; None: as described. Raises
    UserError for a single rank or an invalid number of nodes.
    """
    if nodes is not None and not (nodes.isdigit() and 0 < int(nodes) <= _MOST_NODES):
        raise UserError(f"--nodes {nodes}: with --parallel, one whole number from 1 to {_MOST_NODES}")
    if machine is None:
        here, gpus = machine_here(config.placement, output=config.save.output), config.placement.gpus
    else:
        here = machine
        gpus = config.placement.gpus if "gpus" in config.placement.model_fields_set else machine.gpus
    count = here.nodes if nodes is None else int(nodes)
    if gpus * count == 1:
        raise UserError(
            "--parallel compares ways to divide a step over ranks, and there is only one rank: add --gpus N"
        )
    models = _models(config)
    shape = models.as_wished(config).shape
    whole = "" if _preset(config) else _why_whole(models.source)
    config = config.model_copy(update={"model": with_dtype_of_card(config.model, here)})
    refuse_card(here, dtype=config.model.dtype)
    world, row = gpus * count, row_length(config.data.seq_len, shape)
    layouts = Layouts(workload(config, shape, world=world, nodes=count))

    def plan(mode: Mode, tokens: int) -> Plan | str:
        groups = world // (mode.tensor * mode.sequence)
        rows, rest = divmod(tokens, groups * row)
        if rest or not rows:
            return f"{tokens // row} rows a step are not a multiple of {groups} data-parallel ranks"
        if mode.sequence > 1 and whole:
            return whole
        of_mode = _asking(config, mode, tokens=tokens)
        try:
            if mode.stage is None:
                return _planned_tiered(of_mode, rows, models, here, nodes=count, world=world, layouts=layouts)
            if mistakes := combination_mistakes(of_mode):
                return "; ".join(mistakes)
            return resolve_and_plan(of_mode, shape, here, world=world, nodes=count, saves=False)[1]
        except UserError as error:
            if mode == Mode(world):
                raise
            return str(error)

    return compare(workload(config, shape, world=world, nodes=count, saves=False), here, plan=plan)


def _asking(config: TrainConfig, mode: Mode, *, tokens: int) -> TrainConfig:
    """Return the configuration that runs a mode; settings of the other engine are left out."""
    place = config.placement
    if mode.stage is None:
        return config.model_copy(
            update={
                "placement": place.model_copy(update={"engine": "tiered"}),
                "parallel": ParallelSection(sequence=mode.sequence),
                "deepspeed": DeepSpeedSection(),
            }
        )
    partition = config.parallel.partition_activations and mode.tensor > 1
    stage = "auto" if mode.tensor > 1 else mode.stage
    batch = {"micro_batch_size", "gradient_accumulation_steps", "tokens_per_step"}
    train = config.train.model_dump(exclude_unset=True, exclude=batch)
    return config.model_copy(
        update={
            "placement": place.model_copy(update={"engine": "deepspeed", "nvme": place.nvme[:1]}),
            "parallel": ParallelSection(tensor=mode.tensor, partition_activations=partition),
            "deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage}),
            "tiered": TieredSection(),
            "train": TrainSection(**train, tokens_per_step=tokens),
        }
    )


def _planned_tiered(
    config: TrainConfig,
    rows: int,
    models: MemoryFallbacks,
    machine: MachineProfile,
    *,
    nodes: int,
    world: int,
    layouts: Layouts,
) -> Plan:
    """Plan `rows` rows per step with the largest micro-batch that fits.

    If even the smallest micro-batch does not fit, try the memory fallbacks for it.
    """
    how: dict[str, Any] = {"world": world, "nodes": nodes, "saves": False}
    sizes = sorted({math.gcd(rows, most * config.parallel.sequence) for most in _MICRO}, reverse=True)
    trains = ({"micro_batch_size": size, "gradient_accumulation_steps": rows // size} for size in sizes)
    *larger, smallest = [config.model_copy(update={"train": config.train.model_copy(update=train)}) for train in trains]
    if any_placement_fits(smallest, layouts, machine, **how):
        for one in larger:
            plan = make_plan(one, layouts.work.shape, machine, layouts=layouts, **how)
            if plan.fits:
                return plan
    else:
        for one, of in models.that_fit(smallest, machine, **how):
            plan = make_plan(one, of.shape, machine, **how)
            if plan.fits:
                return plan
    return make_plan(smallest, layouts.work.shape, machine, layouts=layouts, **how)


def _why_whole(source: Any) -> str:
    """Return why ranks cannot share rows of this model (sequence parallelism); "" if they can."""
    from offload_trainer.model.init_weights import meta_model
    from offload_trainer.model.probes.rows import refuse_pieces

    words = {"trust_remote_code": source.section.trust_remote_code}
    try:
        refuse_pieces(meta_model(source.config, **words), **words)
    except UserError as error:
        return str(error)
    return ""


def _models(config: TrainConfig) -> MemoryFallbacks:
    return MemoryFallbacks(lambda: model_of(config), preset=_preset(config))


def _preset(config: TrainConfig) -> ModelShape | None:
    """Return the shape of an unmodified preset, computed without torch; None for any other model."""
    section = config.model
    looked_at = isinstance(section.mlp_chunk, int) or config.tiered.fetch_granularity == "module"  # probes need torch
    changed = section.overrides or section.freeze or section.attention != ModelSection().attention
    changed = changed or config.data.packing == "on" or looked_at or section.base != ModelSection().base
    return None if changed else preset_shape(section.name, item_bytes=item_bytes(section.dtype))


def described(machine: MachineProfile, words: list[str]) -> tuple[MachineProfile, list[str]]:
    """Make a described machine and the words agree on drives; return both.

    Without --nvme, all drives of the machine are added to the words. The directories of a hand-written description are
    placeholders, so other names in --nvme are assigned to its drives in order. Raises UserError for more drives than
    the machine has, or for an unknown drive of a measured machine.
    """
    known = [drive.directory for drive in machine.drives]
    given = values_given(words, "--nvme")
    if not given:
        return machine, [*words, *(word for name in known for word in ("--nvme", name))]
    unknown = [name for name in dict.fromkeys(given) if name not in known]
    free = [name for name in known if name not in given]
    if unknown and (machine.origin == "measured" or len(unknown) > len(free)):
        raise UserError(f"--nvme {unknown[0]}: the machine has {', '.join(known) or 'no drive'}")
    places = dict(zip(free, unknown, strict=False))
    drives = tuple(replace(drive, directory=places.get(drive.directory, drive.directory)) for drive in machine.drives)
    notes = [f"--nvme {place} stands for {name} of that machine" for name, place in places.items()]
    return replace(machine, drives=drives, notes=(*machine.notes, *notes)), words
