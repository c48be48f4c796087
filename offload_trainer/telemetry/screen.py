"""Progress display of a running training: one live line on a terminal, plain lines elsewhere.

12/300 |#         | loss 3.1416  1.02 k tokens/s  update 62% (drive)  drive 1.9 GB/s  3 min 20 s left  ...
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tqdm import tqdm

from offload_trainer.telemetry.metrics import StepRecord
from offload_trainer.units import format_bytes, format_count, format_seconds

_LEAST_MOVED = 1e6  # bytes per second; drive traffic below this is only logs
_WINDOW = 20  # steps averaged for speeds and shares: an overlapped update makes one step long and the next short
_LINE = "{n_fmt}/{total_fmt} |{bar:10}| {desc}"


class Screen:
    """Progress of a run: loss, speed, bottleneck and time left, on one live line or as a plain line every 20th.

    `total` and `initial` are the steps of the whole run and the steps already done. `bounds` gives the resource that
    each phase waits for, by the plan. `drives` is whether the run keeps state on drives; if not, their traffic is only
    logs and checkpoints and is not shown. `live` None means `is_live()`. `say` receives the plain lines, at every
    twentieth of the run.
    """

    def __init__(
        self,
        total: int,
        *,
        initial: int,
        say: Callable[[str], None],
        bounds: Mapping[str, str] | None = None,
        drives: bool = True,
        live: bool | None = None,
    ) -> None:
        self._total, self._initial, self._say, self._bounds = total, initial, say, bounds or {}
        self._drives = drives
        self._recent = deque[StepRecord](maxlen=_WINDOW)
        self._started: float | None = None  # set at the first step, since a run's start-up is not part of its pace
        self._bar: tqdm | None = None
        if is_live() if live is None else live:
            self._bar = tqdm(total=total, initial=initial, file=sys.stderr, dynamic_ncols=True, bar_format=_LINE)

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""
        if self._started is None:
            self._started = time.monotonic() - record.seconds
        self._recent.append(record)
        due = record.step % max(1, self._total // 20) == 0 or record.step == self._total
        if self._bar is None and not due:
            return
        done, left = record.step - self._initial, self._total - record.step
        seconds = remaining_seconds(time.monotonic() - self._started, done=done, left=left)
        numbers = self._numbers(record, left=format_seconds(seconds))
        if self._bar is None:
            self._say(f"step {record.step}/{self._total}  {numbers}")
            return
        self._bar.set_description_str(numbers, refresh=False)
        self._bar.update(record.step - self._bar.n)

    def say(self, line: str) -> None:
        """Print a separate line, above the live one if there is one."""
        if self._bar is None:
            self._say(line)
        else:
            with tqdm.external_write_mode(file=sys.stderr):
                self._say(line)

    def close(self) -> None:
        """Close the live line and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _numbers(self, record: StepRecord, *, left: str) -> str:
        """Format a step's numbers, the most important first, since a narrow terminal cuts the end."""
        norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3g}"
        speed = f"{format_count(tokens_speed(self._recent))} tokens/s"
        told = [f"loss {four_digits(record.loss)}", speed, longest_phase(self._recent, self._bounds)]
        moved = drive_speed(self._recent) if self._drives else 0.0
        told += [f"drive {format_bytes(moved)}/s"] if moved >= _LEAST_MOVED else []
        told += [f"{left} left", f"norm {norm}", f"rate {record.lr:.3g}", "skipped" if record.skipped else ""]
        return "  ".join(filter(None, told))


def is_live() -> bool:
    """Return whether stderr is a terminal that can overwrite a line."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def tokens_speed(records: Sequence[StepRecord]) -> float:
    """Return the tokens per second over these steps."""
    tokens = sum(record.tokens_per_second * record.seconds for record in records)
    return tokens / sum(record.seconds for record in records)


def longest_phase(records: Sequence[StepRecord], bounds: Mapping[str, str]) -> str:
    """Return the phase that takes the largest share of these steps, its share, and the resource that it waits for.

    The resource is left out if the plan does not name one.
    """
    took: dict[str, float] = {}
    for record in records:
        for name, seconds in record.phases.items():
            took[name] = took.get(name, 0.0) + seconds
    name = max(took, key=took.__getitem__, default="")
    if not name or not took[name]:
        return ""
    share = took[name] / sum(record.seconds for record in records)
    return f"{name} {share:.0%}" + (f" ({bounds[name]})" if name in bounds else "")


def drive_speed(records: Sequence[StepRecord]) -> float:
    """Return the bytes per second to and from drives over these steps; 0 if they are not counted."""
    moved = sum((record.nvme_read_bytes or 0) + (record.nvme_written_bytes or 0) for record in records)
    return moved / sum(record.seconds for record in records)


def remaining_seconds(elapsed: float, *, done: int, left: int) -> float:
    """Return the seconds that `left` steps take at the pace of the `done` steps, including validations and saves."""
    return elapsed / done * left


def four_digits(value: float | None) -> str:
    """Format a number with four decimal places, None as a dash."""
    return "-" if value is None else f"{value:.4f}"
