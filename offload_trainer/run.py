"""A training run from wish to report: probe, plan, refuse or build, train, export, report.

    TrainConfig -> MachineProfile + ModelShape -> Plan -> (data, drive lease, engine) -> trainer.train -> report

Nothing is written before the plan has passed; torch is imported only here and below.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from offload_trainer.checkpoint import (
    Checkpoints,
    RunRecord,
    check_identity,
    check_resume,
    find_resume,
    read_state,
)
from offload_trainer.config import TrainConfig
from offload_trainer.errors import Interrupted, TrainerError, UserError
from offload_trainer.launch import ranks_of_environment
from offload_trainer.machine.profile import MachineProfile
from offload_trainer.plan.memory import checkpoint_bytes
from offload_trainer.plan.plan import Plan, saves_state
from offload_trainer.plan.ratios import steady_ratios
from offload_trainer.plan.tiered import TierSizes
from offload_trainer.planner import plan_run, refuse_shortfall
from offload_trainer.retention import complete_checkpoints, step_of
from offload_trainer.run_data import RunData, check_data, prepare_data, unknown_identity
from offload_trainer.run_directory import Log, environment, held, refuse_second, run_directory
from offload_trainer.signals import waiting
from offload_trainer.tiers.durable import bytes_below, write_text
from offload_trainer.units import format_bytes, format_seconds

_TELLING = 3  # steps after the warm ones, from which a run's seconds say something about the machine


def refuse(config: TrainConfig, plan: Plan) -> None:
    """UserError for a plan that must not start."""
    reason = saves_state(config, plan)
    resumes = find_resume(config.save.resume, output=Path(config.save.output))
    if reason and resumes:
        raise UserError(
            f"{plan.homes} cannot continue {resumes}: {reason}. Use --optimizer cpu, or name another --output"
        )
    if reason and config.save.every != 0:
        raise UserError(
            f"{plan.homes}: no exact checkpoints here: {reason}. Add --save-every 0 to train without them (the "
            "weights are exported at the end), or use --engine tiered"
        )
    here = complete_checkpoints(Path(config.save.output) / "checkpoints")
    newer = [path.name for path in here if resumes and step_of(path) > step_of(resumes)]
    if newer:
        raise UserError(
            f"--resume {config.save.resume}: {config.save.output} holds newer checkpoints ({', '.join(newer)}), which "
            "the same command would go on from next time. Move them away, or name another --output"
        )
    if config.save.resume == "never" and here:
        raise UserError(
            f"--resume never, but {config.save.output} holds checkpoints that it would mix with: name another --output"
        )
    refuse_shortfall(config, plan)


def check_start(config: TrainConfig, plan: Plan, source: Any, *, say: Callable[[str], None]) -> None:
    """UserError for what can be known to go wrong before text is tokenised: data that is not there, another's state."""
    check_data(config, source, say=say)
    resumes = find_resume(config.save.resume, output=Path(config.save.output))
    if resumes:
        known = _planned_identity(config, plan, source) | unknown_identity(config)
        check_identity(resumes, known, _layout(source))


