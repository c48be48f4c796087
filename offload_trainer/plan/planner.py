"""Choose the engine, placement, micro-batch size and update schedule for a configuration on a machine.

    MachineProfile + ModelShape + TrainConfig  ->  settle_and_plan  ->  Plan

Each engine's module lists its candidate placements and checks its settings. The planner takes the fastest candidate
that fits, or the first one that fits if the machine has not been benchmarked. The same inputs give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from offload_trainer.config import DeepSpeedSection, OptimSection, TieredSection, TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.packages import lacks
from offload_trainer.plan.batch_sizes import micro_batches
from offload_trainer.plan.candidate import Candidate
from offload_trainer.plan.config_conflicts import mistakes_of_division, mistakes_of_length, mistakes_of_rule, only_here
from offload_trainer.plan.deepspeed.engine import DeepSpeed
from offload_trainer.plan.defaults import row_length, wants_checkpointing
from offload_trainer.plan.gpu_support import has_bf16, refuse_card, with_dtype_of_card
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.memory.common import Item, reserve_items, saved_items
from offload_trainer.plan.oversized_units import too_large
from offload_trainer.plan.parallel.tensor_degree import divisions, tensor_of, why
from offload_trainer.plan.plain import Plain
from offload_trainer.plan.plan import Plan, Shared
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.engine import Tiered
from offload_trainer.plan.tiered.spec import Layouts
from offload_trainer.plan.tiered.state_formats import state_format
from offload_trainer.plan.tiered.update_schedules import FORWARD, OFF, UpdateSchedule, asking, gains, left_open
from offload_trainer.plan.tiered.weight_transfer import at_once
from offload_trainer.plan.time.compute_time import stands_for
from offload_trainer.plan.time.step_time import forecast, tokens_that_hide_the_update
from offload_trainer.plan.time.traffic import Traffic
from offload_trainer.plan.workload import Workload, chunks_of
from offload_trainer.units import format_bytes, format_count, format_seconds

_ALIKE = 1.05  # steps within this factor count as equally fast


def engine_of(config: TrainConfig) -> Tiered | DeepSpeed | Plain:
    """Return the configured engine with its settings; `auto` means the tiered engine."""
    place, name = config.placement, config.placement.engine
    if name in ("auto", "tiered"):
        return Tiered(place, config.tiered, config.model.offload_activations)
    if name == "deepspeed":
        return DeepSpeed(place, config.deepspeed, config.optim.moment_dtype, tensor_of(config.parallel))
    return Plain(place)


def workload(config: TrainConfig, shape: ModelShape, *, world: int = 1, nodes: int = 1, saves: bool = True) -> Workload:
    """Return the workload of one optimizer step. `saves`: the run writes checkpoints, or an export, to its output."""
    model, train, optim = config.model, config.train, config.optim
    seq_len = row_length(config.data.seq_len, shape)
    chunk = model.mlp_chunk if isinstance(model.mlp_chunk, int) else 0
    return Workload(
        shape=shape,
        dtype=model.dtype,
        micro_batch=train.micro_batch_size,
        accumulate=train.gradient_accumulation_steps,
        seq_len=seq_len,
        world=world,
        checkpointing=wants_checkpointing(model, shape),
        offload_activations=model.offload_activations,
        loss_chunk=train.micro_batch_size * seq_len if shape.whole_logits else model.loss_chunk,
        sums=optim.accumulate_dtype,
        state=state_format(optim.name, optim.moment_dtype),
        kernel=optim.kernel,
        checkpoints=None if not saves else 0 if config.save.every == 0 else config.save.keep,
        nodes=nodes,
        tensor=tensor_of(config.parallel),
        sequence=config.parallel.sequence,
        partition=config.parallel.partition_activations,
        mlp_chunk=chunk if chunk < train.micro_batch_size * (seq_len // config.parallel.sequence) else 0,
    )


def combination_mistakes(config: TrainConfig) -> list[str]:
    """Return errors in combinations of settings, one sentence each, with what to change."""
    mistakes = []
    place, optim = config.placement, config.optim
    for flag, home in (("--params", place.params), ("--optimizer", place.optimizer)):
        if home == "nvme" and not place.nvme:
            mistakes.append(f"{flag} nvme needs a drive: add --nvme DIR")
    engine = engine_of(config)
    mistakes += engine.mistakes() + _not_of(engine, config)
    if config.model.activation_checkpointing == "off" and config.model.offload_activations:
        mistakes.append(
            f"model.offload_activations={config.model.offload_activations} needs checkpointed activations: use "
            "model.activation_checkpointing=on"
        )
    if optim.schedule != "wsd" and optim.decay_steps != "auto":
        mistakes.append(f"optim.decay_steps belongs to optim.schedule=wsd, not to {optim.schedule}")
    if config.train.epochs == "auto":
        mistakes += mistakes_of_length(optim, steps=config.train.steps)
    elif "steps" in config.train.model_fields_set:
        mistakes.append(f"train.epochs={config.train.epochs:g} determines the steps: leave train.steps (--steps) out")
    if (
        config.train.tokens_per_step != "auto"
        and {"micro_batch_size", "gradient_accumulation_steps"} & config.train.model_fields_set
    ):
        mistakes.append(
            "train.tokens_per_step chooses micro_batch_size and gradient_accumulation_steps: leave those two out"
        )
    if optim.initial_loss_scale < 1 or math.frexp(optim.initial_loss_scale)[0] != 0.5:
        mistakes.append(f"optim.initial_loss_scale={optim.initial_loss_scale:g}: it must be a power of two, at least 1")
    mistakes += mistakes_of_division(
        config.parallel, engine=engine.name, checkpointing=config.model.activation_checkpointing
    )
    return mistakes + mistakes_of_rule(optim)


def _not_of(engine: Tiered | DeepSpeed | Plain, config: TrainConfig) -> list[str]:
    """Return errors for settings that only another engine supports and this one would ignore."""
    mistakes = []
    if not isinstance(engine, Tiered):
        moments = ("fp32", "8bit") if isinstance(engine, DeepSpeed) else ("fp32",)
        mistakes += only_here(config.placement, config.model, config.optim, engine=engine.name, moments=moments)
    for name, section, default in (
        ("tiered", config.tiered, TieredSection()),
        ("deepspeed", config.deepspeed, DeepSpeedSection()),
    ):
        if engine.name != name and section != default:
            words = f"{name}.* keys with --engine {engine.name}, which does not read them"
            mistakes.append(f"{words}: add --engine {name}")
    return mistakes


def resolve_and_plan(
    config: TrainConfig,
    shape: ModelShape,
    machine: MachineProfile,
    *,
    world: int = 1,
    nodes: int = 1,
    saves: bool = True,
) -> tuple[TrainConfig, Plan]:
    """Return the configuration with dtype, micro-batch size and MLP chunks resolved, and its plan.

    Of the micro-batch sizes that divide `train.tokens_per_step`, take the fastest that fits, or the largest if the
    machine was not benchmarked.

    Raises:
        UserError: the settings cannot be combined on this machine (see `make_plan`).
    """
    if config.parallel.tensor == "auto":
        return _fastest_division(config, shape, machine, world=world, nodes=nodes, saves=saves)
    config = config.model_copy(update={"model": with_dtype_of_card(config.model, machine)})
    tried, layouts = [], Layouts(shape)
    together = tensor_of(config.parallel) * config.parallel.sequence  # ranks that share the same rows
    seq_len, rows = row_length(config.data.seq_len, shape), max(1, world // together)
    for train in micro_batches(config.train, seq_len=seq_len, world=rows):
        one = config.model_copy(update={"train": train})
        tried.append((one, make_plan(one, shape, machine, world=world, nodes=nodes, saves=saves, layouts=layouts)))
    chosen = _choose([plan for _, plan in tried])
    settled = next(one for one, plan in tried if plan is chosen)
    pieces = {"mlp_chunk": chosen.mlp_chunk or "off"}
    return settled.model_copy(update={"model": settled.model.model_copy(update=pieces)}), chosen


def _fastest_division(
    config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int, nodes: int, saves: bool
) -> tuple[TrainConfig, Plan]:
    """Resolve `parallel.tensor=auto` to the fastest number of tensor-parallel ranks that fits; 1 if rates are missing.

    Raise the UserError of 1 rank, if there is one; those of other numbers become part of a note.
    """
    settled, refused = dict[int, tuple[TrainConfig, Plan]](), dict[int, str]()
    for count, train in divisions(config.train, world=world, nodes=nodes):
        partition = config.parallel.partition_activations and count > 1
        parallel = config.parallel.model_copy(update={"tensor": count, "partition_activations": partition})
        one = config.model_copy(update={"parallel": parallel, "train": train})
        try:
            if count > 1 and (mistakes := combination_mistakes(one)):
                raise UserError("; ".join(mistakes))
            settled[count] = resolve_and_plan(one, shape, machine, world=world, nodes=nodes, saves=saves)
        except UserError as error:
            if count == 1:
                raise
            refused[count] = str(error)
    plans = {count: plan for count, (_, plan) in settled.items()}
    chosen = _choose(list(plans.values()))
    count = next(count for count, plan in plans.items() if plan is chosen)
    return settled[count][0], replace(chosen, notes=(*chosen.notes, why(count, plans, refused)))


def make_plan(
    config: TrainConfig,
    shape: ModelShape,
    machine: MachineProfile,
    *,
    world: int = 1,
    nodes: int = 1,
    saves: bool = True,
    layouts: Layouts | None = None,
) -> Plan:
    """Return the fastest candidate that fits, or, if none fits, the one with the smallest excess.

    Args:
        config: the settings.
        shape: the model's counts.
        machine: the machine, which stands for each of `nodes` machines.
        world: ranks of all nodes; each node has the same number.
        nodes: number of machines.
        saves: count checkpoints, or an export, on the drive of `machine.output`.
        layouts: cached layouts of `shape` from other plans.

    Raises:
        UserError: the settings cannot be combined on this machine.
    """
    engine = engine_of(config)
    if isinstance(engine, Tiered):
        engine = replace(engine, layouts=layouts if layouts is not None else Layouts(shape))
    work = workload(config, shape, world=world, nodes=nodes, saves=saves)
    machine = at_once(machine, ranks=work.here)
    refuse_card(machine, dtype=work.dtype)
    for wish, package in engine.packages():
        if machine.lacks(package):
            raise UserError(lacks(wish, package))
    if ignored := _not_of(engine, config):
        raise UserError("; ".join(ignored))
    engine.refuse(work, machine)
    if work.mlp_chunk and not shape.tiles:
        raise UserError(
            f"model.mlp_chunk={work.mlp_chunk}: no part of this model's blocks is a module that computes each token by "
            "itself, as a trial with a tiny one shows: leave it out"
        )
    chosen = _fastest(engine, work, machine)
    for chunk in chunks_of(work) if not chosen.fits and config.model.mlp_chunk == "auto" else ():
        if not chosen.fits:
            chosen = _fastest(engine, replace(work, mlp_chunk=chunk), machine)
    if isinstance(engine, Tiered) and not chosen.fits:
        chosen = replace(chosen, too_large=too_large(work, machine))
    notes = [*_notes_of_rule(config.optim), *_note_of_stock(config, chosen, work, machine)]
    return replace(chosen, notes=(*chosen.notes, *notes))


def _fastest(engine: Tiered | DeepSpeed | Plain, work: Workload, machine: MachineProfile) -> Plan:
    return _fastest_schedule(engine, work, machine) if isinstance(engine, Tiered) else _of_homes(engine, work, machine)


def _fastest_schedule(engine: Tiered, work: Workload, machine: MachineProfile) -> Plan:
    """Return the plan with the best of the update schedules that the configuration leaves open.

    A schedule replaces the default only if it gains enough.
    """
    best = first = _of_homes(engine, work, machine)
    if first.fits and not first.uses_drives:
        return first
    default, other = (FORWARD, OFF) if first.forecast.behind else (OFF, FORWARD)
    if first.fits and first.forecast.step is None:
        open_ways = [default, *([other] if engine.section.overlap == "auto" else [])]
        open_ways += [way for way, why_not in left_open(engine, work) if not why_not]
        ways = tuple(UpdateSchedule(way, None, None) for way in open_ways)
        return replace(first, ways=ways, way=default) if len(ways) > 1 else first
    taken, tried = default, [_way(default, first)]
    if engine.section.overlap == "auto" and first.fits:
        tried.append(_way(other, replace(first, forecast=first.forecast.otherwise)))
    for words, why_not in left_open(engine, work):
        plan = None if why_not else _of_homes(asking(engine, words), work, machine)
        tried.append(_way(words, plan) if plan else UpdateSchedule(words, None, None, why_not))
        if plan and plan.fits and (not best.fits or gains(plan.forecast.step, best.forecast.step)):
            best, taken = plan, words
    return replace(best, ways=tuple(tried), way=taken) if len(tried) > 1 else best


def _way(words: str, plan: Plan) -> UpdateSchedule:
    if not plan.fits:
        return UpdateSchedule(words, None, None, f"{words}: {'; '.join(plan.shortfalls())}")
    tokens = tokens_that_hide_the_update(plan.forecast, tokens=plan.tokens_per_step)
    return UpdateSchedule(words, plan.forecast.step, tokens)


def _of_homes(engine: Tiered | DeepSpeed | Plain, work: Workload, machine: MachineProfile) -> Plan:
    """Return the fastest of the engine's candidates that fits, or the nearest to it, and why others were rejected."""
    plans = [_planned(one, work, machine, engine=engine.name) for one in engine.candidates(work, machine)]
    chosen = _choose(plans)
    rejected = []
    for plan in plans:
        if plan is chosen:
            continue
        if not plan.fits:
            rejected.append((plan.homes, "; ".join(plan.shortfalls())))
        elif plan.forecast.step is not None and chosen.forecast.step is not None:
            rejected.append((plan.homes, _slower(plan.forecast.step, chosen.forecast.step)))
    return replace(chosen, rejected=tuple(rejected))


