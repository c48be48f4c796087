"""Dynamic loss scaling for fp16, as torch's GradScaler does it: halve at an overflow, double after good steps."""

from __future__ import annotations

from dataclasses import dataclass

from offload_trainer.config import OptimSection


@dataclass
class LossScale:
    """The factor on the loss. 1 and constant unless the run is in fp16."""

    value: float
    window: int  # good steps after which it doubles
    dynamic: bool
    good_steps: int = 0

    @classmethod
    def of(cls, optim: OptimSection, *, dtype: str) -> LossScale:
        """For weights of `dtype`."""
        dynamic = dtype == "fp16"
        return cls(
            value=optim.initial_loss_scale if dynamic else 1.0,
            window=optim.loss_scale_window,
            dynamic=dynamic,
        )

    @property
    def saved(self) -> float | None:
        """For a checkpoint: the factor, or None where nothing is scaled."""
        return self.value if self.dynamic else None

    def load_state(self, saved: float | None, good_steps: int) -> None:
        """As a checkpoint left it. A run in another dtype begins with its own factor."""
        if self.dynamic and saved is not None:
            self.value, self.good_steps = saved, good_steps

    def after_step(self, *, finite: bool) -> None:
        """Adjust to a step whose gradients were all finite, or were not."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps >= self.window:
            self.value, self.good_steps = self.value * 2, 0
