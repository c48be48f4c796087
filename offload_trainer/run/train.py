"""A training run from configuration to report: probe, plan, check, resume, build, train, save, report.

Edit this module to change the order of these steps. Nothing is written before the plan has passed all checks.
"""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

import torch

from offload_trainer import ranks
from offload_trainer.common.errors import (
    RERUN_HINT,
    GpuFull,
    Interrupted,
    PeerFailed,
    TrainerError,
    UserError,
    fills_gpu,
)
from offload_trainer.common.stdio import write_now
from offload_trainer.common.units import format_bytes, format_seconds
from offload_trainer.config import PlacementSection, TrainConfig
from offload_trainer.data.rows import first_row
from offload_trainer.data.run_data import epoch_line, prepare_data
from offload_trainer.machine.rate_cache import keep_free
from offload_trainer.run import checks, loop, machine_rates, resume
from offload_trainer.run.build import Setup, build_job, with_steps
from offload_trainer.run.checkpoint import TrainState, read_state
from offload_trainer.run.directory import Log, hold, run_directory, write_known
from offload_trainer.run.loop import Job
from offload_trainer.run.planning import plan_run, plan_with_room, shared_plan
from offload_trainer.run.process_setup import ECHO, has_launcher, ranks_of_environment
from offload_trainer.run.signals import waiting
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.retention import complete_checkpoints, step_of
from offload_trainer.telemetry.metrics import StepRecord, median_phases, read_evaluations, read_metrics, steady
from offload_trainer.telemetry.report import predicted_row, report_page

_MOST_ROWS = 800  # steps of which a page is made
_MORE_FREE = 0.02  # least share of a GPU that stays free in addition after it was full; at most a tenth does
_AGAIN = "; `offload-train bench` times this machine again, for later plans"
_BUSY = 2 / 3  # ratio below which the machine was busy when its rates were measured
_TELLING = 3  # least number of steps after the warm-up steps for usable timings