def _note_of_stock(config: TrainConfig, plan: Plan, work: Workload, machine: MachineProfile) -> list[str]:
    """Return a note if `auto` uses the tiered engine for several ranks although DeepSpeed is forecast to be faster.

    This happens because DeepSpeed's ZeRO can keep optimizer state on GPUs with several ranks.
    """
    stock = DeepSpeed(config.placement, config.deepspeed, config.optim.moment_dtype)
    ours = plan.forecast.step
    if config.placement.engine != "auto" or work.world == 1 or machine.gpu is None or ours is None:
        return []
    if len(config.placement.nvme) > 1 or config.tiered != TieredSection() or machine.lacks("deepspeed"):
        return []
    others = [_planned(one, work, machine, engine=stock.name) for one in stock.candidates(work, machine)]
    best = _choose(others) if others else None
    if best is None or not best.fits or best.forecast.step is None or best.forecast.step * _ALIKE > ours:
        return []
    seconds = format_seconds(best.forecast.step)
    return [
        f"{best.title}, {best.homes}, is forecast at {seconds} a step, the tiered engine at "
        f"{format_seconds(ours)}: consider --engine deepspeed"
    ]


def on_another(plan: Plan, items: Sequence[Item], work: Workload, machine: MachineProfile) -> Plan:
    """Return the plan for another node's machine; `items` name that machine's drives."""
    tiers, shared = tiers_of(items, work, machine), shared_filesystems(work, machine)
    return replace(plan, items=tuple(items), tiers=tiers, shared=shared)


