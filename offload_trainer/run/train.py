"""A training run from configuration to report: probe, plan, check, build, train, export, report.

    TrainConfig -> MachineProfile + ModelShape -> Plan -> (data, drive lease, engine) -> trainer.train -> report

Edit this module to change the order of these steps. Nothing is written before the plan has passed all checks. The
command line imports this module, and with it torch, only after it has a valid configuration.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from offload_trainer import trainer
from offload_trainer.checkpoint import RunRecord, TrainState, check_identity, check_resume, find_resume, read_state
from offload_trainer.config import TrainConfig
from offload_trainer.errors import Interrupted, PeerFailed, UserError
from offload_trainer.export.directory import done_before, write_final
from offload_trainer.plan.engines import engine_of, mistakes_of_length
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.plan import Plan
from offload_trainer.ranks import broadcast_json, join, on_rank_zero, on_some, place_here
from offload_trainer.ranks import nodes as node_ranks
from offload_trainer.retention import complete_checkpoints, step_of
from offload_trainer.run.build import Build, Setup, build_engine, build_job, layout_of, planned_identity, record_of
from offload_trainer.run.data import check_data, epoch_line, first_row, prepare_data, unknown_identity
from offload_trainer.run.directory import (
    Log,
    held,
    keep_model,
    refuse_second,
    refuse_strangers,
    run_directory,
    write_known,
)
from offload_trainer.run.memory_fallbacks import as_wished
from offload_trainer.run.page_file_resume import clear_drives, drop, keep, take_over
from offload_trainer.run.planning import Planned, plan_run
from offload_trainer.run.process_setup import ranks_of_environment
from offload_trainer.run.ranks.consistency import refuse_other_data, refuse_other_programs
from offload_trainer.run.ranks.heartbeat import beating
from offload_trainer.run.ranks.node_checks import refuse_node, refuse_unseen
from offload_trainer.run.report import report
from offload_trainer.settings import dump_config
from offload_trainer.signals import waiting
from offload_trainer.stdio import write_now
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.telemetry.trackers import refuse_missing
from offload_trainer.trainer import Job


def refuse(planned: Planned) -> None:
    """Raise UserError for a plan that does not fit, or that cannot write or resume from the requested checkpoints."""
    config, plan = planned.config, planned.plan
    plan.refuse(force=config.placement.force)
    reason = plan.cannot_save
    if not reason:
        return
    if resumes := find_resume(config.save.resume, output=planned.output):
        raise UserError(
            f"{plan.homes} cannot continue {resumes}: {reason}. Use --optimizer cpu, or name another --output"
        )
    if config.save.every != 0:
        raise UserError(
            f"{plan.homes}: no exact checkpoints are possible: {reason}. Add --save-every 0 to train without them "
            "(the weights are exported at the end), or use --engine tiered"
        )


def check_start(planned: Planned, *, say: Callable[[str], None]) -> None:
    """Raise UserError for missing trackers and for data that is missing or not text, before tokenizing anything."""
    refuse_missing(planned.config.save.all_trackers)
    check_data(planned.config.data, planned.source, say=say)


def refuse_output(planned: Planned) -> None:
    """Raise UserError if the run directory holds files that this run can neither resume from nor replace."""
    config = planned.config
    refuse_strangers(planned.output)
    resumes = find_resume(config.save.resume, output=planned.output)
    here = complete_checkpoints(planned.output / "checkpoints")
    newer = [path.name for path in here if resumes and step_of(path) > step_of(resumes)]
    if newer:
        raise UserError(
            f"--resume {config.save.resume}: {config.save.output} holds newer checkpoints ({', '.join(newer)}), from "
            "which the same command would resume next time. Move them away, or name another --output"
        )
    if config.save.resume == "never" and here:
        raise UserError(
            f"--resume never, but {config.save.output} holds checkpoints of an earlier run: name another --output"
        )
    if resumes:
        check_identity(resumes, planned_identity(planned) | unknown_identity(config.data), layout_of(planned))


def train_run(
    config: TrainConfig, *, instead: Callable[[Job], None] | None = None, build: Build = build_engine
) -> None:
    """Train as `config` says. Raises UserError before anything is written, TrainerError after.

    Args:
        config: the configuration; `auto` values are settled by the plan.
        instead: called with the Job in place of the training loop, for trials and benchmarks. No checkpoint, export
            or report is written then.
        build: builds the engine; benchmarks use it to run other engines.
    """
    rank, world = ranks_of_environment()
    log = Log(loud=rank == 0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if config.train.deterministic:
            use_deterministic_algorithms()
    nodes = _join(config, world=world)
    with beating(nodes, rank=rank, say=lambda line: write_now(f"offload-train: {line}")):
        _train_as_rank(config, nodes=nodes, log=log, instead=instead, build=build)


def _train_as_rank(
    config: TrainConfig,
    *,
    nodes: Sequence[range],
    log: Log,
    instead: Callable[[Job], None] | None,
    build: Build,
) -> None:
    """Plan, check and carry out the run on this rank. Collective."""
    refuse_other_programs(config.model_dump(mode="json", exclude={"placement": {"nvme"}}))  # nodes may use other drives
    on_rank_zero(lambda: refuse_second(Path(config.save.output)))
    planned = _plan_together(config, nodes=nodes, log=log)
    on_rank_zero(lambda: check_start(planned, say=lambda _: None))
    on_rank_zero(lambda: refuse_output(planned))
    if not planned.plan.fits:
        log.say("--force: running although the plan says that it does not fit")
    data = prepare_data(planned.config.data, planned.source, seq_len=planned.plan.seq_len, say=log.say)
    setup = Setup(planned, data, record_of(planned, data), log)
    refuse_other_data(setup.record.identity, setup.record.layout)
    with_steps(setup, begins=None)  # only for its checks, before anything is written
    _carry_out(setup, nodes=nodes, instead=instead, build=build)


def with_steps(setup: Setup, *, begins: TrainState | None) -> Setup:
    """Return the setup with `train.steps` computed from `train.epochs`, unless that is `auto`.

    The result is the smallest number of steps that visits all rows of the epochs; the last step may visit a few more.
    `begins`: the state that the run resumes from; its rows count as visited, even if its steps had another size. Raises
    UserError if the warm-up is longer than the run.
    """
    config, plan = setup.planned.config, setup.planned.plan
    if config.train.epochs == "auto":
        return setup
    rows, rows_of_step = len(setup.data.split.train), plan.tokens_per_step // plan.seq_len
    done, visited = (begins.step, begins.data_position) if begins else (0, 0)
    left = max(0, math.ceil(Fraction(str(config.train.epochs)) * rows) - visited)
    steps = max(1, done + math.ceil(Fraction(left, rows_of_step)))
    if mistakes := mistakes_of_length(config.optim, steps=steps):
        raise UserError("; ".join(mistakes))
    train = config.train.model_copy(update={"steps": steps, "epochs": "auto"})
    planned = replace(setup.planned, config=config.model_copy(update={"train": train}))
    return replace(setup, planned=planned, record=record_of(planned, setup.data))


def _plan_together(config: TrainConfig, *, nodes: Sequence[range], log: Log) -> Planned:
    """Return rank 0's plan on every rank. Collective.

    Raises UserError if the plan must not start, or if another node lacks memory or disk space for it.
    """
    rank, found = place_here()[0], list[Planned]()
    on_rank_zero(lambda: found.append(plan_run(config, nodes=len(nodes))))
    here = found[0] if found else plan_run(config, nodes=len(nodes))
    config = TrainConfig.model_validate_json(broadcast_json(json.dumps(here.config.model_dump(exclude_unset=True))))
    plan, machine = broadcast_json((here.plan, here.machine), tuple[Plan, MachineProfile])
    planned = Planned(_with_drives_of(here.config, config), plan, machine, as_wished(here.source, config))
    log.say(plan.describe())
    on_rank_zero(lambda: refuse(planned))
    if len(nodes) > 1:
        on_some(lambda: refuse_node(planned, here.machine), mine=rank in [its.start for its in nodes[1:]])
    return planned


def _with_drives_of(here: TrainConfig, theirs: TrainConfig) -> TrainConfig:
    """Return rank 0's configuration with the drives of this node."""
    return theirs.model_copy(update={"placement": theirs.placement.model_copy(update={"nvme": here.placement.nvme})})


