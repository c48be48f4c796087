"""Build a run: lease directories on drives, construct the engine, and assemble the Job for the training loop.

Setup ── build_job ──> Job        (an ExitStack closes everything that was opened, also after a failure)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import Checkpoints, RunRecord, TrainState
from offload_trainer.data.rows import RowReader
from offload_trainer.data.tokenizer import TokenBytes
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.engine.protocol import Engine
from offload_trainer.model.inference import sample_text
from offload_trainer.plan.deepspeed.zero_buffers import ZeroSizes
from offload_trainer.plan.memory import checkpoint_bytes
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import workload
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.ranks import all_gather_json, nodes, place_here
from offload_trainer.run.data import RunData
from offload_trainer.run.directory import Log, environment
from offload_trainer.run.planning import Planned
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.host_memory import return_now, set_malloc_threshold
from offload_trainer.storage.owned_dirs import ScratchDirectory
from offload_trainer.storage.scratch_dir import PAGES, DriveLease, hold
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.telemetry.meters import PhaseClock, peak_rss_bytes
from offload_trainer.telemetry.sinks import Screen, Telemetry
from offload_trainer.telemetry.trackers import Tracked, Trackers
from offload_trainer.trainer import Job
from offload_trainer.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Setup:
    """Plan, data and metadata of a run, fixed before anything is built."""

    planned: Planned
    data: RunData
    record: RunRecord
    log: Log

    @property
    def output(self) -> Path:
        """The run directory."""
        return self.planned.output

    @property
    def listed(self) -> Path:
        """File that lists the directories of page files from which the same command would resume."""
        return self.output / PAGES


Build = Callable[..., Engine]  # same signature as `build_engine`


def build_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Engine:
    """Build the engine that the plan names.

    `swaps`: the run's private directories on drives. `load_weights`: False if a checkpoint supplies the weights.
    """
    builds = {"tiered": _tiered_engine, "deepspeed": _stock_engine, "plain": _plain_engine}
    return builds[setup.planned.plan.engine](setup, swaps=swaps, load_weights=load_weights)


def build_job(
    setup: Setup,
    stack: ExitStack,
    *,
    begins: TrainState | None,
    build: Build = build_engine,
    instead: Sequence[ScratchDirectory] = (),
    resume: Callable[[Engine], None] = lambda engine: None,
) -> Job:
    """Lease directories on the drives, build the engine and return the Job. `stack` closes everything opened.

    Args:
        begins: state that the run resumes from; None at step 0.
        build: builds the engine.
        instead: existing directories of page files to use in place of new ones.
        resume: loads those page files into the engine. It runs before records of later steps are removed from the
            run's metrics, so that a failure leaves them.
    """
    log = setup.log
    swaps = _leased(setup, stack, instead=instead) if setup.planned.plan.uses_drives else []
    start = time.perf_counter()
    dtype = setup.planned.config.model.dtype
    if not torch.cuda.is_available() and use_fp32_products(DTYPES[dtype]):
        log.say(f"this CPU has no {dtype} units: matrix products are computed in fp32 and rounded once")
    set_malloc_threshold(setup.planned.plan.engine, row=setup.planned.plan.seq_len)
    engine = build(setup, swaps=swaps, load_weights=begins is None)
    stack.callback(engine.close)
    return_now()  # DeepSpeed's flat weights leave holes as large as the model
    log.say(
        f"engine ready after {format_seconds(time.perf_counter() - start)}, {format_bytes(peak_rss_bytes())} resident"
    )
    resume(engine)
    job = _make_job(setup, engine, done=begins.step if begins else 0, swaps=swaps)
    if job.telemetry:
        stack.callback(job.telemetry.close)
    return job


def _leased(setup: Setup, stack: ExitStack, *, instead: Sequence[ScratchDirectory]) -> list[Path]:
    """Return this node's private directories on the drives. The first rank leases them; the others lock them too."""
    drives = [Path(drive).expanduser() for drive in setup.planned.config.placement.nvme]
    rank, leases = place_here()[0], list[DriveLease]()
    first = next(its.start for its in nodes() if rank in its)
    if rank == first:
        for number, drive in enumerate(drives):
            place = instead[number] if instead else None
            lease = DriveLease(drive, say=setup.log.say, listed=setup.listed, instead=place)
            leases.append(stack.enter_context(lease))
    swaps: list[Path] = all_gather_json([lease.path for lease in leases], list[Path])[first]
    if rank != first and isinstance(setup.planned.plan.sizes, TierSizes):
        for swap in swaps:
            stack.callback(os.close, hold(swap))
    return swaps


