"""The `plan` command for other machines: plans from a machine file, and a comparison of parallelism modes.

`run/planning.py` plans runs on this machine. An unmodified preset is planned without importing torch. Other models are
sized from a transformers model on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from offload_trainer.config import DeepSpeedSection, ModelSection, ParallelSection, TieredSection, TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.model.presets import preset_shape
from offload_trainer.plan.defaults import micro_batches, with_dtype_of_card
from offload_trainer.plan.engines import combination_mistakes
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.tables import Mode, assumptions, modes, row_of, scaling, table
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.spec import Layouts
from offload_trainer.plan.workload import item_bytes
from offload_trainer.run.planning import (
    MemoryFallbacks,
    machine_here,
    model_of,
    planned,
    with_longest_row,
    with_what_fits,
)
from offload_trainer.settings import values_given
from offload_trainer.units import format_count

_MOST_NODES = 1024
_MICRO = (64, 16, 4, 1)  # micro-batch sizes to try in a comparison; planning every size takes minutes


def plan_elsewhere(config: TrainConfig, machine: MachineProfile) -> Plan:
    """Plan a run on a described machine, with the longest row that fits."""
    models = _models(config)
    found = planned(config, models, machine, world=config.placement.gpus)
    if not found.plan.fits:
        found = with_what_fits(found, config, models, here=False)
    return with_longest_row(found, config, models).plan


@dataclass(frozen=True)
class Comparison:
    """Several plans as text and as JSON, a stable format. Seconds are null if a rate is missing."""

    text: str
    json: dict[str, Any]
    plan: Plan  # the first that fits, or one that does not

    @classmethod
    def of(cls, lines: Sequence[str], json: dict[str, Any], machine: MachineProfile, *, plans: Sequence[Plan]) -> Self:
        assumed = assumptions(machine)
        text = "\n".join([*lines, *(f"  assumed: {line}" for line in assumed)])
        return cls(text, json | {"assumptions": assumed}, next((plan for plan in plans if plan.fits), plans[-1]))


def plan_cluster(config: TrainConfig, machine: MachineProfile, nodes: str) -> Comparison:
    """Plan a run for each number of nodes in `nodes`, such as "2" or "1,2,4", in ascending order.

    Each node has as many ranks as --gpus says, or else as the machine has GPUs. Raises UserError for invalid numbers.
    """
    counts = nodes.split(",")
    if not all(count.isdigit() and 0 < int(count) <= _MOST_NODES for count in counts):
        raise UserError(f"--nodes {nodes}: whole numbers from 1 to {_MOST_NODES}, such as 2 or 1,2,4")
    gpus, models = _gpus(config, machine), _models(config)
    plans = [planned(config, models, machine, world=gpus * n, nodes=n).plan for n in sorted(set(map(int, counts)))]
    rows = [row_of(plan, f"{plan.nodes} x {gpus} ranks") for plan in plans]
    ratios = scaling(rows)
    lines = table(rows, last="scaling", ends=["" if ratio is None else f"{ratio:.2f}" for ratio in ratios])
    found = {"scaling": [row | {"scaling": ratio} for row, ratio in zip(rows, ratios, strict=True)]}
    if len(plans) == 1:
        lines, found = [plans[0].describe(), *lines], plans[0].to_json() | found
    return Comparison.of(lines, found, machine, plans=plans)


def compare_modes(config: TrainConfig, machine: MachineProfile | None, nodes: str | None) -> Comparison:
    """Compare the ways to divide a step over ranks, the fastest first.

    `machine`: the described machine; None: this one. `nodes`: the number of such machines; None: as described. Raises
    UserError for a single rank, an invalid number of nodes, or what the tiered engine refuses without sequence
    parallelism; and if no mode is left.
    """
    if nodes is not None and not (nodes.isdigit() and 0 < int(nodes) <= _MOST_NODES):
        raise UserError(f"--nodes {nodes}: with --parallel, one whole number from 1 to {_MOST_NODES}")
    here = machine or machine_here(config.placement, output=config.save.output)
    count = here.nodes if nodes is None else int(nodes)
    world = count * (config.placement.gpus if machine is None else _gpus(config, machine))
    if world == 1:
        raise UserError(
            "--parallel compares ways to divide a step over ranks, and there is only one rank: add --gpus N"
        )
    models = _models(config)
    shape, whole = models.as_wished(config).shape, "" if _preset(config) else _why_whole(models)
    config = config.model_copy(update={"model": with_dtype_of_card(config.model, here)})
    work = workload(config, shape, world=world, nodes=count)
    own_rows = max(1, work.data)  # ranks with rows of their own in the configuration
    train = next(micro_batches(config.train, seq_len=work.seq_len, world=own_rows))
    rows, layouts = train.micro_batch_size * train.gradient_accumulation_steps * own_rows, Layouts(work)
    plans, refused = list[tuple[Mode, Plan]](), dict[str, list[str]]()
    for mode in modes(world):
        groups = world // (mode.tensor * mode.sequence)
        if rows % groups:
            why = f"{rows} rows a step are not a multiple of {groups} data-parallel ranks"
            refused.setdefault(why, []).append(mode.name)
            continue
        try:
            if mode.sequence > 1 and whole:
                raise UserError(whole)
            tried = _configurations(config, mode, rows=rows)
            plans.append((mode, _first_that_fits(tried, models, here, world=world, nodes=count, layouts=layouts)))
        except UserError as error:
            if mode == Mode(world):
                raise
            refused.setdefault(str(error).removeprefix(f"{mode.setting}: "), []).append(mode.name)
    if not plans:
        raise UserError("; ".join(f"{', '.join(names)}: {reason}" for reason, names in refused.items()))
    plans.sort(key=lambda one: (not one[1].fits, one[1].forecast.step is None, one[1].forecast.step or 0.0))
    found = [row_of(plan, mode.name, words=_words(mode, plan)) for mode, plan in plans]
    lines = [f"{format_count(rows * work.seq_len)} tokens a step, {world} ranks on {count} node(s)"]
    lines += table(found, last="runs with", ends=[row["words"] for row in found])
    lines += [f"  refused: {', '.join(names)}: {reason}" for reason, names in refused.items()]
    values = {
        "tokens_per_step": rows * work.seq_len,
        "ranks": world,
        "nodes": count,
        "fastest": found[0]["name"] if found[0]["seconds"] is not None and not found[0]["lacks"] else None,
        "modes": found,
        "refused": [{"mode": name, "reason": reason} for reason, names in refused.items() for name in names],
    }
    return Comparison.of(lines, values, here, plans=[plan for _, plan in plans])


def _gpus(config: TrainConfig, machine: MachineProfile) -> int:
    """Return the ranks of each node: --gpus, or else the machine's GPUs."""
    return config.placement.gpus if "gpus" in config.placement.model_fields_set else machine.gpus


