"""The loop: data -> engine -> telemetry -> checkpoint, one optimizer step after the other.

It knows no engine and no model. What it is given decides everything; what it holds is a TrainState.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_trainer.checkpoint import Checkpoints, TrainState
from offload_trainer.config import OptimSection, TrainSection
from offload_trainer.data.rows import IGNORED, Batch, DataState, RowReader
from offload_trainer.engine.protocol import Engine, StepResult
from offload_trainer.errors import TrainerError
from offload_trainer.ranks import all_gather_object, on_rank_zero
from offload_trainer.schedule import learning_rate
from offload_trainer.signals import StopRequest
from offload_trainer.telemetry.meters import (
    IoCount,
    PhaseClock,
    allocation_retries,
    device_peak_bytes,
    forget_peak_rss,
    memory_now,
    peak_rss_bytes,
    read_io,
)
from offload_trainer.telemetry.metrics import (
    EvalRecord,
    StepRecord,
    bits_per_byte,
    mfu,
    perplexity,
    tokens_per_second,
)
from offload_trainer.telemetry.sinks import Telemetry


@dataclass
class Job:
    """Everything a run consists of, built and ready."""

    train: TrainSection
    optim: OptimSection
    finds_scale: bool  # of the loss, in fp16: steps that overflow are a part of that
    engine: Engine
    train_rows: RowReader
    validation_rows: RowReader | None
    text_bytes: Callable[[torch.Tensor], int | None]  # that ids stand for; None: not known
    clock: PhaseClock
    telemetry: Telemetry | None  # rank 0 only
    sample: Callable[[Engine], str] | None
    say: Callable[[str], None]
    checkpoints: Checkpoints
    cannot_save: str | None  # why no exact checkpoint can be made here
    save_every: int  # 0: only when asked
    save_wish: Path  # a file that asks for a checkpoint by being there
    flops_per_step: float  # of all ranks, forward and backward
    peak_flops: float | None  # a second's, that products reach on this machine, all ranks; None: not timed
    swaps: list[Path]  # the run's private directories on drives
    commit: Callable[[TrainState], None] | None = None  # page files are of this state, after all else of its step
    counted: IoCount | None = None  # where the last step's update went on: what drives had moved when it returned


def train(job: Job, asked: StopRequest, *, resume: tuple[Path | None, TrainState] | None = None) -> TrainState:
    """Train to the last step, or to that in which a signal asks to stop; returns the state there, saved if it can be.

    `resume`: a checkpoint that was checked, or None where the engine stands there already, and the state. Raises
    TrainerError where `optim.on_nonfinite_grad` is `stop` and a gradient was not finite: the weights are those of
    the step before.
    """
    state = TrainState(step=0, tokens=0, data_position=0)
    if resume is not None:
        checkpoint, state = resume
        if checkpoint is not None:
            job.engine.load(checkpoint)
            job.checkpoints.saved = state.step
            job.say(f"resumed from {checkpoint}, step {state.step}")
    batches = job.train_rows.train_batches(
        DataState(state.data_position),
        micro_batch=job.train.micro_batch_size,
        rank=job.engine.rank,
        world=job.engine.world,
    )
    with job.checkpoints:
        if resume is not None and resume[0] is None and state.step >= job.train.steps:
            _save_if_due(job, state, stopping=True, wished=False, ended=False)  # nothing else has what was gone on from
        while state.step < job.train.steps:
            state = _step(job, state, batches)
            last = state.step == job.train.steps
            if _due(state.step, job.train.eval_every) or last:
                _evaluate(job, state.step)
            if job.sample and _due(state.step, job.train.sample_every):
                job.say(f"step {state.step} sample: {job.sample(job.engine)!r}")
            stop, wished, ended = _agree(job, asked)
            _save_if_due(job, state, stopping=bool(stop), wished=wished, ended=ended)
            if stop:
                asked.stop = stop  # another rank's, perhaps; one that came since they agreed is for the next step
                break
            if job.commit and state.step < job.train.steps:  # from the last one a next start would have nothing to do
                job.commit(state)
    return state


def _save_if_due(job: Job, state: TrainState, *, stopping: bool, wished: bool, ended: bool) -> None:
    """A checkpoint where one is due, or wished for, or the last before a stop. Returns once that one is whole.

    `ended`: the one under way has, on all ranks.
    """
    last = state.step == job.train.steps
    if wished and job.cannot_save:
        job.say(f"no checkpoint was made: {job.cannot_save}")
    due = wished or (stopping and not last) or (job.save_every and (_due(state.step, job.save_every) or last))
    if due and not job.cannot_save:
        try:
            job.checkpoints.save(job.engine, state)
            if stopping:
                job.checkpoints.synchronize()
        except TrainerError as error:
            if not stopping or job.save_every:
                raise
            job.say(f"no checkpoint was made: {error}")  # then the weights alone are kept
    elif ended:
        job.checkpoints.synchronize()


def _agree(job: Job, asked: StopRequest) -> tuple[int, bool, bool]:
    """The signal to stop for, or 0; whether a checkpoint is wished for; whether the one under way has ended.

    On every rank the same, after the same step.
    """
    wished = False
    if asked.save:
        asked.save, wished = False, True
    if job.telemetry and os.path.lexists(job.save_wish):
        wished |= _taken_wish(job)
    stops, wishes, ended = zip(*all_gather_object((asked.stop, wished, job.checkpoints.ended)), strict=True)
    return max(stops), any(wishes), all(ended)


def _taken_wish(job: Job) -> bool:
    """Whether the file that asks for a checkpoint could be taken away; else it would ask for ever."""
    try:
        job.save_wish.unlink()
    except OSError as error:  # a directory, or a file in a directory that others own
        job.checkpoints.note(
            f"{job.save_wish} is ignored as a request for a checkpoint, because it cannot be removed: {error.strerror}"
        )
        return False
    return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step(job: Job, state: TrainState, batches: Iterator[Any]) -> TrainState:
    """One optimizer step, measured."""
    lr = learning_rate(state.step, job.optim, steps=job.train.steps)
    before = job.counted or read_io()
    group, result, seconds = _carry_out(job, batches, lr=lr, last=state.step + 1 == job.train.steps)
    after = read_io()
    drive, tokens = _of_all_ranks(job, after - before, tokens=sum(batch.tokens for batch in group))
    job.counted = after if result.goes_on else None
    state = replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + tokens,
        data_position=group[-1].state.position,
    )
    if job.telemetry:
        job.telemetry.step(
            StepRecord(
                step=state.step,
                tokens=state.tokens,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                loss_scale=result.loss_scale,
                seconds=seconds,
                tokens_per_second=tokens_per_second(tokens, seconds=seconds),
                mfu=mfu(job.flops_per_step, seconds=seconds, peak_flops=job.peak_flops),
                phases=job.clock.take(),
                nvme_read_bytes=drive.read_bytes,
                nvme_written_bytes=drive.written_bytes,
                memory=memory_now(job.swaps),  # before the peak, which is then no less
                host_rss_bytes=peak_rss_bytes(),
                device_peak_bytes=device_peak_bytes(),
                skipped=result.skipped,
                allocation_retries=allocation_retries(),
                hidden=result.hidden,
            )
        )
    else:
        job.clock.take()
    if result.skipped:
        on_rank_zero(partial(_refuse_nonfinite, job, result, step=state.step))
    return state


def _of_all_ranks(job: Job, moved: IoCount, *, tokens: int) -> tuple[IoCount, int]:
    """Return the drive traffic and the tokens of all ranks. Traffic is unknown where one rank does not know its own.

    Ranks that share rows (sequence or tensor parallel) each hold all of them, and their tokens count once.
    """
    read, written, counts = zip(*all_gather_object((moved.read_bytes, moved.written_bytes, tokens)), strict=True)
    drive = IoCount(*(None if None in way else sum(way) for way in (read, written)))
    return drive, sum(counts) * job.engine.world // len(counts)


def _carry_out(
    job: Job, batches: Iterator[Batch], *, lr: float, last: bool = False
) -> tuple[list[Batch], StepResult, float]:
    """The next step's batches, its result, and its seconds; the `last` one's have all of its update."""
    start = time.perf_counter()
    with job.clock.phase("data"):
        group = [next(batches) for _ in range(job.train.gradient_accumulation_steps)]
    result = job.engine.train_step(group, lr=lr, clock=job.clock)
    if last:
        with job.clock.phase("update"):
            job.engine.synchronize()
    return group, result, time.perf_counter() - start


def timed_steps(job: Job, *, steps: int) -> Iterator[dict[str, Any]]:
    """The loop without all that is not a step: what each took, its result, and the peak of memory in it.

    Drive traffic is counted from the last step's end to this one's: what an engine leaves for later is in a later one.
    """
    train = job.train
    batches = job.train_rows.train_batches(DataState(0), micro_batch=train.micro_batch_size)
    counted = read_io()
    for number in range(steps):
        forget_peak_rss()
        rate = learning_rate(number, job.optim, steps=train.steps)
        _, result, seconds = _carry_out(job, batches, lr=rate)
        before, counted = counted, read_io()
        peaks = {"peak_rss": peak_rss_bytes(), "device_peak": device_peak_bytes(), "retries": allocation_retries()}
        yield {"step": seconds, **job.clock.take(), **asdict(result), **asdict(counted - before), **peaks}


def _refuse_nonfinite(job: Job, result: StepResult, *, step: int) -> None:
    finding = job.finds_scale and result.loss_scale > 1  # skipping is how the scale finds its value
    if finding:
        return
    if job.optim.on_nonfinite_grad == "stop":
        raise TrainerError(
            f"step {step}: NaN or infinity in the gradient (loss {result.loss:.4g}); the weights are those of step "
            f"{step - 1}. Lower optim.lr, check the data of this step, or use optim.on_nonfinite_grad=skip"
        )
    job.say(f"step {step} skipped: NaN or infinity in the gradient (loss {result.loss:.4g})")


def _evaluate(job: Job, step: int) -> None:
    if job.validation_rows is None:
        return
    total, targets = 0.0, []
    for batch in job.validation_rows.validation_batches(
        micro_batch=job.train.micro_batch_size, limit=job.train.eval_rows
    ):
        total += job.engine.eval_loss(batch) * batch.counted
        targets.append(batch.targets[batch.targets != IGNORED])
    predicted = torch.cat(targets) if targets else torch.empty(0)
    if not predicted.numel() or not job.telemetry:
        return
    loss = total / predicted.numel()
    job.telemetry.evaluation(
        EvalRecord(
            step=step,
            validation_loss=loss,
            perplexity=perplexity(loss),
            bits_per_byte=bits_per_byte(loss, tokens=predicted.numel(), text_bytes=job.text_bytes(predicted)),
        )
    )
