"""From a wish to its plan: the machine as it is or as a file describes it, the model counted, nothing loaded.

A preset on a described machine needs no torch; everything else counts on transformers' model without memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from offload_trainer.config import ModelSection, ParallelSection, TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.model.presets import preset_shape
from offload_trainer.plan.auto import row_length
from offload_trainer.plan.batches import micro_batches
from offload_trainer.plan.card import refuse_card, with_dtype_of_card
from offload_trainer.plan.choose import engine_of, make_plan, settle_and_plan, workload
from offload_trainer.plan.divided import is_divided, undivided
from offload_trainer.plan.longest import longest_row, some_homes_fit
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.plan.parallel_table import Comparison, compare
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.sizes import Layouts
from offload_trainer.plan.workload import item_bytes
from offload_trainer.run.launch import ranks_of_environment

_MOST_NODES = 1024
_MICRO = (16, 4, 1)  # rows of a micro-batch that the tiered engine is compared with, the first of them that fits


@dataclass(frozen=True)
class Planned:
    """A run before anything of it is there."""

    config: TrainConfig  # with nothing left open that the plan decides
    plan: Plan
    machine: MachineProfile
    source: Any  # ModelSource

    @property
    def output(self) -> Path:
        """The run directory."""
        return Path(self.config.save.output)


def plan_run(config: TrainConfig, *, nodes: int = 1, longest: bool = False) -> Planned:
    """The plan of a run here, and on as many machines more as there are other nodes.

    `longest`: with the longest row that fits.
    """
    from offload_trainer.model.source import resolve_model

    config = _as_left(config, nodes=nodes)
    machine = machine_here(config.placement.nvme, output=config.save.output)
    source = resolve_model(
        config.model,
        seed=config.train.seed,
        packed=config.data.packing == "on",
        pieces=config.parallel.sequence > 1,
    )
    _refuse_nothing_trained(source.shape)
    _, world = ranks_of_environment()
    world = max(world, config.placement.gpus)
    planned = _as_before(config, source, machine, world=world, nodes=nodes)
    if planned is None:
        planned = _planned(config, source, machine, world=world, nodes=nodes)
    return _with_longest_row(planned, config) if longest else planned


def _as_before(config: TrainConfig, source: Any, machine: MachineProfile, *, world: int, nodes: int) -> Planned | None:
    """With the micro-batches and pieces that were chosen for the run that this one goes on from, since its bits are
    theirs. None where neither is left open, there is no such run, or it would not fit any more.
    """
    from offload_trainer.run.left import made_with

    model, train, tiered = config.model, config.train, config.tiered
    fetch_open = tiered.fetch == "auto" and engine_of(config).name == "tiered"
    left_open = model.mlp_chunk == "auto" or train.tokens_per_step != "auto" or fetch_open
    if engine_of(config).name == "deepspeed" or not left_open:
        return None
    before = made_with(config.save)
    if fetch_open and before.get("tiered", {}).get("fetch") == "module":  # page files are laid out by it
        count = tiered.unit_buffers if "unit_buffers" in tiered.model_fields_set else before["tiered"]["unit_buffers"]
        tiered = tiered.model_copy(update={"fetch": "module", "unit_buffers": count})
    chunk = before.get("model", {}).get("mlp_chunk")
    if model.mlp_chunk == "auto" and (chunk == "off" or (type(chunk) is int and chunk > 0)):
        model = model.model_copy(update={"mlp_chunk": chunk})
    rows = max(1, world // config.parallel.sequence)
    for one in micro_batches(train, seq_len=row_length(config.data.seq_len, source.shape), world=rows):
        if one.micro_batch == before.get("train", {}).get("micro_batch"):
            train = one
    kept = config.model_copy(update={"model": model, "train": train, "tiered": tiered})
    source = as_wished(source, kept)
    if kept == config or (isinstance(model.mlp_chunk, int) and not source.shape.tiles):
        return None
    planned = _planned(kept, source, machine, world=world, nodes=nodes)
    return planned if planned.plan.fits else None


def _planned(config: TrainConfig, source: Any, machine: MachineProfile, *, world: int, nodes: int = 1) -> Planned:
    """As it is wished; where the device has no room for that, the first roomier way that fits."""

    def planned(wish: TrainConfig, of: Any) -> Planned:
        settled, plan = settle_and_plan(wish, of.shape, machine, world=world, nodes=nodes)
        return Planned(settled, plan, machine, of)

    first = planned(config, as_wished(source, config))
    if not _lacks_room(first.plan, machine):
        return first
    for wish, of in _roomier(config, source):
        layouts, fewer = Layouts(of.shape), _with_fewer_buffers(wish)

        def fits(one: TrainConfig, layouts: Layouts = layouts) -> bool:
            return some_homes_fit(one, layouts, machine, world=world, nodes=nodes)

        if fits(fewer[-1]):
            found = planned(next(one for one in fewer if fits(one)), of)
            if found.plan.fits:
                return found
    return planned(fewer[-1], of) if first.plan.too_large else first


def _lacks_room(plan: Plan, machine: MachineProfile) -> bool:
    """Whether what computes has too little, and there are ways that need less."""
    room = plan.tiers[machine.device]
    return plan.engine != "deepspeed" and room["need"] > room["have"]


def _roomier(config: TrainConfig, source: Any) -> Iterator[tuple[TrainConfig, Any]]:
    """Wishes with their model, each with more room on the device than the one before, as far as that is left open.

    MLPs on pieces of a row, blocks' weights by the module: what can be is looked for only here, or where it is asked
    for.
    """
    tiered, tiled = config.tiered, cache(lambda: _tiled(source))
    left_open = engine_of(config).name == "tiered" and tiered.fetch == "auto"
    for fetch in ("auto", "module") if left_open else (tiered.fetch,):
        for pieces in (False, True) if _may_tile(config) else (False,):
            wish = config.model_copy(update={"tiered": tiered.model_copy(update={"fetch": fetch})})
            of = as_wished(tiled() if pieces else source, wish)
            if (of.shape.tiles or not pieces) and (is_divided(of.shape) or fetch == tiered.fetch):
                yield wish, of


def _with_fewer_buffers(wish: TrainConfig) -> list[TrainConfig]:
    """The wish, and with fewer buffers for weights where nothing is said of their number."""
    tiered = wish.tiered
    said = engine_of(wish).name != "tiered" or "unit_buffers" in tiered.model_fields_set
    counts = [tiered.unit_buffers] if said else range(tiered.unit_buffers, 0, -1)
    sections = [tiered.model_copy(update={"unit_buffers": count}) for count in counts]
    return [wish.model_copy(update={"tiered": section}) for section in sections]


def _with_longest_row(planned: Planned, config: TrainConfig) -> Planned:
    """The same, its plan with the longest row that fits, on pieces too where `config` leaves them open."""

    def longest(source: Any) -> int:
        plan = planned.plan
        return longest_row(wish, source.shape, planned.machine, world=plan.world, nodes=plan.nodes)

    model = planned.config.model.model_copy(update={"mlp_chunk": config.model.mlp_chunk})
    wish = planned.config.model_copy(update={"model": model})
    tokens = longest(planned.source)
    if tokens < planned.source.shape.context and _may_tile(config):
        tokens = longest(_tiled(planned.source))
    return replace(planned, plan=replace(planned.plan, longest_row=tokens))


def as_wished(source: Any, config: TrainConfig) -> Any:
    """A ModelSource that knows what runs on pieces of a row, or comes in parts, where the configuration asks for it."""
    source = _tiled(source) if isinstance(config.model.mlp_chunk, int) else source
    if config.tiered.fetch == "module":
        return _in_parts(source)
    return replace(source, shape=undivided(source.shape)) if is_divided(source.shape) else source


def _may_tile(config: TrainConfig) -> bool:
    return config.model.mlp_chunk == "auto" and engine_of(config).name != "deepspeed"


def _tiled(source: Any) -> Any:
    from offload_trainer.model.positionwise import with_tiles

    return source if source.shape.tiles else with_tiles(source)


def _in_parts(source: Any) -> Any:
    from offload_trainer.model.apart import in_parts

    return source if is_divided(source.shape) else in_parts(source)


def _as_left(config: TrainConfig, *, nodes: int) -> TrainConfig:
    """With two places, where nothing is said of that and the run's own page files have them: they are gone on from."""
    from offload_trainer.offloading.page_account import read_description
    from offload_trainer.storage.lease import PAGES, folders_in

    section = config.tiered
    if section.places != "auto" or section.masters == "remainder" or config.save.resume != "auto":
        return config
    if nodes > 1 or engine_of(config).name != "tiered":
        return config
    try:
        folders = folders_in(Path(config.save.output) / PAGES)
        told = read_description(folders[0]) if folders else None
    except (OSError, ValueError, UserError):  # said once they are looked at as a whole
        return config
    if told is None or told.places == 1:
        return config
    return config.model_copy(update={"tiered": section.model_copy(update={"places": told.places})})


