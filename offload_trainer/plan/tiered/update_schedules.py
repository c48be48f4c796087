"""What `auto` leaves open of the tiered engine's update: when it runs, how masters are stored. Pure arithmetic.

    off, forward, backward   tiered.overlap: no overlap, with the next forward, with the backward as well (two copies)
    split                    tiered.master_format: fewer bytes per parameter; one copy; off or forward only

Each is planned in the fastest homes it has, and must gain enough over those before it. No bit depends on it. Where no
seconds are known, `forward` is taken if drives are used (`TieredCandidate.settled`), since it costs nothing.
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
    """One of them, as it would be."""

    words: str  # of the command line
    seconds: float | None  # of a step; None where that is not known
    tokens: int | None  # a step, from which on the update is at most a tenth of it
    why_not: str = ""  # a sentence, where it cannot be taken


def asking(engine: Tiered, words: str) -> Tiered:
    """The same wish with one of them."""
    key, value = words.removeprefix("tiered.").split("=")
    return replace(engine, section=engine.section.model_copy(update={key: value}))


def left_open(engine: Tiered, work: Workload) -> Iterator[tuple[str, str]]:
    """Words of what needs a plan of its own and no wish decides, and why it cannot be (nothing where it can)."""
    section = engine.section
    if section.master_format == "auto" and section.overlap != "backward" and section.state_copies != 2:
        yield REMAINDER, _why_not(asking(engine, REMAINDER), work)
    if section.overlap == "auto" and section.state_copies != 1 and section.master_format != "split":
        alone = f"{FULL} with {work.world} ranks: auto chooses it only for one rank" if work.world > 1 else ""
        yield FULL, _why_not(asking(engine, FULL), work) or alone


def _why_not(engine: Tiered, work: Workload) -> str:
    return "; ".join(reason.removesuffix("; leave it out") for reason in engine.impossible(work))


def gains(step: float | None, best: float | None) -> bool:
    """Whether a step of so many seconds is enough shorter than one of `best`; not where one is not known."""
    return step is not None and best is not None and step <= (1 - WORTH) * best
