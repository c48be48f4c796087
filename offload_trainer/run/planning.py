"""Plan a run on this machine: probe it, size the model on the meta device, and choose settings that fit.

    TrainConfig ── machine_here, resolve_model ──> MachineProfile, ModelSource ── planned ──> Planned

No weights are loaded. This module supplies the inputs of `plan/planner.py` and keeps choices of the run that is being
resumed. If a configuration does not fit, it tries fewer weight buffers, and looks for changes with which it would.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import read_back
from offload_trainer.common.units import format_bytes
from offload_trainer.config import PlacementSection, SaveSection, TrainConfig
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.memory import with_rate
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import any_placement_fits, divisions, make_plan, resolved
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiers import GPU_NAME
from offload_trainer.run.process_setup import ranks_of_environment
from offload_trainer.settings import with_words

_MOST_MOVES, _MOST_FITTING = 3, 2  # changes of a plan that does not fit: at a time, and sets of them that are named


@dataclass(frozen=True)
class Planned:
    """Configuration, plan, machine and model of a run that has not started."""

    config: TrainConfig  # `auto` values replaced by the plan's choices
    plan: Plan
    machine: MachineProfile
    source: Any  # ModelSource

    @property
    def output(self) -> Path:
        """The run directory."""
        return Path(self.config.save.output)

    @property
    def identity(self) -> dict[str, Any]:
        """The part of the run's identity that is known without the data. Resuming requires an equal one."""
        return {
            "seed": self.config.train.seed,
            "seq_len": self.plan.work.seq_len,
            "shuffle": self.config.data.shuffle,
            **self.source.identity,
        }

    @property
    def layout(self) -> dict[str, Any]:
        """Each weight's shape and whether it is trained, by name. Resuming requires an equal one."""
        weights = self.source.shape.weights
        return {weight.name: {"shape": list(weight.shape), "trained": weight.trainable} for weight in weights}


def plan_run(
    config: TrainConfig, *, nodes: int = 1, again: Planned | None = None, like: TrainConfig | None = None
) -> Planned:
    """Plan a run on this machine, or on `nodes` machines like it.

    `again`: an earlier plan of `config`, whose machine, perhaps with new rates, and model are used. `like`: the
    settings of a run that this one continues without a checkpoint.
    """
    from offload_trainer.run.resume import earlier_run

    before, from_pages = earlier_run(config.save)
    before = before or (like.model_dump(mode="json") if like else {})
    if config.data.template_date == "auto":
        try:
            day = date.fromisoformat(before["data"]["template_date"])
        except (KeyError, TypeError, ValueError):  # a new run, or one that was imported
            day = date.today()
        config = config.with_keys("data", template_date=day.isoformat())
    machine = again.machine if again else machine_here(config.placement, config.save)
    if from_pages and nodes == 1:
        config, machine = as_page_files(config, machine)
    world = max(ranks_of_environment()[1], config.placement.gpus)
    if world == 1:  # `auto` has no other choice, and a single rank takes models that no pipeline does
        (config,) = divisions(config, world=1)
    source = again.source if again else model_of(config)
    kept = _with_resumed_choices(config, before, on_gpu=machine.gpu is not None)
    found = planned(kept, source, machine, world=world, nodes=nodes)
    if kept is not config and not found.plan.fits:
        found = planned(config, source, machine, world=world, nodes=nodes)
    if not found.plan.fits:
        found = with_what_fits(found, config, here=True, resumes=bool(before))
    return found


def plan_with_room(config: TrainConfig, before: Planned, *, more: int) -> tuple[Planned, list[str]]:
    """Plan a run again that filled the GPU, to need `more` bytes less of it than what its plan left free.

    Return the plan and, in words, each item on the GPU that is now smaller.
    """
    room = before.plan.tiers[GPU_NAME]
    spare = max(0, room["have"] - room["need"])
    machine = replace(before.machine, kept_free=before.machine.kept_free + spare + more)
    found = plan_run(config, again=replace(before, machine=machine), like=before.config)
    had, has = (
        {item.name: item.bytes for item in plan.items if item.tier == GPU_NAME} for plan in (before.plan, found.plan)
    )
    smaller = {name: (size, has.get(name, 0)) for name, size in had.items() if has.get(name, 0) < size}
    return found, [f"{name} {format_bytes(old)} -> {format_bytes(new)}" for name, (old, new) in smaller.items()]


def shared_plan(own: Planned) -> Planned:
    """Return rank 0's plan on every rank, with the model and the drives of each rank's `own`. Collective."""
    from offload_trainer.ranks import from_rank_zero

    bare = replace(own.plan.work, shape=ModelShape((), 0, 0, 0, 0))  # every rank has read the model
    told = json.dumps(own.config.model_dump(exclude_unset=True)), replace(own.plan, work=bare), own.machine
    words, plan, machine = from_rank_zero(lambda: told, tuple[str, Plan, MachineProfile])
    config = TrainConfig.model_validate_json(words)
    plan = replace(plan, work=replace(plan.work, shape=with_rate(own.source.shape, plan.work.seq_len)))
    return Planned(config.with_keys("placement", nvme=own.config.placement.nvme), plan, machine, own.source)


