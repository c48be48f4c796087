"""Facts and wishes in, a plan out: which engine, what lives where, and why not otherwise.

    MachineProfile + ModelShape + TrainConfig  ->  settle_and_plan  ->  Plan

Candidates are laid out from the fastest to the roomiest; of those that fit the fastest is taken, or the first where the
machine has not been timed. Same inputs, same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload_trainer.config import TrainConfig, engine_of, wishes_of_tiered
from offload_trainer.errors import UserError
from offload_trainer.packages import lacks
from offload_trainer.plan.auto import row_length, wants_checkpointing
from offload_trainer.plan.batches import micro_batches
from offload_trainer.plan.card import has_bf16, refuse_card, with_dtype_of_card
from offload_trainer.plan.kept import kept_inputs
from offload_trainer.plan.layout import units_of
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import Item, deepspeed_items, item_bytes, plain_items, saved_items
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.shares import shares_that_fit
from offload_trainer.plan.tiered import GradientHome, TierSizes, tier_sizes, tiered_items
from offload_trainer.plan.time import forecast, stands_for
from offload_trainer.plan.traffic import Traffic, bytes_of_additions, deepspeed_traffic, tiered_traffic
from offload_trainer.plan.zero import Placement, Tier, drive_stretch, zero_sizes
from offload_trainer.units import format_bytes, format_count, format_seconds

_ALIKE = 1.05  # times as long

# DeepSpeed's, from the fastest to the roomiest.
_CANDIDATES = (
    Placement("gpu", "gpu"),
    Placement("gpu", "cpu"),
    Placement("cpu", "cpu"),
    Placement("gpu", "nvme"),
    Placement("cpu", "nvme"),
    Placement("nvme", "nvme"),
)


def settle_and_plan(
    config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int = 1
) -> tuple[TrainConfig, Plan]:
    """The wish with its dtype and micro-batches chosen, and the plan for it. UserError as `make_plan`.

    Of micro-batches that make `train.tokens_per_step` the fastest that fits, or the largest where nothing was timed.
    """
    config = with_dtype_of_card(config, machine)
    tried = [
        (one, make_plan(one, shape, machine, world=world))
        for one in micro_batches(config, seq_len=row_length(config, shape), world=world)
    ]
    chosen = _choose([plan for _, plan in tried])
    return next((one, plan) for one, plan in tried if plan is chosen)


def make_plan(config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int = 1) -> Plan:
    """The fastest candidate that fits, or, if none does, the one that comes nearest, with `fits` False.

    Raises UserError for wishes that cannot be combined on this machine.
    """
    engine = engine_of(config, world=world)
    refuse_impossible(config, machine, engine=engine, world=world)
    if engine == "tiered":
        plans = _tiered_plans(config, shape, machine)
    else:
        plans = [
            _laid_out(config, shape, machine, engine=engine, placement=placement, sizes=None, world=world)
            for placement in _wanted(config, machine, engine=engine)
        ]
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


def _slower(step: float, chosen: float) -> str:
    """Why a plan with such a step was not chosen."""
    if step >= 1.01 * chosen:
        return f"fits, but a step takes {format_seconds(step)}, {step / chosen - 1:.0%} longer"
    return f"fits, but a step takes {format_seconds(step)}, which gains less than {_ALIKE - 1:.0%}, and it moves more"


def _choose(plans: Sequence[Plan]) -> Plan:
    """The fastest that fits; the first, where not all could be timed; the nearest to fitting, if none does.

    Forecasts are not that exact: the first within `_ALIKE` of the fastest is taken, since it moves least.
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


