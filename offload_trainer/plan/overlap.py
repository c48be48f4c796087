"""What an update that runs behind the next forward hides. Pure arithmetic.

    update    unit 0, 1, 2, ...        in the order in which the forward needs them
    forward          0, 1, 2, ...      each once its own weights are home

Two machines in a row that take the same jobs in one order: both are done after the longest of the ways "the update up
to unit k, then the forward from k on" (S. M. Johnson, 1954). What both ask of one thing, a drive, the way to the
device, the CPU, they cannot ask at once. The step's first micro-batch has the only forward that hides anything, since
its backward overwrites the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_trainer.plan.layout import Unit
from offload_trainer.plan.time import Bound, Forecast


@dataclass(frozen=True)
class Part:
    """A unit's share of the update, and of the forward."""

    update: float
    forward: float


def parts_of(units: Sequence[Unit]) -> list[Part]:
    """In the order of the forward: what lies before the blocks is looked up, and a tied head comes once more."""
    first = next((unit.index for unit in units if unit.block), 0)
    tied = sum(place.weight.numel for unit in units[:first] for place in unit.places if place.weight.uses > 1)
    trained = sum(unit.trained for unit in units) or 1
    computed = (sum(unit.elements for unit in units[first:]) + tied) or 1
    parts = [Part(unit.trained / trained, unit.elements / computed * (unit.index >= first)) for unit in units]
    return [*parts, Part(0.0, tied / computed)]


def hidden_seconds(found: Forecast, parts: Sequence[Part], *, micro_batches: int, gpu: bool) -> float:
    """Of the update, behind the forward of the next step's first micro-batch; 0 where a phase is not known."""
    update, forward = found.seconds["update"], found.seconds["forward"]
    if update is None or forward is None:
        return 0.0
    forward /= micro_batches
    done, left = 0.0, 1.0
    ways = []
    for part in parts:
        done += part.update
        ways.append(update * done + forward * left)
        left -= part.forward
    asked: dict[str, float] = {}
    for bound in found.bounds:
        if bound.phase in ("update", "forward"):
            times = micro_batches if bound.phase == "forward" else 1
            of = _asked_of(bound, gpu=gpu)
            asked[of] = asked.get(of, 0.0) + (bound.seconds or 0.0) / times
    return max(0.0, update + forward - max([*ways, *asked.values()]))


def _asked_of(bound: Bound, *, gpu: bool) -> str:
    """The one thing whose seconds these are."""
    if bound.kind in ("adamw", "compute"):
        return "gpu" if gpu and bound.kind == "compute" else "cpu"
    return {"adamw_gpu": "gpu", "drive": bound.place}.get(bound.kind, bound.kind)
