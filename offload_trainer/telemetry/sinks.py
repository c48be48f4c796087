"""Distribution of step and evaluation records to all outputs: JSON lines files, the terminal, and trackers if set.

record ── Telemetry ─┬─ metrics.jsonl, evaluations.jsonl
                     ├─ screen.py: a live line, or plain lines without a terminal
                     └─ trackers.py: TensorBoard, wandb, trackio, mlflow
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import with_config

from offload_trainer.errors import TrainerError, reason
from offload_trainer.safe_files import LENIENT, Steps, open_given, parsed
from offload_trainer.storage.atomic_io import open_to_append, write_bytes
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord
from offload_trainer.telemetry.screen import Screen, four_digits
from offload_trainer.telemetry.trackers import Trackers


class JsonLines:
    """An append-only file of JSON lines, each an object with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._opened()

    def write(self, line: str) -> None:
        """Append one line in one system call: a kill leaves it whole; a full drive or a power cut may tear it.

        Raises TrainerError if the line could not be written completely.
        """
        data = line.encode() + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise TrainerError(f"{self.path} cannot be written: {reason(error, self.path.parent)}") from error
        if written != len(data):
            raise TrainerError(f"{self.path}: {written} of {len(data)} bytes written; is the drive full?")

    def truncate_after(self, step: int) -> None:
        """Keep the lines of steps up to `step` and remove later and torn ones, atomically."""
        with open_given(self.path) as file:
            kept = [line + b"\n" for line in file.read().splitlines() if _is_up_to(line, step)]
        write_bytes(self.path, b"".join(kept))
        os.close(self._fd)  # the descriptor still refers to the replaced file
        self._fd = self._opened()

    def close(self) -> None:
        """Close the file; every line is already written."""
        os.close(self._fd)

    def _opened(self) -> int:
        return open_to_append(self.path)


@with_config(LENIENT)
@dataclass(frozen=True)
class _Stepped:
    """The field shared by the lines of both files."""

    step: Steps


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return parsed(line, _Stepped).step <= step
    except ValueError:  # a torn line, which lacks its closing brace
        return False


class Telemetry:
    """The outputs of one run directory. Records logged there for steps after the first `done` are removed."""

    def __init__(self, directory: Path, *, done: int, screen: Screen, trackers: Trackers | None = None) -> None:
        self._trackers, self._screen = trackers, screen
        self._metrics = JsonLines(directory / "metrics.jsonl")
        self._evaluations = JsonLines(directory / "evaluations.jsonl")
        self._metrics.truncate_after(done)
        self._evaluations.truncate_after(done)

    def say(self, line: str) -> None:
        """Print a line for the user, above the live one."""
        self._screen.say(line)

    def step(self, record: StepRecord) -> None:
        """Send a finished step to every output. The file is written first, since the others are only for viewing."""
        self._metrics.write(record.to_json())
        self._screen.step(record)
        if self._trackers is not None:
            self._trackers.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Send a finished validation to every output."""
        self._evaluations.write(record.to_json())
        bits = "" if record.bits_per_byte is None else f"  {four_digits(record.bits_per_byte)} bits/byte"
        self._screen.say(
            f"validation after step {record.step}: loss {four_digits(record.validation_loss)}"
            f"  perplexity {four_digits(record.perplexity)}{bits}"
        )
        if self._trackers is not None:
            self._trackers.evaluation(record)

    def close(self) -> None:
        """Close every output."""
        self._screen.close()
        self._metrics.close()
        self._evaluations.close()
        if self._trackers is not None:
            self._trackers.close()