def _tiered_plans(config: TrainConfig, shape: ModelShape, machine: MachineProfile) -> list[Plan]:
    """Everything on the GPU, where that is left open; then weights on the device, in RAM, on drives, and gradients too.

    Each with as much of the optimizer state on the GPU as fits, then in RAM, unless that is given.
    """
    trained = sum(unit.trained for unit in units_of(shape))
    plans = []
    for placement, gradients in _tiered_candidates(config, machine):
        sizes = tier_sizes(config, placement, machine, gradients=gradients)

        def needs(sizes: TierSizes, placement: Placement = placement) -> dict[str, int]:
            items = _tiered_items(config, shape, machine, placement, sizes)
            return {tier: sum(item.bytes for item in items if item.tier == tier) for tier in ("gpu", "ram")}

        if placement.optimizer != "gpu":
            sizes = shares_that_fit(config.placement, sizes, machine, trained=trained, needs=needs)
        if sizes.gpu_fraction == 1:
            placement, sizes = replace(placement, optimizer="gpu"), replace(sizes, gradients="gpu")
        plan = _laid_out(config, shape, machine, engine="tiered", placement=placement, sizes=sizes, world=1)
        if plan not in plans:  # all on the GPU comes twice where it fits
            plans.append(plan)
    return plans


def _leaves_shares_open(config: TrainConfig) -> bool:
    place = config.placement
    return (place.optimizer, place.gpu_fraction, place.ram_fraction) == ("auto",) * 3


def _tiered_candidates(config: TrainConfig, machine: MachineProfile) -> list[tuple[Placement, GradientHome]]:
    """Homes of weights and gradients, from the fastest to the roomiest.

    Sums of several micro-batches are best kept where they are added, on the GPU.
    """
    place = config.placement
    if place.params != "auto":
        params: list[Tier] = [place.params]
    elif machine.gpu is None:
        params = ["gpu", "nvme"]  # the device's memory is RAM already
    else:
        params = ["gpu", "cpu", "nvme"]
    candidates: list[tuple[Placement, GradientHome]] = []
    if machine.gpu is not None and not machine.no_state_on_gpu and params[0] == "gpu" and _leaves_shares_open(config):
        candidates.append((Placement("gpu", "gpu"), "gpu"))
    for home in params:
        placement = Placement(home, "cpu" if place.optimizer == "auto" else place.optimizer)
        if place.gradients != "auto":
            candidates.append((placement, place.gradients))
        else:
            if machine.gpu is not None and config.train.accumulate > 1:
                candidates.append((placement, "gpu"))
            candidates.append((placement, "cpu"))
            if home == "nvme":
                candidates.append((placement, "nvme"))
    return [c for c in candidates if place.nvme or "nvme" not in (c[0].params, c[1])]


def refuse_impossible(config: TrainConfig, machine: MachineProfile, *, engine: str, world: int) -> None:
    """Combinations that only this machine, or the launcher's number of ranks, makes impossible."""
    if world > 1 and engine == "tiered":
        raise UserError(f"--engine tiered trains with one rank, and {world} were started; use --engine deepspeed")
    refuse_card(machine, dtype=config.model.dtype)
    for wish, package in _needed_packages(config, engine=engine, world=world):
        if machine.lacks(package):
            raise UserError(lacks(wish, package))
    if engine != "tiered" and (ignored := wishes_of_tiered(config, engine)):
        raise UserError("; ".join(ignored))
    on_gpu = config.placement.gpu_fraction not in ("auto", 0) or config.placement.optimizer == "gpu"
    if engine == "tiered" and on_gpu and machine.no_state_on_gpu:
        raise UserError(f"no optimizer state can live on this GPU: {machine.no_state_on_gpu}; use --gpu-fraction 0")
    if machine.gpu is None and config.model.dtype == "fp16" and engine == "deepspeed":
        raise UserError(
            "--dtype fp16 without a GPU: DeepSpeed's CPU accelerator has no fp16; use --dtype bf16, or --engine tiered"
        )


