"""Build a run: lease directories on drives, construct the engine, assemble the Job of a Setup (Planned with data).

An ExitStack closes everything that was opened, also after a failure.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

import torch

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes, format_seconds
from offload_trainer.data.rows import RowReader
from offload_trainer.data.run_data import RunData
from offload_trainer.data.stream import POINTS
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.engine.protocol import Engine
from offload_trainer.plan.deepspeed import ZeroSizes
from offload_trainer.plan.memory import checkpoint_bytes, heap_limit
from offload_trainer.plan.planner import mistakes_of_length
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.ranks import everybody, nodes, place_here
from offload_trainer.run.checkpoint import Checkpoints, RunRecord, TrainState
from offload_trainer.run.directory import Log, record_of
from offload_trainer.run.loop import Job, TimeToSave
from offload_trainer.run.planning import Planned
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.host_memory import return_now, set_malloc_threshold
from offload_trainer.storage.owned_dirs import ScratchDirectory
from offload_trainer.storage.scratch_dir import PAGES, empty_list, hold, leased
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.telemetry.meters import PhaseClock, peak_rss_bytes
from offload_trainer.telemetry.sinks import Screen, Telemetry


@dataclass(frozen=True)
class Setup(Planned):
    """A planned run with its data, before anything is built."""

    data: RunData
    log: Log

    @property
    def drives(self) -> list[Path]:
        return [Path(drive).expanduser() for drive in self.config.placement.nvme]

    @property
    def listed(self) -> Path:
        """File that lists the directories of page files from which the same command would resume."""
        return self.output / PAGES

    @cached_property
    def record(self) -> RunRecord:
        return record_of(self, identity=self.identity | self.data.identity(), model=self.output / "model")


def with_steps(setup: Setup, begins: TrainState | None, *, say: Callable[[str], None] = lambda line: None) -> Setup:
    """Return the setup with the `train.steps` that visit all rows of `train.epochs`, beyond those before `begins`."""
    train, plan = setup.config.train, setup.plan
    if train.epochs == "auto":
        return setup
    rows, rows_of_step = len(setup.data.split.train), plan.work.tokens // plan.work.seq_len
    done, visited = (begins.step, begins.data_position) if begins else (0, 0)
    left = max(0, math.ceil(Fraction(str(train.epochs)) * rows) - visited)
    steps = max(1, done + math.ceil(Fraction(left, rows_of_step)))
    if mistakes := mistakes_of_length(setup.config.optim, steps=steps):
        raise UserError("; ".join(mistakes))
    say(f"epochs: {train.epochs:g} of {rows} rows, {rows_of_step} rows a step: {steps} steps")
    return replace(setup, config=setup.config.with_keys("train", steps=steps, epochs="auto"))


def build_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Engine:
    """Build the plan's engine on the private directories `swaps`; without `load_weights` a checkpoint supplies them."""
    plan, sizes, config = setup.plan, setup.plan.sizes, setup.config
    if isinstance(sizes, TierSizes):
        from offload_trainer.engine.tiered import TieredEngine

        engine = TieredEngine(
            setup.source,
            plan.work,
            config.optim,
            placement=plan.placement,
            sizes=sizes,
            drives=swaps,
            load_weights=load_weights,
            say=setup.log.say,
        )
        if plan.work.keeps_heap:
            engine.offloaded.heap.keep(heap_limit(plan.items))
        return engine
    from offload_trainer.engine.deepspeed import DeepSpeedEngine, deepspeed_config, start_processes

    assert isinstance(sizes, ZeroSizes)
    world = start_processes()
    words = deepspeed_config(
        replace(plan.work, world=world),
        config.optim,
        config.deepspeed,
        plan.placement,
        sizes,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        swap_directory=str(swaps[0]) if swaps else None,
    )
    if setup.log.loud:
        write_text(setup.output / "deepspeed.json", json.dumps(words, indent=1))
    # Frozen weights are in the checkpoint too, so a resumed run loads none from the source.
    return DeepSpeedEngine(
        setup.source, plan.work, config.optim, placement=plan.placement, words=words, load_weights=load_weights
    )


