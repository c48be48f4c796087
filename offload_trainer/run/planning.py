"""Plan a run on this machine: probe it, size the model on the meta device, and choose settings that fit.

No weights are loaded. The planner itself is `plan/planner.py`; this module supplies its inputs, keeps choices of the
run that is being resumed, and tries the fallbacks of `memory_fallbacks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload_trainer.config import TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.plan.defaults import micro_batches, row_length
from offload_trainer.plan.engines import engine_of
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import longest_row, resolve_and_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.memory_fallbacks import MemoryFallbacks, lacks_room, may_tile
from offload_trainer.run.process_setup import ranks_of_environment


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


def plan_run(config: TrainConfig, *, nodes: int = 1, longest: bool = False) -> Planned:
    """Plan a run on this machine, or on `nodes` machines like it.

    `longest`: also find the longest row (in tokens) that fits.
    """
    from offload_trainer.model.loader import resolve_model

    config = _with_resumed_copies(config, nodes=nodes)
    machine = machine_here(config.placement.nvme, output=config.save.output)
    source = resolve_model(
        config.model,
        seed=config.train.seed,
        packed=config.data.packing == "on",
        pieces=config.parallel.sequence > 1,
    )
    refuse_nothing_trained(source.shape)
    models = MemoryFallbacks(lambda: source)
    _, world = ranks_of_environment()
    world = max(world, config.placement.gpus)
    found = _with_resumed_choices(config, models, machine, world=world, nodes=nodes)
    if found is None:
        found = planned(config, models, machine, world=world, nodes=nodes)
    return with_longest_row(found, config, models) if longest else found


def _with_resumed_choices(
    config: TrainConfig, models: MemoryFallbacks, machine: MachineProfile, *, world: int, nodes: int
) -> Planned | None:
    """Plan with the micro-batch size, MLP chunk and fetch granularity of the run that this one resumes.

    Other choices would change the results bit for bit. Returns None if none of them is left open, if there is no run
    to resume, or if its choices no longer fit.
    """
    from offload_trainer.run.resume_point import config_to_resume

    model, train, tiered = config.model, config.train, config.tiered
    fetch_open = tiered.fetch_granularity == "auto" and engine_of(config).name == "tiered"
    left_open = model.mlp_chunk == "auto" or train.tokens_per_step != "auto" or fetch_open
    if engine_of(config).name == "deepspeed" or not left_open:
        return None
    before = config_to_resume(config.save)
    if fetch_open and before.get("tiered", {}).get("fetch_granularity") == "module":  # decides the layout of page files
        count = (
            tiered.weight_buffers if "weight_buffers" in tiered.model_fields_set else before["tiered"]["weight_buffers"]
        )
        tiered = tiered.model_copy(update={"fetch_granularity": "module", "weight_buffers": count})
    chunk = before.get("model", {}).get("mlp_chunk")
    if model.mlp_chunk == "auto" and (chunk == "off" or (type(chunk) is int and chunk > 0)):
        model = model.model_copy(update={"mlp_chunk": chunk})
    rows = max(1, world // config.parallel.sequence)
    for one in micro_batches(train, seq_len=row_length(config.data.seq_len, models.source.shape), world=rows):
        if one.micro_batch_size == before.get("train", {}).get("micro_batch_size"):
            train = one
    kept = config.model_copy(update={"model": model, "train": train, "tiered": tiered})
    if kept == config or (isinstance(model.mlp_chunk, int) and not models.tiled.shape.tiles):
        return None
    found = planned(kept, models, machine, world=world, nodes=nodes)
    return found if found.plan.fits else None


def planned(
    config: TrainConfig, models: MemoryFallbacks, machine: MachineProfile, *, world: int, nodes: int = 1
) -> Planned:
    """Plan `config`; if the device lacks memory, plan the first fallback that fits.

    If none fits, return the first plan, or the smallest fallback if one unit of weights alone exceeds device memory.
    """

    def plan_of(wish: TrainConfig, of: Any) -> Planned:
        settled, plan = resolve_and_plan(wish, of.shape, machine, world=world, nodes=nodes)
        return Planned(settled, plan, machine, of)

    first = plan_of(config, models.as_wished(config))
    if not lacks_room(first.plan, machine):
        return first
    for wish, of in models.that_fit(config, machine, world=world, nodes=nodes):
        found = plan_of(wish, of)
        if found.plan.fits:
            return found
    return plan_of(*models.least(config)) if first.plan.too_large else first


def with_longest_row(found: Planned, config: TrainConfig, models: MemoryFallbacks) -> Planned:
    """Return `found` with the longest row that fits in its plan, also with chunked MLPs if `config` allows them."""
    plan, model = found.plan, found.config.model.model_copy(update={"mlp_chunk": config.model.mlp_chunk})
    wish = found.config.model_copy(update={"model": model})

    def longest(source: Any) -> int:
        return longest_row(wish, source.shape, found.machine, world=plan.world, nodes=plan.nodes)

    tokens = longest(found.source)
    if tokens < found.source.shape.context and may_tile(config):
        tokens = longest(models.as_wished(wish, pieces=True))
    return replace(found, plan=replace(plan, longest_row=tokens))


def _with_resumed_copies(config: TrainConfig, *, nodes: int) -> TrainConfig:
    """Return the configuration with the number of state copies that the run's existing page files have.

    Without this, `state_copies=auto` could choose 1, and the page files could not be resumed from.
    """
    from offload_trainer.offloading.pages.manifest import read_description
    from offload_trainer.storage.scratch_dir import PAGES, folders_in

    section = config.tiered
    if section.state_copies != "auto" or section.master_format == "split" or config.save.resume != "auto":
        return config
    if nodes > 1 or engine_of(config).name != "tiered":
        return config
    try:
        folders = folders_in(Path(config.save.output) / PAGES)
        told = read_description(folders[0]) if folders else None
    except (OSError, ValueError, UserError):  # the later check of the page files reports this
        return config
    if told is None or told.places == 1:
        return config
    return config.model_copy(update={"tiered": section.model_copy(update={"state_copies": told.places})})


def machine_here(drives: tuple[str, ...], *, output: str = ".") -> MachineProfile:
    """Return the profile of this machine with its cached rates.

    Space of files that a run with this `output` will remove counts as free.
    """
    from offload_trainer.machine.probe import probe_machine
    from offload_trainer.machine.rate_cache import with_cached_rates

    return _with_what_goes(with_cached_rates(probe_machine(drives=drives, output=output)))


def _with_what_goes(machine: MachineProfile) -> MachineProfile:
    """Return the machine with the bytes of prunable checkpoints and of dead runs' page files counted as free.

    Files that this user's run cannot remove do not count.
    """
    from offload_trainer.retention import bytes_that_go
    from offload_trainer.storage.atomic_io import bytes_below
    from offload_trainer.storage.scratch_dir import PAGES, dead_runs

    goes = {machine.output.directory: bytes_that_go(Path(machine.output.directory) / "checkpoints")}
    listed = Path(machine.output.directory) / PAGES
    for drive in machine.drives:
        dead = sum(map(bytes_below, dead_runs(Path(drive.directory), listed=listed)))
        goes[drive.directory] = goes.get(drive.directory, 0) + dead
    devices = {drive.directory: drive.device for drive in (machine.output, *machine.drives)}

    def freed(drive: DriveFacts) -> DriveFacts:
        shared = [d for d, device in devices.items() if d == drive.directory or device == drive.device is not None]
        return replace(drive, free_bytes=drive.free_bytes + sum(goes[directory] for directory in shared))

    return replace(machine, output=freed(machine.output), drives=tuple(map(freed, machine.drives)))


def refuse_nothing_trained(shape: ModelShape) -> None:
    """Raise UserError if model.freeze freezes every weight. Adapter training needs the library, not this command."""
    if not shape.trainable:
        raise UserError("model.freeze leaves nothing to train")
