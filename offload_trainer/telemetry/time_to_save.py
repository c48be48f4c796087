"""Estimate of the seconds until the current step is complete and saved, which `train.stop_within` is compared with.

The training loop reports the beginning of each step, validation and save. Their durations are taken from earlier ones,
and at first from the plan. A signal handler may read the estimate at any moment.
"""

from __future__ import annotations

import time
from collections import deque

_STEPS = 5  # latest steps, of which the longest counts


class TimeToSave:
    """Seconds from now until the checkpoint of the current step is complete."""

    def __init__(self, *, step: float | None, save: float) -> None:
        """Start with the plan's seconds of a step (None: unknown) and of a checkpoint, until both were measured."""
        self._planned_step = step
        self.save = save
        self._steps = deque[float](maxlen=_STEPS)
        self._validation = 0.0
        self._validates = False
        self._now, self._since = "save", time.monotonic()

    def begin_step(self, *, validates: bool) -> None:
        """Begin a step; `validates`: a validation follows it."""
        self._validates = validates
        self._begin("step")

    def begin_validation(self) -> None:
        """Begin the validation after a step."""
        self._steps.append(time.monotonic() - self._since)
        self._begin("validation")

    def begin_save(self) -> None:
        """Begin the time in which this step may be saved."""
        passed = time.monotonic() - self._since
        if self._now == "validation":
            self._validation = passed
        else:
            self._steps.append(passed)
        self._begin("save")

    def _begin(self, what: str) -> None:
        self._now, self._since = what, time.monotonic()

    @property
    def seconds(self) -> float | None:
        """Return the estimate; None in a first step whose seconds the plan does not know."""
        passed = time.monotonic() - self._since
        if self._now == "save":
            return max(self.save - passed, 0.0)
        validation = self._validation if self._validates else 0.0
        if self._now == "validation":
            return max(validation - passed, 0.0) + self.save
        step = max(self._steps, default=self._planned_step)
        return None if step is None else max(step - passed, 0.0) + validation + self.save
