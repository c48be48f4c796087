"""The `plan` command for other machines, and its comparison of the ways to divide a step over ranks.

`run/planning.py` plans runs on this machine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes, format_count, format_seconds
from offload_trainer.config import DeepSpeedSection, TieredSection, TrainConfig
from offload_trainer.plan.communication import GPUS, NETWORK
from offload_trainer.plan.machine import MachineProfile, describe_links
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.tiers import GPU_NAME, RAM_NAME
from offload_trainer.run.planning import machine_here, model_of, planned, with_what_fits
from offload_trainer.settings import with_words

_MICRO = (64, 16, 4, 1)  # micro-batch sizes to try in a comparison; planning every size takes minutes


def plan_elsewhere(config: TrainConfig, machine: MachineProfile, *, nodes: int | None = None) -> Plan:
    """Plan a run on a described machine, or on `nodes` of them."""
    count, source = nodes or machine.nodes, model_of(config)
    each = config.placement.gpus if nodes is None and count == 1 else _gpus(config, machine)
    found = planned(config, source, machine, world=count * each, nodes=count)
    return (found if found.plan.fits else with_what_fits(found, config, here=False)).plan


def modes(world: int, *, nodes: int = 1) -> Iterator[tuple[str, str, int]]:
    """Yield (name, settings, number of ranks with the same rows) of each way to divide a step over the ranks."""
    counts = [count for count in range(1, world + 1) if world % count == 0]
    yield f"tiered, {world} ranks", "--engine tiered", 1
    if (each := world // nodes) > 1:
        yield f"tiered, {world} ranks, pipeline", f"--engine tiered parallel.pipeline={each}", each
    for stage in (1, 2, 3):
        yield f"ZeRO-{stage} over {world}", f"--engine deepspeed deepspeed.zero_stage={stage}", 1
    for count in counts[1:]:
        zero = f" x ZeRO-1 over {world // count}" * (count < world)
        yield f"tensor {count}{zero}", f"--engine deepspeed parallel.tensor={count}", count


def compare_modes(
    config: TrainConfig, machine: MachineProfile | None, nodes: int | None
) -> tuple[dict[str, Any], str, Plan]:
    """Plan each way to divide a step over ranks at equal tokens a step; return JSON, text and plan, the fastest first.

    `machine`: the described machine; None: this one. `nodes`: the number of such machines; None: as described. Raises
    UserError for a single rank, for what the tiered engine refuses of data-parallel ranks, and if no way is left.
    """
    here = machine or machine_here(config.placement, config.save)
    count = nodes or here.nodes
    world = count * (config.placement.gpus if machine is None else _gpus(config, machine))
    if world == 1:
        raise UserError(
            "--parallel compares ways to divide a step over ranks, and there is only one rank: add --gpus N"
        )
    source = model_of(config.with_keys("parallel", pipeline="auto"))  # "auto" also finds why a pipeline is not possible
    work = workload(config, source.shape, world=world, nodes=count)
    rows = work.micro_batch * work.accumulate * max(1, work.data)  # rows of a step on all data-parallel ranks
    plans, refused = list[tuple[str, str, Plan]](), dict[str, list[str]]()
    for name, words, together in modes(world, nodes=count):
        each, rest = divmod(rows, world // together)
        try:
            if rest:
                raise UserError(f"{rows} rows a step are not a multiple of {world // together} data-parallel ranks")
            batches = _batches(config, words, each, together)
            tried = (make_plan(batch, source.shape, here, world=world, nodes=count) for batch in batches)
            fitting = (plan for plan in tried if plan.fits)
            if "pipeline" in words:  # more micro-batches keep more ranks busy
                plan = min(fitting, key=lambda plan: plan.forecast.step or math.inf, default=None)
            else:
                plan = next(fitting, None)
            plans.append((name, words, plan or planned(batches[-1], source, here, world=world, nodes=count).plan))
        except UserError as error:
            if words == "--engine tiered" and not rest:
                raise
            reason = "; ".join(str(error).split("\n  - ")[1:]) or str(error)
            reason = reason.removeprefix(f"{words.split()[-1]}: ").removesuffix("; leave it out")
            refused.setdefault(reason, []).append(name)
    if not plans:
        raise UserError("; ".join(f"{', '.join(names)}: {reason}" for reason, names in refused.items()))
    plans.sort(key=lambda one: (not one[2].fits, one[2].forecast.step is None, one[2].forecast.step or 0.0))
    tokens, best = rows * work.seq_len, plans[0][2]
    lines = [f"{format_count(tokens)} tokens a step, {world} ranks on {count} node(s)"]
    lines += [_line(name, words, plan) for name, words, plan in plans]
    lines += [f"  refused: {', '.join(names)}: {reason}" for reason, names in refused.items()]
    values = {
        "tokens_per_step": tokens,
        "ranks": world,
        "nodes": count,
        "fastest": plans[0][0] if best.fits and best.forecast.step is not None else None,
        "modes": [
            {"name": name, "words": words, "step": plan.forecast.step, **plan.to_json()} for name, words, plan in plans
        ],
        "refused": [{"mode": name, "reason": reason} for reason, names in refused.items() for name in names],
    }
    return values, "\n".join([*lines, *describe_links(here.links)]), best


def _batches(config: TrainConfig, words: str, rows: int, together: int) -> list[TrainConfig]:
    """Return the configurations that run a mode with `rows` rows a step on each rank, largest micro-batch first."""
    place = config.placement
    if words.startswith("--engine tiered"):
        config = config.model_copy(update={"deepspeed": DeepSpeedSection()})
    else:  # DeepSpeed swaps to one drive
        config = config.model_copy(update={"tiered": TieredSection()}).with_keys("placement", nvme=place.nvme[:1])
        config = config.with_keys("deepspeed", zero_stage="auto")
    config = with_words(config.with_keys("parallel", tensor=1, pipeline=1), words)
    sizes = {math.gcd(rows, most * together) for most in _MICRO}
    if "pipeline" in words:  # 1, 2 or 4 times as many micro-batches as ranks, or the sizes in `_MICRO`
        few = {math.gcd(rows, max(1, rows // (times * together))) for times in (1, 2, 4)}
        sizes = few | {math.gcd(rows, most) for most in _MICRO}
    return [
        config.with_keys("train", micro_batch_size=size, gradient_accumulation_steps=rows // size)
        for size in sorted(sizes, reverse=True)
    ]


def _line(name: str, words: str, plan: Plan) -> str:
    if not plan.fits:
        return f"  {name:<33}does not fit: {'; '.join(plan.shortfalls())}"
    step = plan.forecast.step
    seconds = "unknown" if step is None else format_seconds(step)
    speed = "" if step is None else f"{format_count(plan.work.tokens / step)} tokens/s"
    sizes = {"GPU": plan.tiers[GPU_NAME]["need"] // plan.work.here, "RAM": plan.tiers[RAM_NAME]["need"]}
    for title, place in (("between GPUs", GPUS), ("network", NETWORK)):
        moved = [(one.read, one.written) for one in plan.links if one.place == place]
        sizes[title] = max(map(sum, zip(*moved, strict=True)), default=0)  # bytes in the direction that has more
    needs = ", ".join(f"{title} {format_bytes(size)}" for title, size in sizes.items() if size)
    return f"  {name:<33}{seconds:>12}{speed:>18}   {needs}; micro-batches of {plan.work.micro_batch}: {words}"


def _gpus(config: TrainConfig, machine: MachineProfile) -> int:
    """Return the ranks of each described machine: --gpus, or else the machine's GPUs."""
    return config.placement.gpus if "gpus" in config.placement.model_fields_set else machine.gpus


def described(machine: MachineProfile, nvme: Sequence[str]) -> MachineProfile:
    """Return a described machine with drives in the directories of a configuration's `nvme`.

    The directories of a hand-written description are placeholders, so other names are assigned to its drives in order.
    Raises UserError for more drives than the machine has, or for an unknown drive of a measured machine.
    """
    known = [drive.directory for drive in machine.drives]
    unknown = [name for name in dict.fromkeys(nvme) if name not in known]
    free = [name for name in known if name not in nvme]
    if unknown and (machine.origin == "measured" or len(unknown) > len(free)):
        raise UserError(f"--nvme {unknown[0]}: the machine has {', '.join(known) or 'no drive'}")
    places = dict(zip(free, unknown, strict=False))
    drives = tuple(replace(drive, directory=places.get(drive.directory, drive.directory)) for drive in machine.drives)
    notes = [f"--nvme {place} stands for {name} of that machine" for name, place in places.items()]
    return replace(machine, drives=drives, notes=(*machine.notes, *notes))