def train_run(config: TrainConfig, *, instead: Callable[[Job], None] | None = None) -> None:
    """Train as `config` says, or call `instead` with the Job, for trials. UserError: nothing was written."""
    rank, world = ranks_of_environment()
    log = Log(loud=rank == 0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # In 1 of 100 processes whose first exponential or sine is on several threads, MKL's is wrong on one of them.
    torch.ones(1).exp()
    if torch.cuda.is_available():
        number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if number > count:
            raise PeerFailed("the rank before this one lacks a GPU too", code=2)
        if number == count:
            raise UserError(f"torch sees {count} GPU(s) here, and more ranks were started: --gpus {count}")
        torch.cuda.set_device(number)
        if config.train.deterministic:
            use_deterministic_algorithms()
    nodes = _join(config.placement, world=world)
    ranks.end_if_rank_vanishes(say=lambda line: write_now(f"offload-train: {line}"))
    with ExitStack() as stack:
        lock = hold(stack, Path(config.save.output), log, create=False)  # before anything in it is read
        setup, checkpoint, finished = _set_up(config, nodes=nodes, log=log)
        if ranks.from_rank_zero(lambda: lock < 0, bool):
            lock = hold(stack, setup.output, log, create=True)
            ranks.everybody().first(lambda: checks.refuse_another(setup, checkpoint))
        if finished and instead is None:
            resume.clear(setup)
            return
        attempt = partial(_run_once, lock=lock, nodes=nodes, instead=instead)
        began = read_state(checkpoint).step if checkpoint else 0
        full = _full(partial(attempt, setup, checkpoint))
        if full and instead is not None:
            raise full
        while full:
            try:
                setup, checkpoint = _with_room(config, setup, full, began=began)
                full = _full(partial(attempt, setup, checkpoint, unvalidated=full.unvalidated))
            except UserError as error:  # something has been written
                raise TrainerError(f"{full}, and with less on it {error}") from error


def _full(attempt: Callable[[], None]) -> GpuFull | None:
    """Carry out a run; return the error if it ended because the GPU is full."""
    try:
        attempt()
    except Exception as error:
        if not fills_gpu(error):
            raise
        full = error if isinstance(error, GpuFull) else GpuFull(error)
        full.__cause__ = full.__context__ = None  # their frames hold tensors
        return full.with_traceback(None)
    return None


def _with_room(config: TrainConfig, before: Setup, full: GpuFull, *, began: int) -> tuple[Setup, Path | None]:
    """Return the setup of a plan that needs less of the GPU, and the checkpoint to resume from, if any.

    `began`: the step at which the run began; newer checkpoints are its own. Raises UserError if no plan fits, and
    TrainerError for several ranks or DeepSpeed, whose next start plans so.
    """
    gc.collect()
    torch.cuda.empty_cache()
    machine, log, output = before.machine, before.log, before.output
    more = min(max(full.missing, int(_MORE_FREE * machine.gpu_bytes)), machine.gpu_bytes // 10)
    text = f"{full}. Plans need {format_bytes(more)} less of it from now on"
    if alone := before.plan.work.world == 1 and before.plan.engine == "tiered":
        saved = complete_checkpoints(output / "checkpoints")
        if config.save.resume != "auto" and saved and step_of(saved[-1]) > began:
            config = config.with_keys("save", resume=str(saved[-1]))
        planned, moved = plan_with_room(config, before, more=more)
        checks.refuse(planned)
        if not moved:
            raise TrainerError(f"{full}, and --force keeps all that is on it; {RERUN_HINT} without it")
    try:
        keep_free(machine, more=more)
    except (OSError, TrainerError) as error:
        log.say(f"note: later plans will not know that: {error}")
    if not alone:
        raise TrainerError(f"{text}; {RERUN_HINT}")
    with log.opened(output):
        log.say(f"{text}; on the GPU: {', '.join(moved)}")
    setup, checkpoint = replace(before, **vars(planned)), checks.refuse_output(planned)
    if checkpoint:
        resume.finished(setup, checkpoint)
    return setup, checkpoint


def use_deterministic_algorithms() -> None:
    """Make torch deterministic on a GPU; operations without a deterministic algorithm raise an error.

    `warn_only` would leave the backward of flash and memory-efficient attention nondeterministic (torch 2.11,
    aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Filling new tensors with NaN would also fill pages and staging buffers, which are written before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _join(place: PlacementSection, *, world: int) -> tuple[range, ...]:
    """Join the other ranks and return the ranks of each node. Raises UserError if --gpus says another number."""
    tiered, wished = place.engine_name == "tiered", place.gpus
    if tiered and wished not in (1, world):
        raise UserError(f"--gpus {wished}, but the launcher has started {world}: leave it out, or start as many ranks")
    if world > 1:
        ranks.join()
    if tiered:
        return ranks.nodes()
    if world > 1:
        from offload_trainer.engine.deepspeed import start_processes

        start_processes()
    return (range(world),)  # DeepSpeed handles several nodes itself; the plan sees one


def _set_up(config: TrainConfig, *, nodes: Sequence[range], log: Log) -> tuple[Setup, Path | None, bool]:
    """Plan, refuse what cannot start, prepare data; return setup, checkpoint, and whether it has finished."""
    alike = config.model_dump(mode="json", exclude={"placement": {"nvme"}})  # nodes may use other drives
    checks.refuse_other_programs(alike)
    first = ranks.everybody().first
    here = ranks.rank_zero_first(partial(plan_run, config, nodes=len(nodes)))
    planned = shared_plan(here)
    if not (lacks_rates := machine_rates.is_due(planned)):
        log.say(planned.plan.describe(steps=config.train.known_steps))
    first(lambda: checks.refuse(planned))
    of_others = ranks.place_here()[0] in [its.start for its in nodes[1:]]  # the first rank of another node
    ranks.everybody().some(lambda: checks.refuse_node(planned, here.machine), mine=of_others)
    first(lambda: checks.check_start(planned, say=lambda _: None))
    checkpoint = ranks.from_rank_zero(lambda: checks.refuse_output(planned), Path | None)
    if lacks_rates:
        measured = replace(planned, machine=machine_rates.rates_at_start(planned, say=log.say))
        found = [measured]
        first(lambda: found.append(plan_run(config, again=measured)))
        planned = shared_plan(found[-1])
        log.say(planned.plan.describe(steps=config.train.known_steps))
        first(lambda: checks.refuse(planned))
    if not planned.plan.fits:
        log.say("--force: running although the plan says that it does not fit")
    data = prepare_data(planned.config.data, planned.source, seq_len=planned.plan.work.seq_len, say=log.say)
    setup = Setup(**vars(planned), data=data, log=log)
    checks.refuse_other_data(setup.record.identity, setup.record.layout)
    with_steps(setup, None)  # only for its checks, before anything is written
    return setup, checkpoint, resume.finished(setup, checkpoint)


def prepare_run(config: TrainConfig) -> list[Path]:
    """Tokenize the data of `config` and return the paths of the token files, those for validation last."""
    planned = plan_run(config)
    plan, say = planned.plan, Log(loud=True).say
    data = prepare_data(planned.config.data, planned.source, seq_len=plan.work.seq_len, say=say)
    for line in first_row(data.tokens, data.spec.tokenizer, seq_len=data.spec.seq_len):
        say(line)
    say(epoch_line(data, rows_per_step=plan.work.tokens // plan.work.seq_len, steps=planned.config.train.steps))
    return list(dict.fromkeys((*data.tokens.paths, *data.held_out.paths)))


def _run_once(
    setup: Setup,
    checkpoint: Path | None,
    *,
    lock: int,
    nodes: Sequence[range],
    instead: Callable[[Job], None] | None,
    unvalidated: int = 0,
) -> None:
    """Resume if there is something to resume from, and train to the end, in the locked run directory."""
    log = setup.log
    with ExitStack() as stack:
        if len(nodes) > 1:
            checks.refuse_unseen(setup.output, first=next(its.start for its in nodes if ranks.place_here()[0] in its))
        begins = None if checkpoint is None else read_state(checkpoint)
        files, places = resume.take_over(setup, stack, begins=begins) if instead is None else (None, ())
        if files is not None:
            checkpoint, begins = None, files.train
        setup = with_steps(setup, begins, say=log.say)
        if log.loud:
            stack.enter_context(run_directory(setup.output, log, lock=lock))
            write_known(setup, setup.data)
        resumes: dict[str, Any] = {"instead": places, "resume": files.resume} if files else {}
        job = build_job(setup, stack, begins=begins, **resumes)
        if instead is not None:
            instead(job)
            return
        job.unvalidated = unvalidated
        resume.keep(setup, job)
        _train_to_end(setup, job, begins=begins, checkpoint=checkpoint)
        resume.clear(setup)


def _train_to_end(setup: Setup, job: Job, *, begins: TrainState | None, checkpoint: Path | None) -> None:
    """Run the training loop to its end, and report. Raises Interrupted if a signal stopped the run."""
    steps, output, log = job.train.steps, setup.output, setup.log
    with waiting(say=log.say_now, same_within=ECHO if has_launcher() else 0.0) as asked:
        asked.too_late = partial(loop.too_late, job)
        if job.cannot_save:
            asked.answer = "finishing this step, then saving the weights; their moments cannot be saved here"
        if job.telemetry:
            job.telemetry.page = partial(_run_page, setup, swaps=job.swaps)
        try:
            state = loop.train(job, asked, begins=begins, checkpoint=checkpoint)
        except GpuFull as full:
            if asked.stop:
                message = f"{full}, and the run was asked to stop; {RERUN_HINT}"
                raise Interrupted(message, code=128 + asked.stop) from full
            raise
        except Exception:
            if job.telemetry:
                job.telemetry.end(failed=True)
            raise
        saved = job.checkpoints.saved == state.step
        kept = bool(asked.stop) and not saved and state.step < steps and resume.keep_step(job, state)
        if job.save_every == 0 and not saved and not kept:
            asked.answer = "finishing the save of the weights"
            job.checkpoints.save(job.engine, state, weights=setup.source.shape.weights)
        if job.telemetry and (rows := read_metrics(output / "metrics.jsonl", most=_MOST_ROWS)):
            job.telemetry.end()
            told = _compared(median_phases(rows), setup.plan.forecast.in_line)
            if told and len(steady(rows)) >= _TELLING:
                log.say(told)
        words = f"offload-train export {quote(str(output))} {quote(f'{output}-hf')}"
        if asked.stop:
            ranks.wait_for_all()  # a rank that ended while others still write would end them too
            if not kept:
                resume.drop(setup)
            told = f"stopped after step {state.step}"
            if state.step == steps:
                told += ", the last; the run is complete and saved"
            elif saved or kept:
                where = "saved" if saved else "in page files"
                told += f", everything {where}; the same command resumes from there"
            else:
                told += "; only the weights could be saved. To train them on without moments, export them "
                told += f"({words} --dtype fp32) and give that as --model with another --output"
            raise (Interrupted if log.loud else PeerFailed)(told, code=128 + asked.stop)
        log.say(f"done: {steps} steps; {output}; export the model with: {words} --dtype bf16")


def _compared(took: Mapping[str, float], planned: Mapping[str, float | None]) -> str:
    """Return how many times the plan's seconds each phase took, and what to do if its rates are of a busier machine."""
    ratios = {phase: took[phase] / known for phase, known in planned.items() if known and phase in took}
    again = _AGAIN if ratios.get("backward", 1.0) < _BUSY else ""
    listing = ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in ratios.items())
    return f"took, times the plan's seconds: {listing}{again}" if ratios else ""


def _run_page(setup: Setup, left: float | None, *, swaps: list[Path]) -> str:
    """Return a run's page with about 800 of its steps. `left`: the seconds to its end; None: it has ended."""
    rows = read_metrics(setup.output / "metrics.jsonl", most=_MOST_ROWS)
    return report_page(
        title=f"{setup.config.model.name}: {setup.plan.homes}",
        rows=rows,
        evaluations=read_evaluations(setup.output / "evaluations.jsonl"),
        progress=(setup.config.train.steps, left),
        predicted=_predicted(setup, rows, swaps=swaps),
        notes=setup.plan.notes,
    )


def _predicted(setup: Setup, rows: Sequence[StepRecord], *, swaps: list[Path]) -> list[tuple[str, ...]]:
    """Return rows of predicted and measured numbers: bytes of each tier and of a step's traffic, seconds by phase."""
    if not rows:
        return []
    plan, output, counted = setup.plan, setup.output, steady(rows)
    measured: dict[str, int | None] = {"gpu": max(row.device_peak_bytes for row in rows)}
    measured["ram"] = max(row.host_rss_bytes for row in rows) if plan.work.world == 1 else None
    for drive, swap in zip(setup.drives, swaps, strict=False):
        measured[str(drive.resolve())] = bytes_below(swap)
    measured[str(output.expanduser().absolute())] = bytes_below(output / "checkpoints")
    table = []
    for tier in dict.fromkeys([*plan.tiers, *measured]):
        room = plan.tiers.get(tier, {})
        table += predicted_row(tier, room.get("need"), measured.get(tier), format_bytes, room.get("have"))
    on_drives = [moved for moved in plan.traffic if moved.place != "device"]
    for way, key in (("read", "nvme_read_bytes"), ("written", "nvme_written_bytes")):
        moved = [getattr(row, key) for row in counted]
        need = plan.work.nodes * sum(getattr(part, way) for part in on_drives)
        table += predicted_row(f"{way} on drives, a step", need, None if None in moved else median(moved), format_bytes)
    forecast, taken = plan.forecast.in_line, median_phases(rows)
    for phase in dict.fromkeys([*forecast, *taken]):
        table += predicted_row(phase, forecast.get(phase), taken.get(phase), format_seconds)
    known = [seconds for seconds in forecast.values() if seconds is not None]
    if taken.keys() == forecast.keys() and len(known) == len(forecast):  # otherwise the ratio would mislead
        table += predicted_row("all phases, added", sum(known), sum(taken.values()), format_seconds)
    return table