def _needed_packages(config: TrainConfig, *, engine: str, world: int) -> list[tuple[str, str]]:
    """(wish, package) of what is not part of every installation."""
    stock = engine == "deepspeed"
    wishes = [
        (stock, f"--gpus {world}" if config.placement.engine == "auto" else f"--engine {engine}", "deepspeed"),
        (stock and config.optim.states == "8bit", "optim.states=8bit with --engine deepspeed", "bitsandbytes"),
        (config.tiered.io == "async_io", "tiered.io=async_io", "deepspeed"),
    ]
    return [(wish, package) for there, wish, package in wishes if there]


def _wanted(config: TrainConfig, machine: MachineProfile, *, engine: str) -> list[Placement]:
    if engine == "plain":
        return [Placement("gpu", "gpu")]
    params, optimizer = config.placement.params, config.placement.optimizer
    if config.optim.states == "8bit":
        optimizer = "gpu"
    if params != "auto" and optimizer != "auto":
        return [Placement(params, optimizer)]
    found = [
        candidate
        for candidate in _CANDIDATES
        if params in ("auto", candidate.params)
        and optimizer in ("auto", candidate.optimizer)
        and (config.placement.nvme or "nvme" not in (candidate.params, candidate.optimizer))
        # Without a GPU "gpu" is host memory: an optimizer there would be DeepSpeed's slower path to the same place.
        and (machine.gpu is not None or candidate.optimizer != "gpu" or optimizer == "gpu")
    ]
    # A wish for one home that no candidate has (weights off the GPU, optimizer on it): take it at its word.
    fallback = Placement("gpu" if params == "auto" else params, "cpu" if optimizer == "auto" else optimizer)
    return found or [fallback]


def _laid_out(
    config: TrainConfig,
    shape: ModelShape,
    machine: MachineProfile,
    *,
    engine: str,
    placement: Placement,
    sizes: TierSizes | None,
    world: int,
) -> Plan:
    """The plan of one candidate. `sizes` are the tiered engine's; DeepSpeed's are worked out here."""
    device = "ram" if machine.gpu is None else "gpu"
    drive = machine.drives[0].directory if machine.drives else None
    seq_len = row_length(config, shape)
    checkpointing = wants_checkpointing(config.model, shape)
    zero = None
    if engine == "plain":
        items = plain_items(config, shape, device=device, checkpointing=checkpointing, seq_len=seq_len)
    elif sizes is not None:
        items = _tiered_items(config, shape, machine, placement, sizes)
    else:
        zero = zero_sizes(shape, config.deepspeed, placement, world=world, item_bytes=item_bytes(config.model.dtype))
        items = deepspeed_items(
            config,
            shape,
            placement,
            zero,
            device=device,
            drive=drive,
            world=world,
            checkpointing=checkpointing,
            seq_len=seq_len,
        )
    items += saved_items(config, shape, output=machine.output.directory)
    directories = [one.directory for one in machine.drives]
    if engine == "plain":
        traffic: list[Traffic] = []
    elif isinstance(sizes, TierSizes):
        away = checkpointing and config.model.offload_activations
        inputs = kept_inputs(config, shape, seq_len=seq_len) if away else None
        traffic = tiered_traffic(config, shape, placement, sizes, drives=directories, inputs=inputs)
    else:
        traffic = deepspeed_traffic(config, shape, placement, drive=drive)
    tokens = config.train.micro_batch * config.train.accumulate * world * seq_len
    return Plan(
        engine=engine,
        placement=placement,
        sizes=sizes or zero,
        checkpointing=checkpointing,
        seq_len=seq_len,
        micro_batch=config.train.micro_batch,
        tokens_per_step=tokens,
        world=world,
        items=tuple(items),
        tiers=_tiers(items, machine, world=world),
        traffic=tuple(traffic),
        forecast=forecast(
            config,
            shape,
            machine,
            traffic,
            engine=engine,
            optimizer=placement.optimizer,
            gpu_fraction=sizes.gpu_fraction if sizes else 0.0,
            checkpointing=checkpointing,
            tokens=tokens,
            seq_len=seq_len,
            world=world,
            stretch=drive_stretch(shape, config.deepspeed, zero) if zero else 1.0,
            added=bytes_of_additions(config, shape, placement, sizes) if isinstance(sizes, TierSizes) else 0,
        ),
        rejected=(),
        notes=_notes(config, placement, traffic, engine=engine, machine=machine, checkpointing=checkpointing),
    )


