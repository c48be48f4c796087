"""Outputs of a run's step and evaluation records: JSON lines files, the terminal, the report, and trackers if set.

A tracker that cannot start prevents the run; one that fails later is dropped with one message. A resumed run continues
the tracker's run, whose id is in trackers.json.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import TrainerError, UserError, reason
from offload_trainer.common.packages import lacks, version_of
from offload_trainer.common.safe_files import Steps, one_line, open_given, parsed, read_back
from offload_trainer.common.units import format_bytes, format_count, format_seconds
from offload_trainer.storage.atomic_io import open_to_append, write_bytes, write_text
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord


@dataclass(frozen=True)
class _Stepped:
    step: Steps


class JsonLines:
    """An append-only file of JSON lines, each an object with a `step`."""

    def __init__(self, path: Path, *, done: int) -> None:
        """Open or create the file. Lines of steps after `done`, and torn ones, are removed from it, atomically."""
        self.path = path
        os.close(open_to_append(path))
        kept = []
        with open_given(path) as file:
            for line in file.read().splitlines():
                with suppress(ValueError):  # a torn line, which lacks its closing brace
                    kept += [line + b"\n"] * (parsed(line, _Stepped).step <= done)
        write_bytes(path, b"".join(kept))
        self._fd = open_to_append(path)

    def write(self, line: str) -> None:
        """Append one line in one system call, which a kill leaves whole. Raises TrainerError if it is not complete."""
        data = line.encode() + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise TrainerError(f"{self.path} cannot be written: {reason(error)}") from error
        if written != len(data):
            raise TrainerError(f"{self.path}: {written} of {len(data)} bytes written; is the drive full?")

    def close(self) -> None:
        os.close(self._fd)


class Telemetry:
    """The outputs of one run directory. Records logged there for steps after the first `done` are removed.

    `page(left)` returns the HTML of report.html. `left`: the seconds to the end of the run, or None once it has ended.
    It is written after the first step, then at most once in ten seconds and in one hundredth of the time.
    """

    def __init__(
        self, directory: Path, *, done: int, screen: Screen, trackers: Sequence[str], config: Mapping[str, Any]
    ) -> None:
        """Open the files and start `trackers`, which get the configuration as section.key: value."""
        self._screen, self._trackers = screen, Trackers(trackers, directory, config, done=done, say=screen.say)
        self.page: Callable[[float | None], str] | None = None  # set by the run, which knows the plan
        self._report, self._page_due, self._page_failed = directory / "report.html", -math.inf, False
        self._metrics = JsonLines(directory / "metrics.jsonl", done=done)
        self._evaluations = JsonLines(directory / "evaluations.jsonl", done=done)

    def step(self, record: StepRecord) -> None:
        """Send a finished step to every output. The file is written first, since the others are only for viewing."""
        self._metrics.write(record.to_json())
        self._screen.step(record)
        start = time.monotonic()
        if start >= self._page_due:
            self._write_page(self._screen.seconds_left(record.step))
            end = time.monotonic()
            self._page_due = end + max(10.0, (end - start) / 0.01)  # writing it takes at most 1 % of the time
        self._trackers.put("train", record)

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluations.write(record.to_json())
        self._screen.say(
            f"validation after step {record.step}: loss {_four_digits(record.validation_loss)}"
            f"  perplexity {'-' if record.perplexity is None else f'{record.perplexity:.5g}'}"
        )
        self._trackers.put("validation", record)

    def end(self, *, failed: bool = False) -> None:
        """Write the page of a run that has ended, unless it has `failed` before this process finished a step."""
        if not failed or self._page_due > -math.inf:
            self._write_page(None)

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()
        self._trackers.close()

    def _write_page(self, left: float | None) -> None:
        try:
            if self.page is not None:
                write_text(self._report, self.page(left), sync=left is None)
        except Exception as error:  # the page is only for viewing
            if not self._page_failed:
                text = f"note: {self._report} cannot be written, and the run does not need it: {reason(error)}"
                self._screen.say(text)
            self._page_failed = True


class Screen:
    """Progress of a run: loss, speed, bottleneck and time left, at each twentieth of the run and at least each minute.

    `total` and `initial`: steps of the whole run, and done before. `bounds`: what each phase waits for by the plan.
    `drives`: the run keeps state on drives, so their traffic is shown. `say` gets the lines.
    """

    def __init__(
        self, total: int, *, initial: int, say: Callable[[str], None], bounds: Mapping[str, str], drives: bool
    ) -> None:
        self._total, self._initial, self.say, self._bounds, self._drives = total, initial, say, bounds, drives
        self._recent = deque[StepRecord](maxlen=20)  # an overlapped update makes one step long and the next short
        self._started = self._said = 0.0  # set at the first step, since a run's start-up is not part of its pace

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if not self._recent:
            self._started = self._said = now - record.seconds
        self._recent.append(record)
        at_twentieth = record.step % max(1, self._total // 20) == 0
        if at_twentieth or record.step == self._total or now - self._said >= 60.0:  # slow steps are all shown
            self._said = now
            self.say(f"step {record.step}/{self._total}  {self._numbers(record)}")

    def seconds_left(self, step: int) -> float:
        """Return the seconds from `step`, which `step()` has shown, to the end of the run at the pace so far."""
        elapsed = time.monotonic() - self._started  # includes validations and saves
        return elapsed / (step - self._initial) * (self._total - step)

    def _numbers(self, record: StepRecord) -> str:
        seconds = sum(row.seconds for row in self._recent)
        speed = sum(row.tokens_per_second * row.seconds for row in self._recent) / seconds
        moved = sum((row.nvme_read_bytes or 0) + (row.nvme_written_bytes or 0) for row in self._recent) / seconds
        took: dict[str, float] = {}
        for name, spent in (phase for row in self._recent for phase in row.phases.items()):
            took[name] = took.get(name, 0.0) + spent
        phase = max(took, key=took.__getitem__, default="")
        bound = f" ({self._bounds[phase]})" if phase in self._bounds else ""
        fields = [
            f"loss {_four_digits(record.loss)}",
            f"{format_count(speed)} tokens/s",
            f"{format_seconds(self.seconds_left(record.step))} left",
            f"{phase} {took[phase] / seconds:.0%}{bound}" if took.get(phase) else "",
            f"drive {format_bytes(moved)}/s" if self._drives and moved >= 1e6 else "",  # less is only logs
            "norm -" if record.grad_norm is None else f"norm {record.grad_norm:.3g}",
            f"rate {record.lr:.3g}",
            "skipped" if record.skipped else "",
        ]
        return "  ".join(filter(None, fields))


def _four_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


Numbers = dict[str, float]
# A tracker that has started: its id of the run, with which it resumes, what logs the numbers of a step, what ends it.
Started = tuple[str, Callable[[Numbers, int], object], Callable[[], object]]

_PROJECT = "offload-trainer"
_LAST = 60.0  # seconds to wait at the end of a run for records that a tracker has queued


class Trackers:
    """Sends each record to all trackers in `names`, whose libraries queue it and return."""

    def __init__(
        self, names: Sequence[str], directory: Path, config: Mapping[str, Any], *, done: int, say: Callable[[str], None]
    ) -> None:
        """Start the trackers, which `refuse_missing` has accepted. Raises UserError if one cannot start.

        `config`: section.key: value. `done`: steps done before this start, if the run is resumed.
        """
        self._say, self._trackers = say, dict[str, Started]()
        known, memory = dict[str, str](), directory / "trackers.json"
        if names and done and memory.exists():
            fix = "Remove it: trackers then begin another run for the rest of this one"
            known = read_back(memory, dict[str, str], fix=fix)
        for name in dict.fromkeys(names):
            begin, fix = _KINDS[name]
            try:
                self._trackers[name] = begin(directory, config, done, known.get(name))
            except Exception as error:  # errors of a library, a network or an account
                raise UserError(f"save.trackers={name} cannot begin: {one_line(error)}. {fix}") from error
            known[name] = self._trackers[name][0]
        if names:
            write_text(memory, json.dumps(known, indent=1))

    def put(self, group: str, record: StepRecord | EvalRecord) -> None:
        """Log a finished step (group "train") or validation, as train/loss, phases/forward, validation/loss, ..."""
        numbers: Numbers = {}
        for name, value in asdict(record).items() if self._trackers else ():
            if isinstance(value, dict):
                numbers |= {f"{name}/{key}": number for key, number in value.items()}
            elif name != "step" and value is not None:
                numbers[f"{group}/{name.removeprefix('validation_')}"] = value
        self._each(lambda log, _: log(numbers, record.step))

    def close(self) -> None:
        """Wait, with a time limit, until all trackers have taken all records."""
        thread = threading.Thread(target=lambda: self._each(lambda _, close: close()), daemon=True)
        thread.start()
        thread.join(_LAST)
        if thread.is_alive():
            late = ", ".join(self._trackers)
            self._say(f"note: {late}: not all was taken within {_LAST:.0f} s; metrics.jsonl has it")

    def _each(self, act: Callable[..., object]) -> None:
        """Call `act` with what logs and what ends each tracker; drop one for which it raises."""
        for name, (_, log, close) in list(self._trackers.items()):
            try:
                act(log, close)
            except Exception as error:  # no tracker error may stop the run
                del self._trackers[name]
                self._say(f"note: {name} gets nothing more of this run, metrics.jsonl has it all: {one_line(error)}")


def refuse_missing(names: Sequence[str]) -> None:
    """Raise UserError if one of these trackers is not installed or cannot be imported."""
    for name in names:
        if version_of(name) is None:  # a module can be found where a directory has its name, such as wandb/ of runs
            raise UserError(lacks(f"save.trackers={name}", name))
        try:
            import_module(name)
        except Exception as error:
            raise UserError(
                f"save.trackers={name}: it is installed but cannot be imported: {one_line(error)}"
            ) from error


def _tensorboard(directory: Path, _: Mapping[str, Any], done: int, __: str | None) -> Started:
    """Start TensorBoard. Events of an earlier run for steps that are repeated are hidden (`purge_step`)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=done + 1, max_queue=100_000)

    def log(numbers: Numbers, step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return "tensorboard", log, writer.close


def _wandb(directory: Path, config: Mapping[str, Any], _: int, identity: str | None) -> Started:
    """Start wandb. A missing API key is an error, since wandb would prompt for one on the terminal and block."""
    import wandb

    if os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun") and not wandb.api.api_key:
        raise UserError("there is no API key for it here")
    identity = identity or secrets.token_hex(4)
    began = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=directory.absolute().name,
        id=identity,
        resume="allow",
        dir=str(directory),
        config=dict(config),
        settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
    )
    began.define_metric("step")
    # wandb's own counter accepts no step twice, and a resumed run repeats some
    began.define_metric("*", step_metric="step")
    return identity, lambda numbers, step: began.log({**numbers, "step": step}), began.finish


def _trackio(directory: Path, config: Mapping[str, Any], _: int, identity: str | None) -> Started:
    """Start trackio. A new run gets a unique name, since trackio would mix it with an earlier run of the same name."""
    import trackio

    identity = identity or f"{directory.absolute().name}-{secrets.token_hex(2)}"
    began = trackio.init(project=_PROJECT, name=identity, config=dict(config), resume="allow")
    return identity, lambda numbers, step: began.log(numbers, step=step), began.finish


# What starts a tracker: of a run directory, its configuration as section.key: value, the steps done before, and the
# known id. Then advice for the user if it cannot start.
_KINDS: dict[str, tuple[Callable[[Path, Mapping[str, Any], int, str | None], Started], str]] = {
    "tensorboard": (_tensorboard, "Look at the run directory, or leave it out"),
    "wandb": (
        _wandb,
        "`wandb login`, or WANDB_MODE=offline, which writes to the run directory alone (`wandb sync` sends that)",
    ),
    "trackio": (_trackio, "Name another TRACKIO_DIR, or leave it out"),
}
