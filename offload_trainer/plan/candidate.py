"""The interface of a placement candidate: what every engine must state before the planner can choose it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from offload_trainer.plan.deepspeed.zero_buffers import Placement, ZeroSizes
from offload_trainer.plan.memory.common import Item
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.time.step_time import Bound, Forecast
from offload_trainer.plan.time.traffic import Traffic


class Candidate(Protocol):
    """One placement of a workload on a machine by one engine, with its bytes, traffic and time bounds."""

    @property
    def placement(self) -> Placement: ...

    @property
    def sizes(self) -> TierSizes | ZeroSizes | None: ...

    @property
    def title(self) -> str:
        """Return the engine's name for messages."""
        ...

    @property
    def homes(self) -> str:
        """Return the placement of weights and optimizer state in words; without a GPU the device's memory is RAM."""
        ...

    @property
    def uses_drives(self) -> bool:
        """Return whether anything is placed on a drive."""
        ...

    @property
    def cannot_save(self) -> str | None:
        """Return the reason why this placement cannot save and resume exactly, or None if it can."""
        ...

    def items(self) -> list[Item]:
        """Return the bytes at the peak by tier, without checkpoints."""
        ...

    def traffic(self) -> list[Traffic]: ...

    def links(self) -> Sequence[Traffic]:
        """Return the bytes that ranks exchange (`plan/parallel/comm_cost.py`)."""
        ...

    def bounds(self) -> list[Bound]:
        """Return what phases wait for in addition to matrix products and traffic."""
        ...

    def stretch(self) -> float:
        """Return the factor by which the update's drive time exceeds simultaneous reading and writing of its bytes."""
        ...

    def on_top(self) -> Mapping[str, float]:
        """Return the seconds that each phase takes in addition to the slowest of its bounds."""
        ...

    def settled(self, found: Forecast) -> tuple[TierSizes | ZeroSizes | None, Forecast]:
        """Return the final sizes and forecast, after deciding whether the update overlaps the next forward."""
        ...

    def notes(self) -> list[str]: ...

    def tunable(self) -> list[tuple[str, ...]]:
        """Return groups of settings for `tune` to try; none of them changes a result or a placement."""
        ...
