"""Training loop: data -> engine -> telemetry -> checkpoint, one optimizer step after another.

The loop is independent of the engine and the model. Everything it uses is in a Job; its only state is a TrainState.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import GpuFull, TrainerError, fills_gpu
from offload_trainer.common.units import format_seconds
from offload_trainer.config import OptimSection, TrainSection
from offload_trainer.data.rows import Batch, RowReader
from offload_trainer.engine.protocol import Engine, StepResult
from offload_trainer.ranks import all_gather_json, everybody, place_here, wait_for_all
from offload_trainer.run.checkpoint import Checkpoints, TrainState
from offload_trainer.run.signals import StopRequest
from offload_trainer.telemetry.meters import IoCount, PhaseClock, forget_peak_rss, memory_of_step, read_io
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord
from offload_trainer.telemetry.sinks import Telemetry

_AUTO_WARMUP, _AUTO_DECAY = 0.02, 0.20  # shares of a run's steps
_LATEST = 5  # steps, of which the longest counts
_MARGIN, _SECONDS_TO_END = 1.1, 1.0  # factor on an estimate that must be kept; time to close everything


class TimeToSave:
    """Estimate of the seconds until the current step is saved, for `train.stop_within`; a signal handler reads it."""

    def __init__(self, *, step: float | None, save: float) -> None:
        """Start with the plan's seconds of a step (None: unknown) and of a checkpoint, until both were measured."""
        self._planned_step, self.save = step, save
        self._took = {"step": deque[float](maxlen=_LATEST), "validation": deque[float](maxlen=1)}
        self._left: tuple[str, ...] = ("save",)
        self._since = time.monotonic()

    def begin(self, *phases: str) -> None:
        """Begin the first of the phases ("step", "validation", "save") that are left until the step is saved."""
        now = time.monotonic()
        if (ended := self._left[0]) in self._took:
            self._took[ended].append(now - self._since)
        self._left, self._since = phases, now

    @property
    def seconds(self) -> float | None:
        """Return the estimate; None in a first step whose seconds the plan does not know."""
        known = {"step": max(self._took["step"], default=self._planned_step), "save": self.save}
        known["validation"] = max(self._took["validation"], default=0.0)
        this, *later = (known[phase] for phase in self._left)
        return None if this is None else max(this - time.monotonic() + self._since, 0.0) + sum(filter(None, later))


@dataclass
class Job:
    """Everything that the training loop needs, built and ready to run."""

    train: TrainSection
    optim: OptimSection
    dynamic_loss_scale: bool  # fp16 with dynamic loss scaling, in which overflowing steps are expected
    engine: Engine
    train_rows: RowReader
    validation_rows: RowReader | None
    clock: PhaseClock
    telemetry: Telemetry | None  # rank 0 only
    say: Callable[[str], None]
    checkpoints: Checkpoints
    to_save: TimeToSave
    cannot_save: str | None  # why this run cannot write exact checkpoints; None: it can
    save_every: int  # steps between checkpoints; 0: on request, and weights alone at the end
    save_request_file: Path  # creating this file requests a checkpoint
    flops_per_step: float  # forward and backward, all ranks
    peak_flops: float | None  # FLOP/s of matrix products measured on this machine, all ranks; None: not measured
    swaps: list[Path]  # the run's private directories on drives
    commit: Callable[[TrainState], None] | None = None  # records that the page files hold this state; last in a step
    unvalidated: int = 0  # complete step whose validation is due, since the GPU was full; 0: none
    counted: IoCount | None = None  # drive counters after the last step, if its update was still running then


def train(job: Job, asked: StopRequest, *, begins: TrainState | None, checkpoint: Path | None) -> TrainState:
    """Train until the last step or a stop signal; return the final state. `checkpoint` or the engine has the first."""
    state, every = begins or TrainState(step=0, tokens=0, data_position=0), job.train.eval_every
    if checkpoint is not None:
        job.engine.load(checkpoint)
        job.checkpoints.saved = state.step
        job.say(f"resumed from {checkpoint}, step {state.step}")
    batches = _batches(job, state.data_position)
    with job.checkpoints:
        if checkpoint is None and state.step >= job.train.steps:
            # The run is already complete, but only the page files hold its state: write the checkpoint now.
            _save_if_due(job, state, stopping=True, wished=False, ended=False)
        while state.step < job.train.steps:
            try:
                if state.step and state.step == job.unvalidated:
                    _evaluate(job, state.step)
                last = state.step + 1 == job.train.steps
                validates = last or (every > 0 and (state.step + 1) % every == 0)
                job.to_save.begin(*(["step", "validation", "save"] if validates else ["step", "save"]))
                state, job.unvalidated = _step(job, state, batches), 0
                if validates:
                    job.to_save.begin("validation", "save")
                    _evaluate(job, state.step)
            except Exception as error:
                if not fills_gpu(error):
                    raise
                _keep(job, state)
                raise GpuFull(error, unvalidated=job.unvalidated) from error
            job.to_save.begin("save")
            stop, wished, ended = _agree(job, asked)
            _save_if_due(job, state, stopping=bool(stop), wished=wished, ended=ended)
            if stop:
                asked.stop = stop  # the signal may have reached another rank only
                break
            if job.commit and state.step < job.train.steps:  # after the last step there is nothing to resume
                job.commit(state)
    return state


