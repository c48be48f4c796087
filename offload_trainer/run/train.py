"""A training run from wish to report: probe, plan, refuse or build, train, export, report.

    TrainConfig -> MachineProfile + ModelShape -> Plan -> (data, drive lease, engine) -> trainer.train -> report

Nothing is written before the plan has passed; torch is imported only here and below.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from offload_trainer.checkpoint import RunRecord, check_identity, check_resume, find_resume
from offload_trainer.config import TrainConfig
from offload_trainer.errors import Interrupted, UserError
from offload_trainer.plan.plan import Plan
from offload_trainer.retention import complete_checkpoints, step_of
from offload_trainer.run.build import Setup, build_job, layout_of, planned_identity, record_of, steps_done
from offload_trainer.run.data import check_data, prepare_data, unknown_identity
from offload_trainer.run.directory import Log, held, refuse_second, run_directory
from offload_trainer.run.launch import ranks_of_environment
from offload_trainer.run.planning import plan_run, refuse_shortfall
from offload_trainer.run.report import report
from offload_trainer.signals import waiting


def refuse(config: TrainConfig, plan: Plan) -> None:
    """UserError for a plan that must not start."""
    reason = plan.cannot_save
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
        known = planned_identity(config, plan, source) | unknown_identity(config)
        check_identity(resumes, known, layout_of(source))


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
        if config.train.deterministic:
            use_deterministic_algorithms()
    if world > 1:
        from offload_trainer.engine.deepspeed import start_processes

        start_processes()
    from offload_trainer.ranks import on_rank_zero, share_from_zero

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
    record = record_of(config, plan, source, data, output)
    _carry_out(Setup(config, plan, machine, source, data, output, record, log), instead=instead)


def use_deterministic_algorithms() -> None:
    """The same bits from the same command on a GPU. Where torch has no such algorithm it stops and says so.

    Told only to warn, it would leave the backward of flash and memory-efficient attention as it is (torch 2.11,
    aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=False)
    # What it would fill with NaN is also pages and rings of buffers, all of which are written before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _carry_out(setup: Setup, *, instead: Callable[[Any], None] | None) -> None:
    """From the lock on the run directory to the end of the run."""
    from offload_trainer.ranks import on_rank_zero

    log, output, data = setup.log, setup.output, setup.data
    resume = find_resume(setup.config.save.resume, output=output)
    if resume:
        on_rank_zero(partial(_check, resume, setup.record, log))
    with ExitStack() as stack:
        resume, lock = _hold(stack, setup, resume=resume)
        if instead is None and _done_before(setup, resume):
            return
        if log.loud:
            stack.enter_context(
                run_directory(
                    output,
                    setup.config,
                    setup.plan,
                    setup.machine,
                    setup.source,
                    log,
                    lock=lock,
                    tokenizer=data.tokenizer,
                    end_of_text=data.end_of_text,
                )
            )
        job = build_job(setup, stack, resume=resume)
        if instead is not None:
            instead(job)
            return
        _train(setup, job, resume=resume)


def _done_before(setup: Setup, resume: Path | None) -> bool:
    """Whether this very run has ended here already. UserError where it would overwrite what another has left."""
    from offload_trainer.export.final import done_before
    from offload_trainer.ranks import on_rank_zero, share_from_zero

    found: list[str] = []

    def look() -> None:
        save = setup.config.save
        begins_at, anew = steps_done(resume), save.resume == "never"
        told = done_before(setup.output, setup.record, begins_at=begins_at, anew=anew, exports=save.every == 0)
        found.extend([told] if told else [])

    on_rank_zero(look)
    for line in found:
        setup.log.say(line)
    return bool(share_from_zero(found))


def _check(resume: Path, record: RunRecord, log: Log) -> None:
    log.say(f"checking {resume}")
    for line in check_resume(resume, record):
        log.say(f"note: {line}")


def _hold(stack: ExitStack, setup: Setup, *, resume: Path | None) -> tuple[Path | None, int]:
    """From here on the run directory is this run's; what to go on from, chosen again, and the descriptor of the lock.

    Another run may have ended there since it was chosen, and have left newer checkpoints.
    """
    from offload_trainer.ranks import on_rank_zero, share_from_zero

    chosen, lock = resume, -1

    def on_zero() -> None:
        nonlocal chosen, lock
        lock = stack.enter_context(held(setup.output, setup.log))
        refuse(setup.config, setup.plan)
        chosen = find_resume(setup.config.save.resume, output=setup.output)
        if chosen != resume:
            setup.log.say(f"another run has ended in {setup.output} meanwhile: looking again")
            if chosen:
                _check(chosen, setup.record, setup.log)

    on_rank_zero(on_zero)
    return share_from_zero(chosen), lock


def prepare_run(config: TrainConfig) -> list[Path]:
    """Tokenise the data of `config`; returns the token files' paths, those for validation last."""
    config, plan, _, source = plan_run(config)
    return prepare_data(config, source, plan, say=Log(loud=True).say).paths


def _train(setup: Setup, job: Any, *, resume: Path | None) -> None:
    """The loop, and what follows it."""
    from offload_trainer.trainer import train

    steps, output, log = setup.config.train.steps, setup.output, setup.log
    with waiting(say=log.say_now) as asked:
        if job.cannot_save:
            asked.answer = "finishing this step, then exporting the weights; a checkpoint cannot be made here"
        state = train(job, asked, resume=resume)
        saved = job.checkpoints.saved == state.step
        if job.save_every == 0 and (state.step == steps or not saved):
            asked.answer = "finishing the export of the weights"
            _export_live(setup, job, step=state.step)
        if log.loud:
            report(setup, swaps=job.swaps)
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


def _next_command(output: Path) -> str:
    """How a run's weights become a model, where it has a checkpoint."""
    if not complete_checkpoints(output / "checkpoints"):
        return ""
    return f"; its weights as a model: offload-train export {quote(str(output))} {quote(f'{output}-hf')} --dtype bf16"


def _export_live(setup: Setup, job: Any, *, step: int) -> None:
    """Weights of a run that makes no checkpoints, straight from the engine. All ranks take part."""
    from offload_trainer.export.final import write_final

    weights = job.engine.named_master_parameters()
    if not setup.log.loud:
        for _ in weights:
            pass
        return
    place = write_final(weights, setup.source.shape.weights, setup.output, record=setup.record, step=step)
    setup.log.say(f"weights exported in fp32 to {place}")
