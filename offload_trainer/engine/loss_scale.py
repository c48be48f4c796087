"""Dynamic loss scaling for fp16, like torch's GradScaler: halve after an overflow, double after good steps."""

from __future__ import annotations

from dataclasses import dataclass

from offload_trainer.config import OptimSection


@dataclass
class LossScale:
    """The factor on the loss: constant 1 unless the run is in fp16."""

    value: float
    window: int  # good steps after which it doubles
    dynamic: bool
    good_steps: int = 0

    @classmethod
    def of(cls, optim: OptimSection, *, dtype: str) -> LossScale:
        """Return the initial scale for weights of `dtype`."""
        dynamic = dtype == "fp16"
        return cls(
            value=optim.initial_loss_scale if dynamic else 1.0,
            window=optim.loss_scale_window,
            dynamic=dynamic,
        )

    @property
    def saved(self) -> float | None:
        """Return the factor to store in a checkpoint, or None without scaling."""
        return self.value if self.dynamic else None

    def load_state(self, saved: float | None, good_steps: int) -> None:
        """Restore the state of a checkpoint. A run in another dtype keeps its own initial factor."""
        if self.dynamic and saved is not None:
            self.value, self.good_steps = saved, good_steps

    def after_step(self, *, finite: bool) -> None:
        """Adjust the factor after a step; `finite`: all gradients were finite."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps >= self.window:
            self.value, self.good_steps = self.value * 2, 0