def build_job(
    setup: Setup,
    stack: ExitStack,
    *,
    begins: TrainState | None,
    instead: Sequence[ScratchDirectory] = (),
    resume: Callable[[Engine], None] = lambda engine: None,
) -> Job:
    """Lease directories on the drives, build the engine and return the Job. `stack` closes everything opened.

    `begins`: state that the run resumes from; None at step 0. `instead`: directories of page files to use in place of
    new ones. `resume` loads these into the engine, before records of later steps are removed from the run's metrics.
    """
    log = setup.log
    drives = setup.drives if setup.plan.uses_drives else []
    swaps = lease_drives(drives, stack, say=log.say, listed=setup.listed, instead=instead)
    start = time.perf_counter()
    dtype = setup.config.model.dtype
    if not torch.cuda.is_available() and use_fp32_products(DTYPES[dtype]):
        log.say(f"this CPU has no {dtype} units: matrix products are computed in fp32 and rounded once")
    set_malloc_threshold(setup.plan.engine, row=setup.plan.work.seq_len)
    engine = build_engine(setup, swaps=swaps, load_weights=begins is None)
    stack.callback(engine.close)
    return_now()  # DeepSpeed's flat weights leave holes as large as the model
    log.say(
        f"engine ready after {format_seconds(time.perf_counter() - start)}, {format_bytes(peak_rss_bytes())} resident"
    )
    resume(engine)
    plan, data, train, output = setup.plan, setup.data, setup.config.train, setup.output
    shape, every = setup.source.shape, setup.config.save.every
    rows = partial(RowReader, seq_len=plan.work.seq_len, vocabulary=shape.vocabulary, apart=data.apart)
    section = data.spec.section
    shuffles = bool(section.shuffled_block if section.streamed else section.shuffle)
    if section.streamed:
        data.tokens.remember(output / POINTS, writes=log.loud)
    peak = setup.machine.rates.matmul.get(dtype)
    need, write = checkpoint_bytes(setup.plan.work), setup.machine.write_rate(setup.machine.output)
    telemetry = _telemetry(setup, done=begins.step if begins else 0) if log.loud else None
    if telemetry:
        stack.callback(telemetry.close)
    clock = PhaseClock()
    if torch.cuda.is_available():  # DeepSpeed uses streams that do not wait for each other at a phase's end
        clock = PhaseClock(torch.cuda.synchronize, stream=plan.engine == "tiered")
    return Job(
        train=train,
        optim=setup.config.optim,
        dynamic_loss_scale=dtype == "fp16",
        engine=engine,
        train_rows=rows(data.tokens, rows=data.split.train, seed=train.seed, shuffle=shuffles),
        validation_rows=rows(data.held_out, rows=data.split.validation) if data.split.validation else None,
        clock=clock,
        telemetry=telemetry,
        say=log.say,
        checkpoints=Checkpoints(
            output / "checkpoints", record=setup.record, keep=setup.config.save.keep, need_bytes=need, say=log.say
        ),
        to_save=TimeToSave(step=plan.forecast.step, save=need / write + (plan.forecast.seconds.get("update") or 0.0)),
        cannot_save=plan.cannot_save,
        save_every=max(1, train.steps // 10) if every == "auto" else every,
        save_request_file=output / "save",
        flops_per_step=shape.flops_per_token(seq_len=plan.work.seq_len) * plan.work.tokens,
        peak_flops=peak.value * plan.work.world if peak else None,
        swaps=swaps,
    )


def lease_drives(
    drives: Sequence[Path],
    stack: ExitStack,
    *,
    say: Callable[[str], None],
    listed: Path | None = None,
    instead: Sequence[ScratchDirectory] = (),
) -> list[Path]:
    """Return this node's private directories on the drives, new ones or those of `instead`, which all ranks lock."""
    rank = place_here()[0]
    first = next(its.start for its in nodes() if rank in its)

    def lease() -> list[Path]:
        if drives and rank == 0 and listed and not instead:
            with suppress(OSError):  # a kill must not leave a list of directories that the leases have removed
                empty_list(listed)
        places: Sequence[ScratchDirectory | None] = instead or [None] * len(drives)
        taken = zip(drives, places, strict=True) if rank == first else ()
        leases = (leased(drive, say=say, listed=listed, instead=place) for drive, place in taken)
        return [stack.enter_context(lease) for lease in leases]

    swaps: list[Path] = everybody().each(lease, list[Path])[first]
    if rank != first:
        for swap in swaps:
            stack.callback(os.close, hold(swap))
    return swaps


_WAITED_FOR = {"adamw": "arithmetic on the CPU", "adamw_gpu": "arithmetic on the GPU", "device": "copies"}


def _telemetry(setup: Setup, *, done: int) -> Telemetry:
    plan = setup.plan
    kinds = {phase: plan.forecast.slowest(phase).kind for phase, known in plan.forecast.seconds.items() if known}
    bounds = {phase: _WAITED_FOR.get(kind, kind) for phase, kind in kinds.items()}
    if plan.forecast.behind and "update" in bounds:
        bounds["wait"] = bounds["update"]
    screen = Screen(setup.config.train.steps, initial=done, say=setup.log.say, bounds=bounds, drives=plan.uses_drives)
    sections = setup.record.run["config"].items()
    settings = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
    return Telemetry(setup.output, done=done, screen=screen, trackers=setup.config.save.trackers, config=settings)
