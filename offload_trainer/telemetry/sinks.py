"""Where records go: two files of JSON lines, the terminal, and TensorBoard if asked.

record ── Telemetry ─┬─ metrics.jsonl, evaluations.jsonl
                     ├─ a progress bar, or plain lines where there is no terminal
                     └─ tensorboard/
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import with_config
from tqdm import tqdm

from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.readback import LENIENT, Steps, parsed
from offload_trainer.storage.durable import write_bytes
from offload_trainer.telemetry.record import EvalRecord, StepRecord
from offload_trainer.units import format_count, format_seconds

Say = Callable[[str], None]


class JsonLines:
    """A file that only grows by whole lines, each a JSON object with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._opened()

    def write(self, line: str) -> None:
        """Append one line in one system call: a kill leaves it whole; a full drive or power cut may tear it.

        Raises TrainerError where the line could not be written whole.
        """
        data = line.encode() + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise TrainerError(f"{self.path} cannot be written: {reason(error, self.path.parent)}") from error
        if written != len(data):
            raise TrainerError(f"{self.path}: {written} of {len(data)} bytes written; is the drive full?")

    def truncate_after(self, step: int) -> None:
        """Keep the lines of steps up to `step`; torn lines go too. Atomic: the file is the old or the new."""
        kept = [line + b"\n" for line in self.path.read_bytes().splitlines() if _is_up_to(line, step)]
        write_bytes(self.path, b"".join(kept))
        os.close(self._fd)  # it is still the old file
        self._fd = self._opened()

    def close(self) -> None:
        """Give the file back; nothing is left to flush."""
        os.close(self._fd)

    def _opened(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


@with_config(LENIENT)
@dataclass(frozen=True)
class _Stepped:
    """A line of either file."""

    step: Steps


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return parsed(line, _Stepped).step <= step
    except ValueError:  # torn: a whole object is one that has its closing brace
        return False


class ProgressBar:
    """Loss, gradient norm, rate, speed and time left: a bar on stderr, or a plain line every twentieth of the run.

    `total` and `initial` are steps of the whole run and steps already done. `enabled` None: where stderr is a
    terminal. `say` takes the plain lines.
    """

    def __init__(self, total: int, *, initial: int, say: Say, enabled: bool | None = None) -> None:
        self._total, self._initial, self._say = total, initial, say
        self._started = time.monotonic()
        enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar = (
            tqdm(total=total, initial=initial, file=sys.stderr, unit="step", dynamic_ncols=True) if enabled else None
        )

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""
        norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3g}"
        numbers = (
            f"loss {_number(record.loss)}  norm {norm}  rate {record.lr:.3g}  "
            f"{format_count(record.tokens_per_second)} tokens/s"
        )
        if record.skipped:
            numbers += "  skipped"
        if self._bar is not None:
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update(record.step - self._bar.n)
        elif record.step % max(1, self._total // 20) == 0 or record.step == self._total:
            left = remaining_seconds(
                time.monotonic() - self._started,
                done=record.step - self._initial,
                left=self._total - record.step,
            )
            self._say(f"step {record.step}/{self._total}  {numbers}  {format_seconds(left)} left")

    def say(self, line: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is None:
            self._say(line)
        else:
            with tqdm.external_write_mode(file=sys.stderr):
                self._say(line)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def remaining_seconds(elapsed: float, *, done: int, left: int) -> float:
    """`left` steps at the pace of the `done` that took `elapsed` seconds, validations and saves included."""
    return elapsed / done * left


class TensorBoard:
    """Scalars for TensorBoard. Events of `first_step` and later from an earlier run are hidden.

    Raises UserError where the extra is not installed.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"save.tensorboard=true: {error}. Install it: pip install 'offload-trainer[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def step(self, record: StepRecord) -> None:
        """Every number of the record that there is."""
        numbers = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/lr": record.lr,
            "train/loss_scale": record.loss_scale,
            "speed/seconds": record.seconds,
            "speed/tokens_per_second": record.tokens_per_second,
            "speed/mfu": record.mfu,
            "nvme/read_bytes": record.nvme_read_bytes,
            "nvme/written_bytes": record.nvme_written_bytes,
            "memory/host_rss_bytes": record.host_rss_bytes,
            "memory/device_peak_bytes": record.device_peak_bytes,
        }
        self._add(numbers | {f"phases/{name}": s for name, s in record.phases.items()}, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        """Loss, perplexity and bits a byte."""
        numbers = {
            "validation/loss": record.validation_loss,
            "validation/perplexity": record.perplexity,
            "validation/bits_per_byte": record.bits_per_byte,
        }
        self._add(numbers, record.step)

    def close(self) -> None:
        """Write what is still in the queue."""
        self._writer.close()

    def _add(self, numbers: dict[str, float | None], step: int) -> None:
        for name, number in numbers.items():
            if number is not None:
                self._writer.add_scalar(name, number, step)


class Telemetry:
    """Owns the sinks of one run directory; what was logged there of steps after the `done` first is dropped.

    `steps` is of the whole run, `say` takes lines for people. Raises UserError, with nothing written, where
    `tensorboard` is asked for and not installed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        done: int,
        say: Say,
        tensorboard: bool = False,
        progress: bool | None = None,
    ) -> None:
        self._board = TensorBoard(directory / "tensorboard", first_step=done + 1) if tensorboard else None
        self._metrics = JsonLines(directory / "metrics.jsonl")
        self._evaluations = JsonLines(directory / "evaluations.jsonl")
        self._metrics.truncate_after(done)
        self._evaluations.truncate_after(done)
        self._bar = ProgressBar(steps, initial=done, say=say, enabled=progress)

    def step(self, record: StepRecord) -> None:
        """A finished step, to every sink; the file first, as the others are only for looking at."""
        self._metrics.write(record.to_json())
        self._bar.step(record)
        if self._board is not None:
            self._board.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """A finished validation, to every sink."""
        self._evaluations.write(record.to_json())
        bits = "" if record.bits_per_byte is None else f"  {_number(record.bits_per_byte)} bits/byte"
        self._bar.say(
            f"validation after step {record.step}: loss {_number(record.validation_loss)}"
            f"  perplexity {_number(record.perplexity)}{bits}"
        )
        if self._board is not None:
            self._board.evaluation(record)

    def close(self) -> None:
        """Close every sink."""
        self._bar.close()
        self._metrics.close()
        self._evaluations.close()
        if self._board is not None:
            self._board.close()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