def _notes_of_rule(optim: OptimSection) -> list[str]:
    if optim.name != "lion":
        return []
    betas = " and ".join(f"{beta:g}" for beta in optim.betas)
    return [f"optimizer Lion: betas {betas} (optim.betas), one moment a parameter"]


def _planned(one: Candidate, work: Workload, machine: MachineProfile, *, engine: str) -> Plan:
    """Return the plan of one candidate."""
    items, traffic = one.items(), one.traffic()
    found = forecast(work, machine, traffic, one.bounds(), engine=engine, stretch=one.stretch(), on_top=one.on_top())
    sizes, found = one.settled(found)
    items += reserve_items(machine, here=work.here)
    items += saved_items(work, output=machine.output.directory)
    return Plan(
        engine=engine,
        title=one.title,
        placement=one.placement,
        sizes=sizes,
        homes=one.homes,
        uses_drives=one.uses_drives,
        cannot_save=one.cannot_save,
        tunable=tuple(one.tunable()),
        checkpointing=work.checkpointing,
        seq_len=work.seq_len,
        mlp_chunk=work.mlp_chunk,
        micro_batch=work.micro_batch,
        tokens_per_step=work.tokens,
        world=work.world,
        nodes=work.nodes,
        items=tuple(items),
        tiers=tiers_of(items, work, machine),
        shared=shared_filesystems(work, machine),
        traffic=tuple(traffic),
        links=tuple(one.links()),
        forecast=found,
        rejected=(),
        notes=(*work.shape.notes, *_notes(work, traffic, machine), *one.notes()),
    )