def machine_here(drives: tuple[str, ...], *, output: str = ".") -> MachineProfile:
    """This machine, what is known of its speed, and as free also what a run that writes to `output` will remove."""
    from offload_trainer.machine.cache import with_cached_rates
    from offload_trainer.machine.probe import probe_machine

    return _with_what_goes(with_cached_rates(probe_machine(drives=drives, output=output)))


def _with_what_goes(machine: MachineProfile) -> MachineProfile:
    """The machine with the bytes as free that this run's older checkpoints and the page files of dead runs take.

    Only what this user's run will be able to remove.
    """
    from offload_trainer.retention import bytes_that_go
    from offload_trainer.storage.durable import bytes_below
    from offload_trainer.storage.lease import PAGES, dead_runs

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


def plan_elsewhere(config: TrainConfig, machine: MachineProfile) -> Plan:
    """The plan of a run on a machine that is only described."""
    world, shape = config.placement.gpus, _preset(config)
    if shape is None:
        planned = _planned(config, _source_elsewhere(config), machine, world=world)
        return _with_longest_row(planned, config).plan
    settled, plan = settle_and_plan(config, shape, machine, world=world)
    if _lacks_room(plan, machine):
        return _planned(config, _source_elsewhere(config), machine, world=world).plan
    return replace(plan, longest_row=longest_row(settled, shape, machine, world=world, nodes=1))