def _tiered_items(
    config: TrainConfig, shape: ModelShape, machine: MachineProfile, placement: Placement, sizes: TierSizes
) -> list[Item]:
    return tiered_items(
        config,
        shape,
        placement,
        sizes,
        device="ram" if machine.gpu is None else "gpu",
        drives=[one.directory for one in machine.drives],
        checkpointing=wants_checkpointing(config.model, shape),
        seq_len=row_length(config, shape),
    )


def _tiers(items: list[Item], machine: MachineProfile, *, world: int) -> dict[str, dict[str, int]]:
    """Needed and available bytes of each; of a filesystem with several of the directories, what the others leave."""
    have = {"gpu": machine.gpu_bytes * world, "ram": machine.ram_bytes}
    drives = {drive.directory: drive for drive in (machine.output, *machine.drives)}
    have |= {directory: drive.free_bytes for directory, drive in drives.items()}
    need = {tier: sum(item.bytes for item in items if item.tier == tier) for tier in have}
    for directory, drive in drives.items():
        if drive.device is not None:
            others = [o for o, other in drives.items() if other.device == drive.device and o != directory]
            have[directory] = max(0, have[directory] - sum(need[other] for other in others))
    return {tier: {"need": need[tier], "have": have[tier]} for tier in have}


def _notes(
    config: TrainConfig,
    placement: Placement,
    traffic: Sequence[Traffic],
    *,
    engine: str,
    machine: MachineProfile,
    checkpointing: bool,
) -> tuple[str, ...]:
    notes = list(machine.notes)
    for drive in machine.drives:
        written = sum(moved.written for moved in traffic if moved.place == drive.directory)
        if written and drive.endurance_bytes:
            steps, rated = format_count(drive.endurance_bytes / written), format_bytes(drive.endurance_bytes)
            notes.append(f"{drive.directory} is rated for {rated}: {steps} steps of {format_bytes(written)} written")
        elif written:
            notes.append(f"a step writes {format_bytes(written)} to {drive.directory}")
    if machine.gpu is not None and not has_bf16(machine) and config.model.dtype == "fp16":
        notes.append(f"{machine.gpu} has no bf16 units: fp16, with dynamic loss scaling")
    dtype, timed = config.model.dtype, machine.rates.matmul
    if machine.gpu is not None and timed and dtype not in timed:
        as_fast = stands_for(dtype, machine)
        guess = f"they are taken to be as fast as {as_fast}" if as_fast else "no second of a step is known"
        notes.append(f"products in {dtype} were not timed on {machine.gpu}, and {guess}: `offload-train bench` does it")
    if config.model.offload_activations and not checkpointing:
        notes.append(
            f"model.offload_activations={config.model.offload_activations} moves nothing: gradient checkpointing is "
            "off for a model of this size (model.checkpointing=on)"
        )
    if machine.gpu is None:
        notes.append("no GPU here: the CPU computes, and its memory is RAM")
    if engine == "deepspeed":
        notes.append(
            "what DeepSpeed copies beyond its buffers is from peaks seen on a CPU, not worked out (predictions.md)"
        )
    if machine.no_state_on_gpu and engine == "tiered":
        notes.append(f"no optimizer state can live on this GPU: {machine.no_state_on_gpu}")
    if config.save.every == 0 and engine == "deepspeed":
        notes.append(
            "no checkpoints (--save-every 0): a run that is killed starts again; weights are exported at the end"
        )
    if config.optim.name == "lion":
        betas = " and ".join(f"{beta:g}" for beta in config.optim.betas)
        notes.append(f"the update is Lion's, with betas {betas} (optim.betas) and one moment a parameter")
    return tuple(notes)
