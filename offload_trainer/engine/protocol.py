"""What the loop asks of an engine. Engines do not inherit; they have these methods.

A step is `accumulate` micro-batches: forward and backward each, then one update with the rate that the schedule
gives. Loss and gradient norm are of the whole step, over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offload_trainer.data.rows import Batch
from offload_trainer.ranks import ALONE, Group
from offload_trainer.telemetry.meters import PhaseClock


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `grad_norm` is before clipping; None where the step was skipped."""

    loss: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    hidden: float = 0.0  # seconds that the update before went on behind what followed it
    goes_on: bool = False  # whether this step's update may still be under way


class Snapshot(Protocol):
    """An engine's state at one moment."""

    @property
    def behind(self) -> bool:
        """Whether another thread may write it while the engine trains on."""

    def write(self, directory: Path, group: Group = ALONE) -> dict[str, Any]:
        """Write it into `directory`; returns, on rank 0, what the manifest holds about the files. All ranks call it.

        `group`: all of them, for the thread that writes.
        """

    def close(self) -> None:
        """Nothing waits for it any more, whether it was written or not."""


class Engine(Protocol):
    rank: int
    world: int

    def train_step(self, batches: Sequence[Batch], *, lr: float, clock: PhaseClock) -> StepResult:
        """Train on one step's micro-batches: the loss is the mean over all targets that they count.

        A NaN or infinity in the gradient changes nothing: `skipped`.
        """

    def settle(self) -> None:
        """Nothing that a step has begun is under way when this returns. Raises what went wrong with it."""

    def eval_loss(self, batch: Batch) -> float:
        """Mean loss over the targets that the batch counts on this rank, without dropout or gradients."""

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [rows, length] -> fp32 [rows, vocabulary] on the CPU: logits of the token that follows."""

    def named_master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole fp32 master on the CPU), one at a time, tied ones once; all ranks iterate together."""

    def snapshot(self) -> Snapshot:
        """The state of now, to be written once. All ranks call it."""

    def load(self, directory: Path) -> None:
        """Continue from a directory that a snapshot wrote, of this or another engine."""

    def close(self) -> None:
        """Give back memory, files and processes."""