def _plain_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Engine:
    from offload_trainer.engine.plain import PlainEngine

    return PlainEngine(
        setup.planned.source, setup.planned.config.model, setup.planned.config.optim, load_weights=load_weights
    )


def _tiered_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Engine:
    from offload_trainer.engine.tiered import TieredEngine

    planned = setup.planned
    assert isinstance(planned.plan.sizes, TierSizes)
    engine = TieredEngine(
        planned.source,
        workload(planned.config, planned.source.shape, world=planned.plan.world, nodes=planned.plan.nodes),
        planned.config.optim,
        placement=planned.plan.placement,
        sizes=planned.plan.sizes,
        drives=swaps,
        load_weights=load_weights,
        say=setup.log.say,
    )
    # With split masters the page files are useless without the weights in memory, so they get no index.
    if engine.offloaded.node.is_first and not planned.plan.sizes.remainders:
        engine.offloaded.enable_manifest(model=setup.output / "model")
    return engine


def _stock_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Engine:
    from offload_trainer.engine.deepspeed import DeepSpeedEngine, start_processes
    from offload_trainer.engine.ds_config import deepspeed_config

    config, plan = setup.planned.config, setup.planned.plan
    assert isinstance(plan.sizes, ZeroSizes)
    _, world = start_processes()
    words = deepspeed_config(
        workload(config, setup.planned.source.shape, world=world),
        config.optim,
        config.deepspeed,
        plan.placement,
        plan.sizes,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        swap_directory=str(swaps[0]) if swaps else None,
    )
    if setup.log.loud:
        write_text(setup.output / "deepspeed.json", json.dumps(words, indent=1))
    # Frozen weights are in the checkpoint too, so a resumed run loads none from the source.
    return DeepSpeedEngine(
        setup.planned.source,
        config.model,
        config.optim,
        placement=plan.placement,
        words=words,
        partition_activations=config.parallel.partition_activations,
        load_weights=load_weights,
    )