def _words(mode: Mode, plan: Plan) -> str:
    """Return the settings that run a mode."""
    return f"--engine {plan.engine} {mode.setting}".rstrip()


def _configurations(config: TrainConfig, mode: Mode, *, rows: int) -> list[TrainConfig]:
    """Return the configurations that run a mode with `rows` rows a step, largest micro-batch first.

    Settings of the other engine are left out. Raises UserError if the mode cannot be combined with the configuration.
    """
    together = mode.tensor * mode.sequence
    each = rows // (mode.ranks // together)
    place, tensor = config.placement, mode.tensor > 1
    sections: dict[str, object] = {"parallel": ParallelSection(tensor=mode.tensor, sequence=mode.sequence)}
    if mode.stage is None:
        sections |= {"placement": place.model_copy(update={"engine": "tiered"}), "deepspeed": DeepSpeedSection()}
    else:
        sections["placement"] = place.model_copy(update={"engine": "deepspeed", "nvme": place.nvme[:1]})
        stage = config.deepspeed.model_copy(update={"zero_stage": "auto" if tensor else mode.stage})
        sections |= {"deepspeed": stage, "tiered": TieredSection()}
    found = []
    for size in sorted({math.gcd(each, most * together) for most in _MICRO}, reverse=True):
        batch = {"micro_batch_size": size, "gradient_accumulation_steps": each // size, "tokens_per_step": "auto"}
        found.append(config.model_copy(update=sections | {"train": config.train.model_copy(update=batch)}))
    if mistakes := combination_mistakes(found[0]):
        raise UserError("; ".join(mistakes))
    return found


def _first_that_fits(
    tried: Sequence[TrainConfig],
    models: MemoryFallbacks,
    machine: MachineProfile,
    *,
    world: int,
    nodes: int,
    layouts: Layouts,
) -> Plan:
    """Return the plan of the first configuration that fits, or that of the last with the memory fallbacks."""
    *larger, smallest = tried
    for config in larger:
        plan = make_plan(config, layouts.work.shape, machine, world=world, nodes=nodes, layouts=layouts)
        if plan.fits:
            return plan
    return planned(smallest, models, machine, world=world, nodes=nodes).plan


def _why_whole(models: MemoryFallbacks) -> str:
    """Return why ranks cannot share rows of this model (sequence parallelism); "" if they can."""
    from offload_trainer.model.probes.rows import refuse_pieces

    try:
        refuse_pieces(models.source.meta())
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