def _slower(step: float, chosen: float) -> str:
    """Return why a plan whose step takes `step` seconds was not chosen over one that takes `chosen`."""
    if step >= 1.01 * chosen:
        return f"fits, but a step takes {format_seconds(step)}, {step / chosen - 1:.0%} longer"
    return f"fits, but a step takes {format_seconds(step)}, less than {_ALIKE - 1:.0%} faster, and moves more bytes"


def _choose(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan that fits, the first one that fits if a forecast is missing, or the smallest excess.

    Forecasts are inexact, so this takes the first plan within `_ALIKE` of the fastest: earlier plans move fewer bytes.
    """
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=_excess)
    steps = [plan.forecast.step for plan in fitting]
    known = [step for step in steps if step is not None]
    if len(known) < len(fitting):
        return fitting[0]
    return next(plan for plan, step in zip(fitting, known, strict=True) if step <= _ALIKE * min(known))


def _excess(plan: Plan) -> int:
    return sum(max(0, room["need"] - room["have"]) for room in plan.tiers.values())


def tiers_of(items: Sequence[Item], work: Workload, machine: MachineProfile) -> dict[str, dict[str, int]]:
    """Return {"need", "have"} in bytes for each tier.

    A directory that shares its filesystem with others has what the others leave.
    """
    have = {"gpu": machine.gpu_bytes * work.here, "ram": machine.ram_bytes}
    drives = _directories(work, machine)
    have |= {directory: drive.free_bytes for directory, drive in drives.items()}
    need = {tier: sum(item.bytes for item in items if item.tier == tier) for tier in have}
    for directory, drive in drives.items():
        if drive.device is not None:
            others = [o for o, other in drives.items() if other.device == drive.device and o != directory]
            have[directory] = max(0, have[directory] - sum(need[other] for other in others))
    return {tier: {"need": need[tier], "have": have[tier]} for tier in have}


def _directories(work: Workload, machine: MachineProfile) -> dict[str, DriveFacts]:
    """Return the directories that a run writes to: the output, where it saves, and the drives."""
    outputs = () if work.checkpoints is None else (machine.output,)
    return {drive.directory: drive for drive in (*outputs, *machine.drives)}


def shared_filesystems(work: Workload, machine: MachineProfile) -> tuple[Shared, ...]:
    """Return the filesystems that contain several of a run's directories."""
    by_device: dict[int, list[DriveFacts]] = {}
    for drive in _directories(work, machine).values():
        if drive.device is not None:
            by_device.setdefault(drive.device, []).append(drive)
    return tuple(
        Shared(tuple(drive.directory for drive in drives), min(drive.free_bytes for drive in drives))
        for drives in by_device.values()
        if len(drives) > 1
    )


def _notes(work: Workload, traffic: Sequence[Traffic], machine: MachineProfile) -> list[str]:
    notes = list(machine.notes)
    for drive in machine.drives:
        written = sum(moved.written for moved in traffic if moved.place == drive.directory)
        if written and drive.endurance_bytes:
            steps, rated = format_count(drive.endurance_bytes / written), format_bytes(drive.endurance_bytes)
            notes.append(
                f"a step writes {format_bytes(written)} to {drive.directory}, whose rated endurance of {rated} lasts "
                f"{steps} steps"
            )
        elif written:
            notes.append(f"a step writes {format_bytes(written)} to {drive.directory}")
    if machine.gpu is not None and not has_bf16(machine) and work.dtype == "fp16":
        notes.append(f"{machine.gpu} has no bf16 units: training in fp16 with dynamic loss scaling")
    timed = machine.rates.matmul
    if machine.gpu is not None and timed and work.dtype not in timed:
        as_fast = stands_for(work.dtype, machine)
        guess = f"are assumed to be as fast as {as_fast}" if as_fast else "no time can be forecast"
        notes.append(
            f"matrix products in {work.dtype} were not timed on {machine.gpu} and {guess}: run `offload-train bench`"
        )
    if work.offload_activations and not work.checkpointing:
        notes.append(
            f"model.offload_activations={work.offload_activations} has no effect: gradient checkpointing is "
            "off for a model of this size (model.activation_checkpointing=on)"
        )
    if machine.gpu is None and work.inputs_away == "cpu":
        notes.append(
            "model.offload_activations=cpu has no effect without a GPU: block inputs are in host memory anyway"
        )
    if machine.gpu is None:
        notes.append("no GPU here: the model runs on the CPU, in RAM")
    return notes