def _make_job(setup: Setup, engine: Engine, *, done: int, swaps: list[Path]) -> Job:
    planned, data, log = setup.planned, setup.data, setup.log
    config, plan, shape = planned.config, planned.plan, planned.source.shape
    train, every = config.train, config.save.every
    rows = partial(RowReader, seq_len=plan.seq_len, vocabulary=shape.vocabulary, apart=data.apart)
    peak = planned.machine.rates.matmul.get(config.model.dtype)
    telemetry = _telemetry(setup, done=done)
    say = telemetry.say if telemetry else log.say
    return Job(
        train=train,
        optim=config.optim,
        dynamic_loss_scale=config.model.dtype == "fp16",
        engine=engine,
        train_rows=rows(data.tokens, rows=data.split.train, seed=train.seed, shuffle=config.data.shuffle),
        validation_rows=rows(data.held_out, rows=data.split.validation) if data.split.validation else None,
        text_bytes=TokenBytes(data.tokenizer).of,
        clock=PhaseClock(synchronize=_what_computes(plan) if torch.cuda.is_available() else None),
        telemetry=telemetry,
        sample=_sampled(setup) if train.sample_every else None,
        say=say,
        checkpoints=_checkpoints(setup, say=say),
        cannot_save=plan.cannot_save,
        save_every=max(1, train.steps // 10) if every == "auto" else every,
        save_request_file=setup.output / "save",
        flops_per_step=shape.flops_per_token(seq_len=plan.seq_len) * plan.tokens_per_step,
        peak_flops=peak.value * plan.world if peak else None,
        swaps=swaps,
    )


def _what_computes(plan: Plan) -> Callable[[], None]:
    """Return the function that synchronizes the GPU for phase timings.

    If the update overlaps the forward, it waits for the current stream only, so that the update can continue.
    """
    if plan.forecast.behind:
        return lambda: torch.cuda.current_stream().synchronize()
    return torch.cuda.synchronize


_WAITED_FOR = {"adamw": "Adam on the CPU", "adamw_gpu": "Adam on the GPU", "device": "copies"}  # bottlenecks, as shown


def _telemetry(setup: Setup, *, done: int) -> Telemetry | None:
    """Create the screen, metrics files and trackers on rank 0; return None on other ranks."""
    if not setup.log.loud:
        return None
    config, plan = setup.planned.config, setup.planned.plan
    kinds = {phase: plan.forecast.kind(phase) for phase, known in plan.forecast.seconds.items() if known}
    bounds = {phase: _WAITED_FOR.get(kind, kind) for phase, kind in kinds.items() if kind}
    if plan.forecast.behind and "update" in bounds:
        bounds["wait"] = bounds["update"]
    screen = Screen(config.train.steps, initial=done, say=setup.log.say, bounds=bounds, drives=plan.uses_drives)
    trackers = None
    if names := config.save.all_trackers:
        sections = config.model_dump(mode="json").items()
        told = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
        tracked = Tracked(setup.output, config.save.project, config=told, done=done)
        trackers = Trackers(names, tracked, say=screen.say)
    return Telemetry(setup.output, done=done, screen=screen, trackers=trackers)


def _sampled(setup: Setup) -> Callable[[Engine], str]:
    train, context = setup.planned.config.train, setup.planned.source.shape.context

    def sample(engine: Engine) -> str:
        return sample_text(
            engine.next_logits,
            setup.data.tokenizer,
            prompt=train.sample_prompt,
            tokens=train.sample_tokens,
            context=context,
            seed=train.seed,
        )

    return sample


def _checkpoints(setup: Setup, *, say: Callable[[str], None]) -> Checkpoints:
    output, config = setup.output, setup.planned.config
    return Checkpoints(
        output / "checkpoints",
        record=setup.record,
        keep=config.save.keep,
        need_bytes=checkpoint_bytes(workload(config, setup.planned.source.shape)),
        say=say,
        growing=(output / "metrics.jsonl", output / "evaluations.jsonl"),
    )


# -- metadata of checkpoints -----------------------------------------------------------------------------------------


def record_of(planned: Planned, data: RunData) -> RunRecord:
    """Return the metadata for checkpoints. Resuming requires an equal identity and layout."""
    return RunRecord(
        identity=planned_identity(planned) | data.identity(),
        layout=layout_of(planned),
        run={
            "config": planned.config.model_dump(mode="json"),
            "random": planned.source.random,
            "plan": planned.plan.to_json(),
            "environment": environment(),
        },
        model=planned.output / "model",
    )


def planned_identity(planned: Planned) -> dict[str, Any]:
    """Return the part of the run's identity that is known without the data."""
    return {
        "seed": planned.config.train.seed,
        "seq_len": planned.plan.seq_len,
        "shuffle": planned.config.data.shuffle,
        "parameters": planned.source.shape.parameters,
    }


def layout_of(planned: Planned) -> dict[str, Any]:
    """Return each weight's shape and whether it is trained, by name."""
    weights = planned.source.shape.weights
    return {weight.name: {"shape": list(weight.shape), "trained": weight.trainable} for weight in weights}
