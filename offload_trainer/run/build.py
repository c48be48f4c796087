"""What a run is made of, put together: drives leased, the engine built, the job that the loop carries out.

Setup ── build_job ──> Job        (an ExitStack closes what was opened, also after a failure)
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload_trainer.checkpoint import Checkpoints, RunRecord, read_state
from offload_trainer.config import TrainConfig
from offload_trainer.plan.choose import workload
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import checkpoint_bytes
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.sizes import TierSizes
from offload_trainer.run.data import RunData
from offload_trainer.run.directory import Log, environment
from offload_trainer.storage.durable import write_text
from offload_trainer.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Setup:
    """All that is settled before anything is built."""

    config: TrainConfig
    plan: Plan
    machine: MachineProfile
    source: Any  # ModelSource
    data: RunData
    output: Path
    record: RunRecord
    log: Log


def build_job(setup: Setup, stack: ExitStack, *, resume: Path | None) -> Any:
    """Drives leased, the engine built; `stack` closes what was opened."""
    from offload_trainer.storage.lease import DriveLease
    from offload_trainer.telemetry.meters import peak_rss_bytes

    log = setup.log
    swaps: list[Path] = []
    if setup.plan.uses_drives:
        from offload_trainer.ranks import share_from_zero

        drives = [Path(drive).expanduser() for drive in setup.config.placement.nvme]
        leases = [stack.enter_context(DriveLease(drive, say=log.say)) for drive in drives] if log.loud else []
        swaps = share_from_zero([lease.path for lease in leases])
    start = time.perf_counter()
    engine = build_engine(setup, swaps=swaps, load_weights=resume is None)
    stack.callback(engine.close)
    log.say(
        f"engine ready after {format_seconds(time.perf_counter() - start)}, {format_bytes(peak_rss_bytes())} resident"
    )
    job = _make_job(setup, engine, done=steps_done(resume), swaps=swaps)
    if job.telemetry:
        stack.callback(job.telemetry.close)
    return job


def build_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Any:
    """The engine that the plan names; `swaps` are the run's private directories on drives."""
    import torch

    from offload_trainer.engine.cpu_matmul import use_fp32_products
    from offload_trainer.model.source import DTYPES

    source, config, plan, log = setup.source, setup.config, setup.plan, setup.log
    if not torch.cuda.is_available() and use_fp32_products(DTYPES[config.model.dtype]):
        log.say(f"this CPU has no units for {config.model.dtype}: products are taken in fp32 and rounded once")
    if plan.engine == "plain":
        from offload_trainer.engine.plain import PlainEngine

        return PlainEngine(source, config, load_weights=load_weights)
    if isinstance(plan.sizes, TierSizes):
        from offload_trainer.engine.tiered import TieredEngine

        engine = TieredEngine(
            source,
            config,
            placement=plan.placement,
            sizes=plan.sizes,
            drives=swaps,
            load_weights=load_weights,
            say=log.say,
        )
        engine.offloaded.keep_account(model=setup.output / "model")
        return engine
    return _stock_engine(setup, swaps=swaps, load_weights=load_weights)


def _stock_engine(setup: Setup, *, swaps: list[Path], load_weights: bool) -> Any:
    import torch

    from offload_trainer.engine.deepspeed import DeepSpeedEngine, start_processes
    from offload_trainer.engine.ds_config import deepspeed_config

    plan = setup.plan
    assert plan.sizes is not None
    assert not isinstance(plan.sizes, TierSizes)
    _, world = start_processes()
    words = deepspeed_config(
        setup.config,
        plan.placement,
        plan.sizes,
        world=world,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        swap_directory=str(swaps[0]) if swaps else None,
    )
    if setup.log.loud:
        write_text(setup.output / "deepspeed.json", json.dumps(words, indent=1))
    # Frozen weights come from the checkpoint too, so a resumed run needs none of the source's.
    return DeepSpeedEngine(setup.source, setup.config, placement=plan.placement, words=words, load_weights=load_weights)