def _join(config: TrainConfig, *, world: int) -> tuple[range, ...]:
    """Join the other ranks and return the ranks of each node.

    Raises UserError if the launcher has started another number of ranks than --gpus says.
    """
    tiered, wished = engine_of(config).name == "tiered", config.placement.gpus
    if tiered and wished not in (1, world):
        raise UserError(
            f"--gpus {wished}, but the launcher has started {world}: leave --gpus out, or start as many ranks"
        )
    if world > 1:
        join()
    if world > 1 and tiered:
        return node_ranks()
    if world > 1:
        from offload_trainer.engine.deepspeed import start_processes

        start_processes()
    return (range(world),)  # DeepSpeed handles several nodes itself; the plan sees one


def use_deterministic_algorithms() -> None:
    """Make torch deterministic on a GPU; operations without a deterministic algorithm raise an error.

    `warn_only` would leave the backward of flash and memory-efficient attention nondeterministic (torch 2.11,
    aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Filling new tensors with NaN would also fill pages and staging buffers, which are written before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _carry_out(setup: Setup, *, nodes: Sequence[range], instead: Callable[[Job], None] | None, build: Build) -> None:
    """Lock the run directory, resume if there is something to resume from, and train to the end."""
    chosen: list[Path | None] = []
    on_rank_zero(lambda: chosen.append(find_resume(setup.planned.config.save.resume, output=setup.output)))
    (resume,) = broadcast_json(chosen, list[Path | None])
    if resume:
        on_rank_zero(partial(_check, resume, setup.record, setup.log))
    with ExitStack() as stack:
        resume, lock = _hold(stack, setup, resume=resume)
        if len(nodes) > 1:
            refuse_unseen(setup.output, first=next(its.start for its in nodes if place_here()[0] in its))
        begins = None if resume is None else read_state(resume)
        wished, setup = setup, with_steps(setup, begins=begins)
        if instead is None and _done_before(setup, begins):
            clear_drives(setup)
            return
        files = take_over(setup, stack, begins=begins) if instead is None else None
        if files is not None:
            resume, begins = None, files.train
            setup = with_steps(wished, begins=begins)
        if setup is not wished:
            _say_steps(wished, setup)
        if setup.log.loud:
            stack.enter_context(run_directory(setup.output, setup.log, lock=lock))
            _write_known(setup)
        resumes: dict[str, Any] = {"instead": files.places, "resume": files.resume} if files else {}
        job = build_job(setup, stack, begins=begins, build=build, **resumes)
        if instead is not None:
            instead(job)
            return
        keep(setup, job)
        _train(setup, job, resume=(resume, begins) if begins else None)
        drop(setup)


def _say_steps(wished: Setup, setup: Setup) -> None:
    """Log the number of steps computed from the epochs."""
    plan, steps, epochs = setup.planned.plan, setup.planned.config.train.steps, wished.planned.config.train.epochs
    rows, rows_of_step = len(setup.data.split.train), plan.tokens_per_step // plan.seq_len
    setup.log.say(f"epochs: {epochs:g} of {rows} rows, {rows_of_step} rows a step: {steps} steps")


def _write_known(setup: Setup) -> None:
    """Write the configuration, plan, machine, model configuration and tokenizer to the run directory."""
    planned, data = setup.planned, setup.data
    write_known(
        setup.output,
        config=dump_config(planned.config),
        plan=planned.plan.to_json(),
        machine=planned.machine.to_json(),
    )
    dtype = DTYPES[planned.config.model.dtype]
    keep_model(
        setup.output / "model", planned.source, dtype=dtype, tokenizer=data.tokenizer, end_of_text=data.end_of_text
    )


def _done_before(setup: Setup, begins: TrainState | None) -> bool:
    """Return True if this run has already finished in this directory. Collective.

    Raises UserError if it would overwrite the results of another run.
    """
    found: list[str] = []

    def look() -> None:
        save, at = setup.planned.config.save, begins.step if begins else 0
        anew, exports = save.resume == "never", save.every == 0
        told = done_before(setup.output, setup.record, begins_at=at, anew=anew, exports=exports)
        found.extend([told] if told else [])

    on_rank_zero(look)
    for line in found:
        setup.log.say(line)
    return bool(broadcast_json(found))


def _check(resume: Path, record: RunRecord, log: Log) -> None:
    log.say(f"checking {resume}")
    for line in check_resume(resume, record):
        log.say(f"note: {line}")


def _hold(stack: ExitStack, setup: Setup, *, resume: Path | None) -> tuple[Path | None, int]:
    """Lock the run directory; return (checkpoint to resume from, descriptor of the lock, -1 except on rank 0).

    The checkpoint is chosen again under the lock, because another run may have ended there meanwhile and have left
    newer ones.
    """
    chosen, lock = resume, -1

    def on_zero() -> None:
        nonlocal chosen, lock
        lock = stack.enter_context(held(setup.output, setup.log))
        refuse(setup.planned)
        refuse_output(setup.planned)
        chosen = find_resume(setup.planned.config.save.resume, output=setup.output)
        if chosen != resume:
            setup.log.say(f"another run has ended in {setup.output} in the meantime: checking again")
            if chosen:
                _check(chosen, setup.record, setup.log)

    on_rank_zero(on_zero)
    return broadcast_json(chosen, Path | None), lock


def prepare_run(config: TrainConfig) -> list[Path]:
    """Tokenize the data of `config` and return the paths of the token files, those for validation last."""
    planned = plan_run(config)
    say = Log(loud=True).say
    data = prepare_data(planned.config.data, planned.source, seq_len=planned.plan.seq_len, say=say)
    plan = planned.plan
    for line in first_row(data, seq_len=plan.seq_len):
        say(line)
    say(epoch_line(data, rows_per_step=plan.tokens_per_step // plan.seq_len, steps=planned.config.train.steps))
    return data.paths


def _train(setup: Setup, job: Job, *, resume: tuple[Path | None, TrainState] | None) -> None:
    """Run the training loop, then export and report. Raises Interrupted if a signal stopped the run."""
    steps, output, log = job.train.steps, setup.output, setup.log
    with waiting(say=log.say_now) as asked:
        if job.cannot_save:
            asked.answer = "finishing this step, then exporting the weights; a checkpoint cannot be made here"
        state = trainer.train(job, asked, resume=resume)
        saved = job.checkpoints.saved == state.step
        if job.save_every == 0 and (state.step == steps or not saved):
            asked.answer = "finishing the export of the weights"
            _export_live(setup, job, step=state.step)
        if log.loud:
            report(setup, swaps=job.swaps)
        if asked.stop:
            drop(setup)
            stopped = Interrupted(_farewell(state.step, steps, saved=saved, output=output), signal_number=asked.stop)
            raise stopped if log.loud else PeerFailed(str(stopped), code=stopped.exit_code)
        log.say(f"done: {steps} steps; {output}{_next_command(output)}")


def _farewell(step: int, steps: int, *, saved: bool, output: Path) -> str:
    if step == steps:
        return f"stopped after step {step}, the last; the run is complete and saved"
    if saved:
        return f"stopped after step {step}, everything saved; the same command resumes from there"
    return (
        f"stopped after step {step}; the weights are in {output / 'export'}, but no checkpoint could be made, so the "
        f"moments are lost: to continue from the weights use --model {output / 'export'} and another --output"
    )


def _next_command(output: Path) -> str:
    """Return the export command to print at the end of a run; "" if there is no checkpoint."""
    if not complete_checkpoints(output / "checkpoints"):
        return ""
    return f"; export the model with: offload-train export {quote(str(output))} {quote(f'{output}-hf')} --dtype bf16"


def _export_live(setup: Setup, job: Job, *, step: int) -> None:
    """Export the weights directly from the engine, for a run without checkpoints. Collective."""
    weights = job.engine.named_master_parameters()
    if not setup.log.loud:
        for _ in weights:
            pass
        return
    place = write_final(weights, setup.planned.source.shape.weights, setup.output, record=setup.record, step=step)
    setup.log.say(f"weights exported in fp32 to {place}")
