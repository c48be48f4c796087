"""Dynamic loss scaling for fp16, like torch's GradScaler: halve after an overflow, double after good steps.

A run keeps the scale and the window of the checkpoint that it resumes from, which may have been imported.
"""

from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, Strict

from offload_trainer.safe_files import Number, Steps, exact_record

INITIAL_SCALE = 65536.0
WINDOW = 1000


@exact_record
class LossScale:
    """The factor on the loss, and when it changes."""

    value: Annotated[Number, Field(gt=0, le=2.0**127)]
    window: Annotated[int, Strict(), Field(ge=1)] | None  # good steps after which it doubles; None: it is constant
    good_steps: Steps = 0  # steps since it last changed

    @classmethod
    def initial(cls, dtype: str) -> Self:
        """Return the scale of the first step with weights of `dtype`: constant 1 unless they are in fp16."""
        return cls(INITIAL_SCALE, WINDOW) if dtype == "fp16" else cls(1.0, None)

    def resumed(self, saved: Self) -> Self:
        """Return the scale of a checkpoint; this one if the run or the checkpoint is not in fp16."""
        return saved if self.window and saved.window else self

    def after_step(self, *, finite: bool) -> Self:
        """Return the scale after a step; `finite`: all gradients were finite."""
        if self.window is None:
            return self
        if not finite:
            return replace(self, value=max(1.0, self.value / 2), good_steps=0)
        if self.good_steps + 1 >= self.window:
            return replace(self, value=self.value * 2, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


CONSTANT = LossScale(1.0, None)