def machine_here(place: PlacementSection, save: SaveSection | None = None) -> MachineProfile:
    """Return the profile of this machine with its cached rates. `save`: None for this directory as the output.

    Bytes that such a run will remove count as free: page files of dead runs, and checkpoints if it saves others.
    """
    from offload_trainer.machine.probe import probe_machine
    from offload_trainer.machine.rate_cache import with_cached_rates
    from offload_trainer.storage.atomic_io import bytes_below
    from offload_trainer.storage.retention import bytes_that_go
    from offload_trainer.storage.scratch_dir import PAGES, dead_runs

    machine = with_cached_rates(probe_machine(place, output=save.output if save else "."))
    saved = Path(machine.output.directory) / "checkpoints"
    goes = {machine.output.directory: bytes_that_go(saved) if save is None or save.every != 0 else 0}
    listed = Path(machine.output.directory) / PAGES
    for drive in machine.drives:
        dead = sum(map(bytes_below, dead_runs(Path(drive.directory), listed=listed)))
        goes[drive.directory] = goes.get(drive.directory, 0) + dead
    devices = {drive.directory: drive.device for drive in (machine.output, *machine.drives)}

    def freed(drive: DriveFacts) -> DriveFacts:
        shared = [d for d, device in devices.items() if d == drive.directory or device == drive.device is not None]
        return replace(drive, free_bytes=drive.free_bytes + sum(goes[directory] for directory in shared))

    return replace(machine, output=freed(machine.output), drives=tuple(map(freed, machine.drives)))


def model_of(config: TrainConfig) -> Any:
    """Return the ModelSource of a configuration. Raises UserError if this command cannot train it."""
    from offload_trainer.model.images import refuse_other_losses
    from offload_trainer.model.loader import resolve_model

    if (base := config.model.base) != "model":
        raise UserError(
            f"model.base={base} is for adapters, which this command does not train: use the library "
            f"(docs/library.md), ot.load(..., freeze=['.'], base={base!r}), or leave it out"
        )
    source = resolve_model(config.model, seed=config.train.seed, packed=config.data.packing == "on")
    if not source.shape.trainable:
        raise UserError("model.freeze leaves nothing to train")
    refuse_other_losses(source.config)
    one, order = config.train.gradient_accumulation_steps == 1, config.tiered.micro_batch_order
    at_home, pipeline = config.placement.params == "gpu" and order == "auto", config.parallel.pipeline != 1
    if not pipeline and (one or at_home or order == "depth_first" or config.placement.engine_name != "tiered"):
        return source  # it does not matter whether micro-batches can pass through its blocks together
    from offload_trainer.model.breadth_first import why_no_chain

    return replace(source, shape=replace(source.shape, no_chain=why_no_chain(source.meta(), pipeline=pipeline)))


def planned(
    config: TrainConfig, source: Any, machine: MachineProfile, *, world: int, nodes: int = 1, saves: bool = True
) -> Planned:
    """Plan `config`; if the device lacks memory, plan with the most weight buffers that fit. `source` has a shape.

    If none fit, return the first plan, or that of one buffer if one unit of weights alone exceeds device memory.
    `saves`: as in `make_plan`.
    """

    def plan_of(candidate: TrainConfig) -> Planned:
        plan = make_plan(candidate, source.shape, machine, world=world, nodes=nodes, saves=saves)
        return Planned(resolved(candidate, plan), plan, machine, source)

    first = found = plan_of(config)
    room, is_set = first.plan.tiers[machine.device], "weight_buffers" in config.tiered.model_fields_set
    if first.plan.engine == "deepspeed" or is_set or room["need"] <= room["have"]:
        return first
    for count in range(config.tiered.weight_buffers - 1, 0, -1):
        found = plan_of(config.with_keys("tiered", weight_buffers=count))
        if found.plan.fits:
            return found
    return found if first.plan.too_large else first


