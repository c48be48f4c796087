"""What an update that runs behind the backward and the next forward hides. Pure arithmetic.

    update    unit 0, 1, 2, ...        in the order in which the forward needs them
    forward          0, 1, 2, ...      each once its own weights are home

Two machines in a row that take the same jobs in one order: both are done after the longest of the ways "the update up
to unit k, then the forward from k on" (S. M. Johnson, 1954). What both ask of one thing, a drive, the way to the
device, the CPU, they cannot ask at once. The step's first micro-batch has the only forward that hides anything, since
its backward overwrites the sums.

    backward  head, last block, ...    each once complete: its pages on drives, if the update may begin ahead

That goes on beside the step's last backward, from the first block on that is through. What the next forward needs
first is done first, so what is left is of all blocks alike, and of what comes before them, which is complete last, all
pages. Pages in RAM wait for the decision, and a step that is decided otherwise has none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_trainer.plan.layout import Page, Unit
from offload_trainer.plan.time import Bound, Forecast


@dataclass(frozen=True)
class Part:
    """A unit's share of the update, and of the forward."""

    update: float
    forward: float


def parts_of(units: Sequence[Unit]) -> list[Part]:
    """In the order of the forward: what lies before the blocks is looked up, and a tied head comes once more."""
    first = _first_block(units)
    tied = sum(place.weight.numel for unit in units[:first] for place in unit.places if place.weight.uses > 1)
    trained = sum(unit.trained for unit in units) or 1
    computed = (sum(unit.elements for unit in units[first:]) + tied) or 1
    parts = [Part(unit.trained / trained, unit.elements / computed * (unit.index >= first)) for unit in units]
    return [*parts, Part(0.0, tied / computed)]


def _first_block(units: Sequence[Unit]) -> int:
    return next((unit.index for unit in units if unit.block), 0)


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


@dataclass(frozen=True)
class AheadOf:
    """Seconds of an update behind the step's last backward."""

    done: float  # of the update
    hidden: float  # of these, by which the two are shorter than one after the other


def share_on_drives(pages: Sequence[Page]) -> float:
    """Of the update."""
    return sum(page.elements for page in pages if page.home >= 0) / (sum(page.elements for page in pages) or 1)


def share_that_is_last(units: Sequence[Unit], pages: Sequence[Page]) -> float:
    """Of the pages on drives, those of the units that a backward completes last."""
    first = _first_block(units)
    away = [page for page in pages if page.home >= 0]
    return sum(page.elements for page in away if page.unit < first) / (sum(page.elements for page in away) or 1)


def ahead_of(
    found: Forecast, units: Sequence[Unit], *, on_drives: float, last: float, micro_batches: int, gpu: bool
) -> AheadOf:
    """`on_drives`: the share of the update whose pages are there; `last`: see `share_that_is_last`.

    What both ask of one thing, as of the CPU that computes, makes the backward longer.
    """
    update, backward = found.seconds["update"], found.seconds["backward"]
    if not update or backward is None or not on_drives:
        return AheadOf(0.0, 0.0)
    backward /= micro_batches
    forwards = [part.forward for part in parts_of(units)]
    blocks = [share for unit, share in zip(units, forwards, strict=False) if unit.block]
    first = backward * (1.0 - sum(blocks[:-1]))  # the head and a block are through
    asked, others = _asked_ahead(found, on_drives=on_drives, micro_batches=micro_batches, gpu=gpu)
    whole = (1 - last) * min(update, max(asked.values(), default=0.0))
    done, both = 0.0, backward
    for _ in range(100):  # the longer the backward takes, the more is done behind it
        done = min(whole, both - first)
        part = done / whole if whole else 0.0
        both = max(backward, *(others.get(of, 0.0) + part * seconds for of, seconds in asked.items()))
    return AheadOf(done, max(0.0, backward + done - both))


def _asked_ahead(
    found: Forecast, *, on_drives: float, micro_batches: int, gpu: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each thing that pages on drives ask of it, and those of the last backward."""
    pages: dict[str, float] = {}
    backward: dict[str, float] = {}
    for bound in found.bounds:
        of, seconds = _asked_of(bound, gpu=gpu), bound.seconds or 0.0
        if bound.phase == "update" and bound.kind != "adamw_gpu":
            pages[of] = pages.get(of, 0.0) + seconds * (1.0 if bound.kind == "drive" else on_drives)
        elif bound.phase == "backward":
            backward[of] = backward.get(of, 0.0) + seconds / micro_batches
    return pages, backward


def left_after(found: Forecast, ahead: AheadOf, *, on_drives: float) -> Forecast:
    """Of the update, what the time after the decision has to do: pages in memory wait for it."""
    update = found.seconds["update"] or 0.0
    inside = [bound for bound in found.bounds if bound.phase == "update" and bound.kind != "drive"]
    left = max([update - ahead.done, *((1 - on_drives) * (bound.seconds or 0.0) for bound in inside)])
    part = left / update if update else 1.0
    bounds = [
        replace(bound, seconds=bound.seconds and bound.seconds * part) if bound.phase == "update" else bound
        for bound in found.bounds
    ]
    return replace(found, seconds={**found.seconds, "update": left}, bounds=tuple(bounds))


def parts_left(found: Forecast, left: Forecast, units: Sequence[Unit], *, last: float) -> list[Part]:
    """The shares of what is left of the update `found`: of units before the blocks all that the forward waits for."""
    parts, first = parts_of(units), _first_block(units)
    before = sum(part.update for part in parts[:first])
    inside = sum(bound.seconds or 0.0 for bound in found.bounds if bound.phase == "update" and bound.kind == "adamw")
    waits = max(last * (found.seconds["update"] or 0.0), before * inside)
    share = min(1.0, waits / left.seconds["update"]) if left.seconds["update"] else 0.0
    scale = [share / before if before else 0.0] * first + [(1 - share) / (1 - before)] * (len(parts) - first)
    return [replace(part, update=part.update * its) for part, its in zip(parts, scale, strict=True)]


def _asked_of(bound: Bound, *, gpu: bool) -> str:
    """The one thing whose seconds these are."""
    if bound.kind in ("adamw", "compute"):
        return "gpu" if gpu and bound.kind == "compute" else "cpu"
    return {"adamw_gpu": "gpu", "drive": bound.place}.get(bound.kind, bound.kind)
