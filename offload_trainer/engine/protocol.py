"""Define the interface between the training loop and the engines (tiered, deepspeed).

A step is `accumulate` micro-batches with a forward and a backward each, then one update with the scheduled learning
rate. Loss and gradient norm cover the whole step on all ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offload_trainer.data.rows import Batch
from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.optim.state_files import BlockingSnapshot, WeightsSnapshot
from offload_trainer.telemetry.meters import PhaseClock


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. `grad_norm` is before clipping, and None if the step was skipped."""

    loss: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    hidden: float = 0.0  # seconds of the previous update that overlapped with this step
    update_running: bool = False  # the step's update may still be running


# An engine's state at one moment, to be written once; if it is `concurrent`, on another thread than the training's.
Snapshot = TieredSnapshot | BlockingSnapshot | WeightsSnapshot


class Engine(Protocol):
    """An engine as the training loop uses it; `rank` of `world` counts data-parallel ranks."""

    rank: int
    world: int

    def train_step(self, batches: Sequence[Batch], *, lr: float, clock: PhaseClock) -> StepResult:
        """Train on one step's micro-batches and return the mean loss over all targets that count.

        A NaN or infinity in the gradient skips the step and changes no weight.
        """

    def synchronize(self) -> None:
        """Block until all asynchronous work of earlier steps has finished, and raise its errors."""

    def abandon_step(self) -> None:
        """Return to the state after the last step, whichever part of the next has run.

        Raises TrainerError if its update has begun, since the state may then be partly of either step.
        """

    def eval_loss(self, batch: Batch) -> float:
        """Return the mean loss over this rank's targets, without dropout or gradients."""

    def named_master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole master on the CPU in fp32) one at a time, tied weights once. All ranks iterate."""

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state. All ranks call it."""

    def load(self, directory: Path) -> None:
        """Load the state from a directory that a snapshot of this or another engine wrote. All ranks call it."""

    def close(self) -> None:
        """Release memory, files and processes."""