def _batches(job: Job, position: int) -> Iterator[Batch]:
    size, engine = job.train.micro_batch_size, job.engine
    return job.train_rows.train_batches(position, micro_batch=size, rank=engine.rank, world=engine.world)


def _keep(job: Job, state: TrainState) -> None:
    """Save the last complete step when the GPU is full, unless the update was under way or it was the run's last."""
    if place_here()[1] > 1 or job.cannot_save or state.step in (0, job.train.steps):
        return
    try:
        job.checkpoints.synchronize()
        if job.checkpoints.saved != state.step:
            job.engine.abandon_step()
            job.checkpoints.save(job.engine, state)
            job.checkpoints.synchronize()
    except Exception as error:
        job.say(f"note: no checkpoint of step {state.step} can be made: {' '.join(str(error).split())[:300]}")


def too_late(job: Job) -> str | None:
    """Return why finishing this step and saving exceeds `train.stop_within`, None if it does not or is not known."""
    within, seconds = job.train.stop_within, job.to_save.seconds
    if within == "auto" or seconds is None:
        return None
    if job.checkpoints.saving:
        seconds += job.to_save.save  # The checkpoint in progress is completed first.
    seconds = seconds * _MARGIN + _SECONDS_TO_END
    if seconds <= within:
        return None
    return f"finishing and saving would take {format_seconds(seconds)}, longer than train.stop_within={within:g}"


def _save_if_due(job: Job, state: TrainState, *, stopping: bool, wished: bool, ended: bool) -> None:
    """Save if due, requested, or stopping (and then wait for it). `ended`: a background save is to be collected."""
    last = state.step == job.train.steps
    if wished and job.cannot_save:
        job.say(f"no checkpoint was made: {job.cannot_save}")
    due = wished or (stopping and not last) or (job.save_every and (state.step % job.save_every == 0 or last))
    try:
        if due and not job.cannot_save:
            job.checkpoints.save(job.engine, state)
            if stopping or (last and not job.save_every):
                job.checkpoints.synchronize()
        elif ended:
            job.checkpoints.synchronize()
    except TrainerError as error:
        if job.save_every:
            raise
        job.say(f"no checkpoint was made: {error}")  # the run still saves its last weights


def _agree(job: Job, asked: StopRequest) -> tuple[int, bool, bool]:
    """Agree with all ranks on (stop signal or 0, checkpoint requested, background save finished). Collective."""
    if wished := asked.save:
        asked.save = False
    if job.telemetry:
        with suppress(OSError):  # no such file, a directory, or a file in a directory that is not writable
            job.save_request_file.unlink()
            wished = True
    stops, wishes, ended = zip(*all_gather_json((asked.stop, wished, job.checkpoints.ended)), strict=True)
    return max(stops), any(wishes), all(ended)


def _step(job: Job, state: TrainState, batches: Iterator[Any]) -> TrainState:
    lr = learning_rate(state.step, job.optim, steps=job.train.steps)
    before = job.counted or read_io()
    group, result, seconds = _timed_step(job, batches, lr=lr, last=state.step + 1 == job.train.steps)
    after, phases = read_io(), job.clock.take()
    drive, tokens = _of_all_ranks(job, after - before, tokens=sum(batch.tokens for batch in group))
    job.counted = after if result.update_running else None
    state = TrainState(step=state.step + 1, tokens=state.tokens + tokens, data_position=group[-1].data_position)
    if job.telemetry:
        record = StepRecord(
            step=state.step,
            tokens=state.tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            loss_scale=result.loss_scale,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu=job.flops_per_step / seconds / job.peak_flops if job.peak_flops else None,
            phases=phases,
            nvme_read_bytes=drive.read_bytes,
            nvme_written_bytes=drive.written_bytes,
            skipped=result.skipped,
            hidden=result.hidden,
            **memory_of_step(job.swaps),
        )
        job.telemetry.step(record)
    job.to_save.save = job.checkpoints.seconds or job.to_save.save
    if result.skipped:
        everybody().first(partial(_refuse_nonfinite, job, result, step=state.step))
    return state


