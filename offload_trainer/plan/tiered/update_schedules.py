"""Enumerate the update schedules that `auto` chooses between: when the update runs, and how masters are stored.

    off, forward, backward   tiered.overlap: no overlap, with the next forward, with the backward as well (two copies)
    split                    tiered.master_format: fewer bytes per parameter; one copy; off or forward only

Each is planned with its fastest placement, and must save enough time over the previous ones. Results do not depend on
the schedule. If no seconds are known, `forward` is chosen if drives are used (`TieredCandidate.settled`), since it
costs nothing. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from offload_trainer.plan.tiered.engine import WORTH, Tiered
from offload_trainer.plan.workload import Workload

OFF, FORWARD, FULL = (f"tiered.overlap={how}" for how in ("off", "forward", "backward"))
REMAINDER = "tiered.master_format=split"


@dataclass(frozen=True)
class UpdateSchedule:
    """The forecast of one update schedule."""

    words: str  # the command-line setting
    seconds: float | None  # seconds per step; None if unknown
    tokens: int | None  # tokens per step from which on the update is at most a tenth of the step
    why_not: str = ""  # why it is not possible, or ""


def asking(engine: Tiered, words: str) -> Tiered:
    """Return the engine with the setting `words`."""
    key, value = words.removeprefix("tiered.").split("=")
    return replace(engine, section=engine.section.model_copy(update={key: value}))


def left_open(engine: Tiered, work: Workload) -> Iterator[tuple[str, str]]:
    """Yield (setting, why it is impossible or "") of the schedules that need a separate plan and are left to `auto`."""
    section = engine.section
    if section.master_format == "auto" and section.overlap != "backward" and section.state_copies != 2:
        yield REMAINDER, _why_not(asking(engine, REMAINDER), work)
    if section.overlap == "auto" and section.state_copies != 1 and section.master_format != "split":
        alone = f"{FULL} with {work.world} ranks: auto chooses it only for one rank" if work.world > 1 else ""
        yield FULL, _why_not(asking(engine, FULL), work) or alone


def _why_not(engine: Tiered, work: Workload) -> str:
    return "; ".join(reason.removesuffix("; leave it out") for reason in engine.impossible(work))


def gains(step: float | None, best: float | None) -> bool:
    """Return whether a step of `step` seconds is shorter than `best` by enough; False if either is unknown."""
    return step is not None and best is not None and step <= (1 - WORTH) * best