def train_run(config: TrainConfig, *, instead: Callable[[Any], None] | None = None) -> None:
    """Train as `config` says. Raises UserError before anything is written, TrainerError after.

    `instead` is called with the job that was built, in place of training; nothing is saved or exported then.
    """
    import torch

    rank, world = ranks_of_environment()
    log = Log(loud=rank == 0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if world > 1:
        from offload_trainer.engine.deepspeed import start_processes

        start_processes()
    from offload_trainer.engine.ranks import on_rank_zero, share_from_zero

    on_rank_zero(lambda: refuse_second(Path(config.save.output)))
    config, plan, machine, source = plan_run(config)
    config, plan, machine = share_from_zero((config, plan, machine))
    log.say(plan.describe())
    refuse(config, plan)
    on_rank_zero(lambda: check_start(config, plan, source, say=lambda _: None))
    if not plan.fits:
        log.say("--force: going on although the plan says that it does not fit")
    data = prepare_data(config, source, plan, say=log.say)
    output = Path(config.save.output)
    resume = find_resume(config.save.resume, output=output)
    record = _record(config, plan, source, data, output)
    if resume:
        on_rank_zero(partial(_check, resume, record, log))
    with ExitStack() as stack:
        resume, lock = _hold(stack, config, plan, record, log, resume=resume)
        if instead is None and _done_before(config, record, resume, log):
            return
        if rank == 0:
            stack.enter_context(
                run_directory(
                    output,
                    config,
                    plan,
                    machine,
                    source,
                    log,
                    lock=lock,
                    tokenizer=data.tokenizer,
                    end_of_text=data.end_of_text,
                )
            )
        job = _build_job(config, plan, machine, source, data, output, log, stack, record=record, resume=resume)
        if instead is not None:
            instead(job)
            return
        _train(job, config, plan, machine, source, output, log, resume=resume)


def _done_before(config: TrainConfig, record: RunRecord, resume: Path | None, log: Log) -> bool:
    """Whether this very run has ended here already. UserError where it would overwrite what another has left."""
    from offload_trainer.engine.ranks import on_rank_zero, share_from_zero
    from offload_trainer.export.final import done_before

    found: list[str] = []

    def look() -> None:
        save = config.save
        begins_at, anew = _steps_done(resume), save.resume == "never"
        told = done_before(Path(save.output), record, begins_at=begins_at, anew=anew, exports=save.every == 0)
        found.extend([told] if told else [])

    on_rank_zero(look)
    for line in found:
        log.say(line)
    return bool(share_from_zero(found))


def _check(resume: Path, record: RunRecord, log: Log) -> None:
    log.say(f"checking {resume}")
    for line in check_resume(resume, record):
        log.say(f"note: {line}")


def _hold(
    stack: ExitStack, config: TrainConfig, plan: Plan, record: RunRecord, log: Log, *, resume: Path | None
) -> tuple[Path | None, int]:
    """From here on the run directory is this run's; what to go on from, chosen again, and the descriptor of the lock.

    Another run may have ended there since it was chosen, and have left newer checkpoints.
    """
    from offload_trainer.engine.ranks import on_rank_zero, share_from_zero

    output, chosen, lock = Path(config.save.output), resume, -1

    def on_zero() -> None:
        nonlocal chosen, lock
        lock = stack.enter_context(held(output, log))
        refuse(config, plan)
        chosen = find_resume(config.save.resume, output=output)
        if chosen != resume:
            log.say(f"another run has ended in {output} meanwhile: looking again")
            if chosen:
                _check(chosen, record, log)

    on_rank_zero(on_zero)
    return share_from_zero(chosen), lock


def prepare_run(config: TrainConfig) -> list[Path]:
    """Tokenise the data of `config`; returns the token files' paths, those for validation last."""
    config, plan, _, source = plan_run(config)
    return prepare_data(config, source, plan, say=Log(loud=True).say).paths


def _build_job(
    config: TrainConfig,
    plan: Plan,
    machine: MachineProfile,
    source: Any,
    data: RunData,
    output: Path,
    log: Log,
    stack: ExitStack,
    *,
    record: RunRecord,
    resume: Path | None,
) -> Any:
    """Drives leased, the engine built; `stack` closes what was opened, also after a failure."""
    from offload_trainer.telemetry.meters import peak_rss_bytes
    from offload_trainer.tiers.lease import DriveLease

    swaps: list[Path] = []
    if plan.uses_drives:
        from offload_trainer.engine.ranks import share_from_zero

        drives = [Path(drive).expanduser() for drive in config.placement.nvme]
        leases = [stack.enter_context(DriveLease(drive, say=log.say)) for drive in drives] if log.loud else []
        swaps = share_from_zero([lease.path for lease in leases])
    start = time.perf_counter()
    engine = _build_engine(config, plan, source, swaps=swaps, load_weights=resume is None, output=output, log=log)
    stack.callback(engine.close)
    log.say(
        f"engine ready after {format_seconds(time.perf_counter() - start)}, {format_bytes(peak_rss_bytes())} resident"
    )
    checkpoints = Checkpoints(
        output / "checkpoints",
        record=record,
        keep=config.save.keep,
        need_bytes=checkpoint_bytes(config, source.shape),
        say=log.say,
        beside=(output / "metrics.jsonl", output / "evaluations.jsonl"),
    )
    job = _make_job(
        config, plan, machine, source, data, engine, output, log, checkpoints, done=_steps_done(resume), swaps=swaps
    )
    if job.telemetry:
        stack.callback(job.telemetry.close)
    return job


def _train(
    job: Any,
    config: TrainConfig,
    plan: Plan,
    machine: MachineProfile,
    source: Any,
    output: Path,
    log: Log,
    *,
    resume: Path | None,
) -> None:
    """The loop, and what follows it."""
    from offload_trainer.trainer import train

    steps = config.train.steps
    with waiting(say=log.say_now) as asked:
        if job.cannot_save:
            asked.answer = "finishing this step, then exporting the weights; a checkpoint cannot be made here"
        state = train(job, asked, resume=resume)
        saved = job.checkpoints.saved == state.step
        if job.save_every == 0 and (state.step == steps or not saved):
            asked.answer = "finishing the export of the weights"
            _export_live(source, job, output, log, step=state.step)
        if log.loud:
            _report(config, plan, machine, output, job.swaps, log)
        if asked.stop:
            raise Interrupted(_farewell(state.step, steps, saved=saved, output=output), signal_number=asked.stop)
        log.say(f"done: {steps} steps; {output}{_next_command(output)}")


def _farewell(step: int, steps: int, *, saved: bool, output: Path) -> str:
    if step == steps:
        return f"stopped after step {step}, the last; all is done and kept"
    if saved:
        return f"stopped after step {step}, everything saved; the same command goes on from there"
    return (
        f"stopped after step {step}; the weights are in {output / 'export'}, but no checkpoint could be made, so the "
        f"moments are lost: to train on from the weights give --model {output / 'export'} and another --output"
    )


# -- what a run is made of -------------------------------------------------------------------------------------------


def _build_engine(
    config: TrainConfig,
    plan: Plan,
    source: Any,
    *,
    swaps: list[Path],
    load_weights: bool,
    output: Path,
    log: Log,
) -> Any:
    import torch

    from offload_trainer.engine.cpu_matmul import use_fp32_products
    from offload_trainer.model.source import DTYPES

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
        engine.keep_account(swaps, model=output / "model")
        return engine
    assert plan.sizes is not None
    from offload_trainer.engine.deepspeed import DeepSpeedEngine, start_processes
    from offload_trainer.engine.ds_config import deepspeed_config

    _, world = start_processes()
    words = deepspeed_config(
        config,
        plan.placement,
        plan.sizes,
        world=world,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        swap_directory=str(swaps[0]) if swaps else None,
    )
    if log.loud:
        write_text(output / "deepspeed.json", json.dumps(words, indent=1))
    # Frozen weights come from the checkpoint too, so a resumed run needs none of the source's.
    return DeepSpeedEngine(source, config, placement=plan.placement, words=words, load_weights=load_weights)


def _steps_done(resume: Path | None) -> int:
    return 0 if resume is None else read_state(resume).step


def _make_job(
    config: TrainConfig,
    plan: Plan,
    machine: MachineProfile,
    source: Any,
    data: RunData,
    engine: Any,
    output: Path,
    log: Log,
    checkpoints: Checkpoints,
    *,
    done: int,
    swaps: list[Path],
) -> Any:
    import torch

    from offload_trainer.data.rows import RowReader
    from offload_trainer.data.token_bytes import TokenBytes
    from offload_trainer.model.sample import sample_text
    from offload_trainer.telemetry.meters import PhaseClock
    from offload_trainer.telemetry.sinks import Telemetry
    from offload_trainer.trainer import Job

    split, train = data.split, config.train

    def sample(engine: Any) -> str:
        return sample_text(
            engine.next_logits,
            data.tokenizer,
            prompt=train.sample_prompt,
            tokens=train.sample_tokens,
            context=source.shape.context,
            seed=train.seed,
        )

    every = config.save.every
    shape = source.shape
    rows = partial(RowReader, seq_len=plan.seq_len, vocabulary=shape.vocabulary)
    return Job(
        config=config,
        engine=engine,
        train_rows=rows(data.tokens, rows=split.train, seed=train.seed, shuffle=config.data.shuffle),
        validation_rows=rows(data.held_out, rows=split.validation) if split.validation else None,
        tokens_per_step=plan.tokens_per_step,
        text_bytes=TokenBytes(data.tokenizer).of,
        clock=PhaseClock(synchronize=torch.cuda.synchronize if torch.cuda.is_available() else None),
        telemetry=Telemetry(output, steps=train.steps, done=done, say=log.say, tensorboard=config.save.tensorboard)
        if log.loud
        else None,
        sample=sample if train.sample_every else None,
        say=log.say,
        checkpoints=checkpoints,
        cannot_save=saves_state(config, plan),
        save_every=max(1, train.steps // 10) if every == "auto" else every,
        save_wish=output / "save",
        flops_per_step=shape.flops_per_token(seq_len=plan.seq_len) * plan.tokens_per_step,
        peak_flops=peak.value * plan.world if (peak := machine.rates.matmul.get(config.model.dtype)) else None,
        swaps=swaps,
    )


def _record(config: TrainConfig, plan: Plan, source: Any, data: RunData, output: Path) -> RunRecord:
    """What checkpoints say beside the state. With another identity or layout a run would not go on as it began."""
    return RunRecord(
        identity=_planned_identity(config, plan, source) | data.identity(),
        layout=_layout(source),
        run={
            "config": config.model_dump(mode="json"),
            "random": source.random,
            "plan": plan.to_json(),
            "environment": environment(),
        },
        model=output / "model",
    )


def _planned_identity(config: TrainConfig, plan: Plan, source: Any) -> dict[str, Any]:
    """The part of the identity that is known without the data."""
    return {
        "seed": config.train.seed,
        "seq_len": plan.seq_len,
        "shuffle": config.data.shuffle,
        "parameters": source.shape.parameters,
    }


def _layout(source: Any) -> dict[str, Any]:
    return {weight.name: {"shape": list(weight.shape), "trained": weight.trainable} for weight in source.shape.weights}


def _next_command(output: Path) -> str:
    """How a run's weights become a model, where it has a checkpoint."""
    if not complete_checkpoints(output / "checkpoints"):
        return ""
    return f"; its weights as a model: offload-train export {quote(str(output))} {quote(f'{output}-hf')} --dtype bf16"


def _export_live(source: Any, job: Any, output: Path, log: Log, *, step: int) -> None:
    """Weights of a run that makes no checkpoints, straight from the engine. All ranks take part."""
    from offload_trainer.export.final import write_final

    weights = job.engine.named_master_parameters()
    if not log.loud:
        for _ in weights:
            pass
        return
    place = write_final(weights, source.shape.weights, output, record=job.checkpoints.record, step=step)
    log.say(f"weights exported in fp32 to {place}")


def _report(
    config: TrainConfig, plan: Plan, machine: MachineProfile, output: Path, swaps: list[Path], log: Log
) -> None:
    """report.html: the plan beside what was measured; and how far off it was, for the next plan on this machine."""
    from offload_trainer.machine.cache import keep_ratios
    from offload_trainer.telemetry.report import median_phases, read_evaluations, read_metrics, steady, write_report

    rows = read_metrics(output / "metrics.jsonl")
    if not rows:
        return
    measured: dict[str, int | None] = {}
    measured["ram"] = max(row.host_rss_bytes for row in rows) if plan.world == 1 else None
    measured["gpu"] = max(row.device_peak_bytes for row in rows)
    for drive, swap in zip(config.placement.nvme, swaps, strict=False):
        measured[str(Path(drive).expanduser().resolve())] = bytes_below(swap)
    measured[str(output.expanduser().absolute())] = sum(
        bytes_below(output / left) for left in ("checkpoints", "export")
    )
    planned = plan.to_json()
    on_drives = [moved for moved in plan.traffic if moved.place != "device"]
    for way, bytes_of in (("read", "nvme_read_bytes"), ("written", "nvme_written_bytes")):
        counted = [getattr(row, bytes_of) for row in steady(rows)]
        name = f"{way} on drives, a step"
        planned["tiers"][name] = {"need": sum(getattr(moved, way) for moved in on_drives)}
        measured[name] = int(median(counted)) if None not in counted else None
    seconds = median_phases(rows)
    write_report(
        output / "report.html",
        title=f"{config.model.name}: {plan.homes}",
        rows=rows,
        evaluations=read_evaluations(output / "evaluations.jsonl"),
        plan=planned,
        measured={"tiers": measured, "seconds": seconds},
        notes=list(plan.notes),
    )
    off = {
        phase: seconds[phase] / known for phase, known in plan.forecast.seconds.items() if known and phase in seconds
    }
    if off and len(steady(rows)) >= _TELLING:
        log.say("measured / predicted seconds: " + ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in off.items()))
        try:
            taken = {phase: [row.phases.get(phase, 0.0) for row in steady(rows)] for phase in off}
            keep_ratios(machine, steady_ratios(plan.forecast, taken, engine=plan.engine))
        except (OSError, TrainerError) as error:  # the run itself is whole
            log.say(f"note: these ratios could not be kept for later plans: {error}")