def _of_all_ranks(job: Job, moved: IoCount, *, tokens: int) -> tuple[IoCount, int]:
    """Return drive traffic (None if a rank cannot count it) and tokens of all ranks; rows they share count once."""
    mine = (moved.read_bytes, moved.written_bytes, tokens)
    read, written, counts = zip(*all_gather_json(mine), strict=True)
    drive = IoCount(*(None if None in way else sum(way) for way in (read, written)))
    return drive, sum(counts) * job.engine.world // len(counts)


def _timed_step(
    job: Job, batches: Iterator[Batch], *, lr: float, last: bool = False
) -> tuple[list[Batch], StepResult, float]:
    """Run the next step, the `last` one with its update; return its micro-batches, its result and its seconds."""
    start = time.perf_counter()
    with job.clock.phase("data"):
        group = [next(batches) for _ in range(job.train.gradient_accumulation_steps)]
        wait_for_all()  # without the limit of a step: a rank may tokenize a stream for long
    result = job.engine.train_step(group, lr=lr, clock=job.clock)
    if last:
        with job.clock.phase("update"):
            job.engine.synchronize()
    return group, result, time.perf_counter() - start


def learning_rate(step: int, section: OptimSection, *, steps: int) -> float:
    """Return the learning rate of the 0-based `step` in a run of `steps`: a pure function, which needs no saved state.

    The warm-up is ``lr * (step + 1) / warmup``; that of `wsd` rises from ``lr * final_lr_ratio``. Then `cosine` and
    `linear` decay over all remaining steps, and `wsd` over the last `decay_steps`. Each reaches exactly
    ``lr * final_lr_ratio`` at step ``steps - 1``, unless the warm-up fills the run. Beyond it the rate stays constant.

    A `schedule_delay` of n gives each step the rate of the step n before it. With 1 the rates are those of
    transformers' schedules: the warm-up is ``lr * step / warmup``, and without one the decay begins at step 0 too.
    """
    last = steps - 1
    step = min(step, last) - section.schedule_delay
    warmup = round(_AUTO_WARMUP * steps) if section.warmup_steps == "auto" else section.warmup_steps
    if warmup and step < warmup:
        begin = section.final_lr_ratio if section.schedule == "wsd" else 0.0
        return section.lr * (begin + (1 - begin) * (max(step + 1, 0) / warmup))

    first = -1 if section.schedule_delay and not warmup else max(warmup - 1, 0)
    span = last - first  # steps from the peak to the end
    if section.schedule == "constant":
        return section.lr
    if section.schedule == "wsd":
        decay = max(1, round(_AUTO_DECAY * steps)) if section.decay_steps == "auto" else section.decay_steps
        if decay == 0:
            return section.lr
        span = min(span, decay)

    final = section.lr * section.final_lr_ratio
    if step == last:
        return final  # a run of one step has no span to divide by
    left = min(1.0, (last - step) / span)
    if section.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    return section.lr * left + final * (1 - left)  # exactly the peak when left is 1


def timed_steps(job: Job, *, steps: int) -> Iterator[dict[str, Any]]:
    """Run `steps` steps alone; yield each one's timings, result, drive traffic since the last one, and peak memory."""
    batches, counted = _batches(job, 0), read_io()
    for number in range(steps):
        forget_peak_rss()
        _, result, seconds = _timed_step(job, batches, lr=learning_rate(number, job.optim, steps=job.train.steps))
        before, counted = counted, read_io()
        yield {"step": seconds, **job.clock.take(), **asdict(result), **asdict(counted - before), **memory_of_step(())}


def _refuse_nonfinite(job: Job, result: StepResult, *, step: int) -> None:
    if job.dynamic_loss_scale and result.loss_scale > 1:  # dynamic loss scaling expects overflows
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
    job.unvalidated = step
    total, counted, size = 0.0, 0, job.train.micro_batch_size
    for batch in job.validation_rows.validation_batches(micro_batch=size, limit=job.train.eval_rows):
        total += job.engine.eval_loss(batch) * batch.counted
        counted += batch.counted
    job.unvalidated = 0
    if not counted or not job.telemetry:
        return
    loss = total / counted
    perplexity = math.inf if loss > 709 else math.exp(loss)  # a float holds e to the power of 709
    job.telemetry.evaluation(EvalRecord(step=step, validation_loss=loss, perplexity=perplexity))