def with_what_fits(found: Planned, config: TrainConfig, *, here: bool, resumes: bool = False) -> Planned:
    """Return a plan that does not fit with up to `_MOST_FITTING` sets of words for the command that make it fit.

    Each set has the fewest changes that are enough. `here`: the plan is for this machine, which may have a drive.
    `resumes`: the run resumes another, whose rows keep their length.
    """
    world, nodes = found.plan.work.world, found.plan.work.nodes
    moves = [words for words in _moves(found, config, here=here) if not (resumes and words.startswith("--seq-len"))]

    def fits(words: str, *, contradicts: bool = False) -> bool:
        try:
            candidate, machine = with_words(config, words), found.machine
            if candidate.placement.nvme != config.placement.nvme:
                machine = machine_here(candidate.placement, config.save)
            if any_placement_fits(candidate, found.source.shape, machine, world=world, nodes=nodes):
                return planned(candidate, found.source, machine, world=world, nodes=nodes).plan.fits
        except UserError:  # contradicts the configuration, or a length that does not divide a step's tokens
            return contradicts
        return False

    # All together, with the shorter of two row lengths. Smaller micro-batches, or a drive, may need more other memory.
    together = {words.split()[0]: words for words in moves}
    without = ((), ("--micro-batch",), ("--nvme",), ("--micro-batch", "--nvme"))
    most = (" ".join(words for name, words in together.items() if name not in left) for left in without)
    counts = range(1, _MOST_MOVES + 1) if any(fits(words, contradicts=True) for words in dict.fromkeys(most)) else ()
    sets = (map(" ".join, combinations(moves, count)) for count in counts)
    enough = (tuple(islice(filter(fits, words), _MOST_FITTING)) for words in sets)
    return replace(found, plan=replace(found.plan, fits_with=next(filter(None, enough), ())))


def _moves(found: Planned, config: TrainConfig, *, here: bool) -> Iterator[str]:
    """Yield the words of each change that can help, the least costly first."""
    plan, place, train, save = found.plan, config.placement, config.train, config.save
    output = found.machine.output.directory
    lacking = {tier for tier, room in plan.tiers.items() if room["need"] > room["have"]}
    if output in lacking:  # its checkpoints are the cause
        if save.keep > 1:
            yield "save.keep=1"
        yield "--save-every 0"
    if lacking == {output}:
        return
    homes = {"params": "--params ", "optimizer": "--optimizer ", "gradients": "placement.gradients="}
    homes |= {"gpu_fraction": "--gpu-fraction ", "ram_fraction": "--ram-fraction "}
    if fixed := [f"{flag}auto" for name, flag in homes.items() if getattr(place, name) != "auto"]:
        yield " ".join(fixed)
    if here and not place.nvme:
        with suppress(UserError):  # this directory cannot hold pages
            machine_here(place.model_copy(update={"nvme": (".",)}), save)
            yield "--nvme ."
    if config.optim.moment_dtype != "8bit":
        yield "optim.moment_dtype=8bit"
    allowed = plan.engine == "tiered" and config.optim.name == "adamw" and found.config.model.dtype == "bf16"
    if allowed and config.optim.master_dtype == "fp32":
        yield "optim.master_dtype=bf16"
    rows = train.micro_batch_size
    if rows > 1:
        yield f"--micro-batch 1 --accumulate {rows * train.gradient_accumulation_steps}"
    for tokens in filter(None, (plan.work.seq_len // 2, plan.work.seq_len // 8)):
        yield f"--seq-len {tokens}"
    if config.model.dtype == "fp32":
        yield "--dtype bf16"


def as_page_files(config: TrainConfig, machine: MachineProfile) -> tuple[TrainConfig, MachineProfile]:
    """Return both with the copies of the state, and the rates of the drives, that the run's existing page files have.

    With other ones pages would be distributed in another way, and the files could not be resumed from.
    """
    if config.placement.engine_name != "tiered":
        return config, machine
    if config.tiered.state_copies == "auto":
        config = config.with_keys("tiered", state_copies=2)
    if len(machine.drives) > 1:
        with suppress(UserError):
            before = read_back(Path(config.save.output) / "machine.json", MachineProfile, fix="")
            rates = {drive.directory: drive.rates for drive in before.drives}
            drives = (replace(drive, rates=rates.get(drive.directory, drive.rates)) for drive in machine.drives)
            machine = replace(machine, drives=tuple(drives))
    return config, machine


def _with_resumed_choices(config: TrainConfig, before: Mapping[str, Mapping[str, Any]], *, on_gpu: bool) -> TrainConfig:
    """Return the configuration with the checkpointed blocks of the run that it resumes, if they affect its bits.

    On a CPU a recomputed block has the bits of one that is not. A pipeline recomputes all blocks. `before`: the
    configuration of the run to resume, or empty.
    """
    model, recomputed = config.model, before.get("model", {}).get("activation_checkpointing")
    if config.placement.engine_name == "deepspeed" or model.activation_checkpointing != "auto" or not on_gpu:
        return config
    usable = recomputed == "on" or (type(recomputed) is int and recomputed > 0)
    usable = usable or (recomputed == "off" and not model.offload_activations)
    if not usable or config.parallel.pipeline not in (1, "auto"):
        return config
    return config.with_keys("model", activation_checkpointing=recomputed)