def steps_done(resume: Path | None) -> int:
    """Steps of the run that a checkpoint holds; 0 without one."""
    return 0 if resume is None else read_state(resume).step


def _make_job(setup: Setup, engine: Any, *, done: int, swaps: list[Path]) -> Any:
    import torch

    from offload_trainer.data.rows import RowReader
    from offload_trainer.data.token_bytes import TokenBytes
    from offload_trainer.model.sample import sample_text
    from offload_trainer.telemetry.meters import PhaseClock
    from offload_trainer.telemetry.sinks import Telemetry
    from offload_trainer.trainer import Job

    config, plan, data, shape, log = setup.config, setup.plan, setup.data, setup.source.shape, setup.log
    split, train = data.split, config.train

    def sample(engine: Any) -> str:
        return sample_text(
            engine.next_logits,
            data.tokenizer,
            prompt=train.sample_prompt,
            tokens=train.sample_tokens,
            context=shape.context,
            seed=train.seed,
        )

    every = config.save.every
    rows = partial(RowReader, seq_len=plan.seq_len, vocabulary=shape.vocabulary)
    return Job(
        config=config,
        engine=engine,
        train_rows=rows(data.tokens, rows=split.train, seed=train.seed, shuffle=config.data.shuffle),
        validation_rows=rows(data.held_out, rows=split.validation) if split.validation else None,
        tokens_per_step=plan.tokens_per_step,
        text_bytes=TokenBytes(data.tokenizer).of,
        clock=PhaseClock(synchronize=torch.cuda.synchronize if torch.cuda.is_available() else None),
        telemetry=Telemetry(
            setup.output, steps=train.steps, done=done, say=log.say, tensorboard=config.save.tensorboard
        )
        if log.loud
        else None,
        sample=sample if train.sample_every else None,
        say=log.say,
        checkpoints=_checkpoints(setup),
        cannot_save=plan.cannot_save,
        save_every=max(1, train.steps // 10) if every == "auto" else every,
        save_wish=setup.output / "save",
        flops_per_step=shape.flops_per_token(seq_len=plan.seq_len) * plan.tokens_per_step,
        peak_flops=peak.value * plan.world if (peak := setup.machine.rates.matmul.get(config.model.dtype)) else None,
        swaps=swaps,
    )


def _checkpoints(setup: Setup) -> Checkpoints:
    output = setup.output
    return Checkpoints(
        output / "checkpoints",
        record=setup.record,
        keep=setup.config.save.keep,
        need_bytes=checkpoint_bytes(workload(setup.config, setup.source.shape)),
        say=setup.log.say,
        beside=(output / "metrics.jsonl", output / "evaluations.jsonl"),
    )


# -- what a run's checkpoints say of it ------------------------------------------------------------------------------


def record_of(config: TrainConfig, plan: Plan, source: Any, data: RunData, output: Path) -> RunRecord:
    """What checkpoints say beside the state. With another identity or layout a run would not go on as it began."""
    return RunRecord(
        identity=planned_identity(config, plan, source) | data.identity(),
        layout=layout_of(source),
        run={
            "config": config.model_dump(mode="json"),
            "random": source.random,
            "plan": plan.to_json(),
            "environment": environment(),
        },
        model=output / "model",
    )


def planned_identity(config: TrainConfig, plan: Plan, source: Any) -> dict[str, Any]:
    """The part of the identity that is known without the data."""
    return {
        "seed": config.train.seed,
        "seq_len": plan.seq_len,
        "shuffle": config.data.shuffle,
        "parameters": source.shape.parameters,
    }


def layout_of(source: Any) -> dict[str, Any]:
    """Each weight's shape, and whether it is trained."""
    return {weight.name: {"shape": list(weight.shape), "trained": weight.trainable} for weight in source.shape.weights}
