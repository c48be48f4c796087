"""One way to place a workload on a machine, whatever the engine: what a plan is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from offload_trainer.plan.memory import Item
from offload_trainer.plan.sizes import TierSizes
from offload_trainer.plan.time import Bound, Forecast
from offload_trainer.plan.traffic import Traffic
from offload_trainer.plan.zero import Placement, ZeroSizes


class Candidate(Protocol):
    """Homes and sizes of one engine, and everything that follows from them."""

    @property
    def placement(self) -> Placement: ...

    @property
    def sizes(self) -> TierSizes | ZeroSizes | None: ...

    @property
    def title(self) -> str:
        """The engine as a person calls it."""
        ...

    @property
    def homes(self) -> str:
        """Where weights and optimizer state live, in words. Without a GPU the device is the CPU, its memory RAM."""
        ...

    @property
    def uses_drives(self) -> bool:
        """Whether anything lives on a drive."""
        ...

    @property
    def cannot_save(self) -> str | None:
        """Why no checkpoint can be made and resumed from exactly; None where it can."""
        ...

    def items(self) -> list[Item]:
        """Bytes at the peak, without what the run saves."""
        ...

    def traffic(self) -> list[Traffic]: ...

    def links(self) -> Sequence[Traffic]:
        """What ranks move for each other (`plan/exchange.py`)."""
        ...

    def bounds(self) -> list[Bound]:
        """What phases wait for beside products and traffic."""
        ...

    def stretch(self) -> float:
        """How many times as long the update's drives take as their bytes both ways at once."""
        ...

    def on_top(self) -> Mapping[str, float]:
        """Seconds that a phase takes beyond the slowest of what it waits for."""
        ...

    def settled(self, found: Forecast) -> tuple[TierSizes | ZeroSizes | None, Forecast]:
        """Its sizes, and seconds: whether the update runs behind the next forward is decided by both ways' seconds."""
        ...

    def notes(self) -> list[str]: ...

    def tunable(self) -> list[tuple[str, ...]]:
        """Groups of words that may make it faster; nothing here changes a result, or where something lives."""
        ...