def plan_cluster(config: TrainConfig, machine: MachineProfile, nodes: str) -> list[Plan]:
    """The plan of a run on each number of machines as described, from least to most: "2", or "1,2,4".

    Each has as many ranks as --gpus says, or the machine has GPUs. UserError for what is no such number.
    """
    counts = nodes.split(",")
    if not all(count.isdigit() and 0 < int(count) <= _MOST_NODES for count in counts):
        raise UserError(f"--nodes {nodes}: whole numbers from 1 to {_MOST_NODES}, such as 2 or 1,2,4")
    gpus = config.placement.gpus if "gpus" in config.placement.model_fields_set else machine.gpus
    shape = _shape_elsewhere(config)
    return [
        settle_and_plan(config, shape, machine, world=gpus * count, nodes=count)[1]
        for count in sorted(set(map(int, counts)))
    ]


def compare_modes(config: TrainConfig, machine: MachineProfile | None, nodes: str | None) -> Comparison:
    """Every way to divide the step over the ranks of `nodes` machines as described; None: over --gpus ranks here.

    UserError where that is one rank, or for what is no number of machines.
    """
    if nodes is not None and not (nodes.isdigit() and 0 < int(nodes) <= _MOST_NODES):
        raise UserError(f"--nodes {nodes}: of --parallel a whole number from 1 to {_MOST_NODES}")
    if machine is None:
        here, gpus = machine_here(config.placement.nvme, output=config.save.output), config.placement.gpus
    else:
        here = machine
        gpus = config.placement.gpus if "gpus" in config.placement.model_fields_set else machine.gpus
    count = here.nodes if nodes is None else int(nodes)
    if gpus * count == 1:
        raise UserError("--parallel compares ways to divide a step over ranks, and there is one: add --gpus N")
    shape, whole = _preset(config), ""
    if shape is None:
        source = as_wished(_source_elsewhere(config), config)
        shape, whole = source.shape, _why_whole(source)
    config = config.model_copy(update={"model": with_dtype_of_card(config.model, here)})
    refuse_card(here, dtype=config.model.dtype)
    layouts = Layouts(shape)

    def ours(tokens: int, sequence: int) -> Plan | str:
        rows, left = divmod(tokens, gpus * count // sequence * row_length(config.data.seq_len, shape))
        if left or not rows:
            return ""
        if sequence > 1 and whole:
            return whole
        wish = config.model_copy(
            update={
                "placement": config.placement.model_copy(update={"engine": "tiered"}),
                "parallel": ParallelSection(sequence=sequence),
            }
        )
        for micro in sorted({math.gcd(rows, most * sequence) for most in _MICRO}, reverse=True):
            train = config.train.model_copy(update={"micro_batch": micro, "accumulate": rows // micro})
            one = wish.model_copy(update={"train": train})
            try:
                plan = make_plan(one, shape, here, world=gpus * count, nodes=count, saves=False, layouts=layouts)
            except UserError as error:
                if sequence == 1:
                    raise
                return str(error)
            if plan.fits:
                break
        return plan

    return compare(workload(config, shape, world=gpus * count, nodes=count, saves=False), here, ours=ours)


def _why_whole(source: Any) -> str:
    """Why ranks cannot share this model's rows; nothing where they can. Presets' have been tried."""
    from offload_trainer.model.initial import meta_model
    from offload_trainer.model.sequence import refuse_pieces

    words = {"trust_remote_code": source.section.trust_remote_code}
    try:
        refuse_pieces(meta_model(source.config, **words), **words)
    except UserError as error:
        return str(error)
    return ""


def _shape_elsewhere(config: TrainConfig) -> ModelShape:
    return _preset(config) or as_wished(_source_elsewhere(config), config).shape


def _preset(config: TrainConfig) -> ModelShape | None:
    """Of a preset as it is, counted without torch."""
    section = config.model
    looked_at = isinstance(section.mlp_chunk, int) or config.tiered.fetch == "module"  # with torch
    changed = section.overrides or section.freeze or section.attention != ModelSection().attention
    changed = changed or config.data.packing == "on" or looked_at
    return None if changed else preset_shape(section.name, item_bytes=item_bytes(section.dtype))


def _source_elsewhere(config: TrainConfig) -> Any:
    from offload_trainer.model.source import resolve_model

    pieces = config.parallel.sequence > 1  # presets have been tried: GPT-2 can be cut
    source = resolve_model(config.model, seed=config.train.seed, packed=config.data.packing == "on", pieces=pieces)
    _refuse_nothing_trained(source.shape)
    return source


def _refuse_nothing_trained(shape: ModelShape) -> None:
    """UserError: adapters, which would be trained beside such a model, are a session's."""
    if not shape.trainable:
        raise UserError("model.freeze leaves nothing to train")


def described(machine: MachineProfile, words: list[str]) -> tuple[MachineProfile, list[str]]:
    """A described machine and the words, with the same drives: all that it has, or those that --nvme names.

    Where a machine's drives lie is made up unless it was probed: there --nvme says where they lie, one after the other.
    UserError for more drives than it has, or, of a probed machine, for another.
    """
    known = [drive.directory for drive in machine.drives]
    given = [value for word, value in pairwise(words) if word == "--nvme"]
    given += [word.partition("=")[2] for word in words if word.startswith("--nvme=")]
    if not given:
        return machine, [*words, *(word for name in known for word in ("--nvme", name))]
    unknown = [name for name in dict.fromkeys(given) if name not in known]
    free = [name for name in known if name not in given]
    if unknown and (machine.origin == "measured" or len(unknown) > len(free)):
        raise UserError(f"--nvme {unknown[0]}: the machine has {', '.join(known) or 'no drive'}")
    places = dict(zip(free, unknown, strict=False))
    drives = tuple(replace(drive, directory=places.get(drive.directory, drive.directory)) for drive in machine.drives)
    notes = [f"--nvme {place} is taken for {name} of the machine" for name, place in places.items()]
    return replace(machine, drives=drives, notes=(*machine.notes, *notes)), words
