"""Predict how much of an update is hidden when it overlaps the backward and the next forward. Pure arithmetic.

    update    unit 0, 1, 2, ...        in the order in which the forward needs them
    forward          0, 1, 2, ...      each unit when it has its new weights

This is a flow shop with two machines and the same job order on both. Its length is the maximum over k of "update up to
unit k, then forward from k on" (S. M. Johnson, 1954). Work of both on the same resource (a drive, the bus, the CPU)
adds up. Only the forward of the step's first micro-batch can hide an update, because its backward overwrites the sums.

    backward  head, last block, ...    pages on drives of each unit whose gradients are complete (speculative update)

Speculative updates overlap the step's last backward from its first complete block on. Pages that the next forward needs
first are updated first, so the remaining pages are spread evenly over the blocks. Modules before the blocks complete
last, so all of their pages remain. Pages in RAM wait for the clipping factor. A mispredicted step hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_trainer.plan.tiered.layout import Page, Unit
from offload_trainer.plan.time.step_time import Bound, Forecast


@dataclass(frozen=True)
class Part:
    """A unit's share of the update's time and of the forward's time."""

    update: float
    forward: float


def parts_of(units: Sequence[Unit]) -> list[Part]:
    """Return the shares in the order of the forward. Modules before the blocks are lookups; a tied head is added."""
    first = _first_block(units)
    tied = sum(place.weight.numel for unit in units[:first] for place in unit.places if place.weight.uses > 1)
    trained = sum(unit.trained for unit in units) or 1
    computed = (sum(unit.elements for unit in units[first:]) + tied) or 1
    parts = [Part(unit.trained / trained, unit.elements / computed * (unit.index >= first)) for unit in units]
    return [*parts, Part(0.0, tied / computed)]


def _first_block(units: Sequence[Unit]) -> int:
    return next((unit.index for unit in units if unit.block), 0)


def hidden_seconds(found: Forecast, parts: Sequence[Part], *, micro_batches: int, gpu: bool) -> float:
    """Return the seconds of the update that the first micro-batch's forward hides; 0 if a phase is unknown."""
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
class BackwardOverlap:
    """Seconds of a speculative update during the step's last backward."""

    done: float  # seconds of the update that are done
    hidden: float  # seconds saved compared with running both one after the other


def share_on_drives(pages: Sequence[Page]) -> float:
    """Return the share of the update whose pages are on drives."""
    return sum(page.elements for page in pages if page.home >= 0) / (sum(page.elements for page in pages) or 1)


def share_that_is_last(units: Sequence[Unit], pages: Sequence[Page]) -> float:
    """Return the share of the pages on drives that belong to units before the blocks, which complete last."""
    first = _first_block(units)
    away = [page for page in pages if page.home >= 0]
    return sum(page.elements for page in away if page.unit < first) / (sum(page.elements for page in away) or 1)


def ahead_of(
    found: Forecast, units: Sequence[Unit], *, on_drives: float, last: float, micro_batches: int, gpu: bool
) -> BackwardOverlap:
    """Return how much of the update runs during the last backward.

    `on_drives` is the share of the update on drives, `last` the result of `share_that_is_last`. Shared resources, such
    as a CPU that computes the model, make the backward longer.
    """
    update, backward = found.seconds["update"], found.seconds["backward"]
    if not update or backward is None or not on_drives:
        return BackwardOverlap(0.0, 0.0)
    backward /= micro_batches
    forwards = [part.forward for part in parts_of(units)]
    blocks = [share for unit, share in zip(units, forwards, strict=False) if unit.block]
    first = backward * (1.0 - sum(blocks[:-1]))  # the head and one block are complete
    asked, others = _asked_ahead(found, on_drives=on_drives, micro_batches=micro_batches, gpu=gpu)
    whole = (1 - last) * min(update, max(asked.values(), default=0.0))
    done, both = 0.0, backward
    for _ in range(100):  # fixed point: a longer backward hides more, which makes it longer
        done = min(whole, both - first)
        part = done / whole if whole else 0.0
        both = max(backward, *(others.get(of, 0.0) + part * seconds for of, seconds in asked.items()))
    return BackwardOverlap(done, max(0.0, backward + done - both))


def _asked_ahead(
    found: Forecast, *, on_drives: float, micro_batches: int, gpu: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each resource that pages on drives use, and that the last backward uses."""
    pages: dict[str, float] = {}
    backward: dict[str, float] = {}
    for bound in found.bounds:
        of, seconds = _asked_of(bound, gpu=gpu), bound.seconds or 0.0
        if bound.phase == "update" and bound.kind != "adamw_gpu":
            pages[of] = pages.get(of, 0.0) + seconds * (1.0 if bound.kind == "drive" else on_drives)
        elif bound.phase == "backward":
            backward[of] = backward.get(of, 0.0) + seconds / micro_batches
    return pages, backward


def left_after(found: Forecast, ahead: BackwardOverlap, *, on_drives: float) -> Forecast:
    """Return the forecast of the rest of the update after the clipping factor is known; pages in RAM wait for it."""
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
    """Return the shares of the remaining update; the forward waits for all of the units before the blocks."""
    parts, first = parts_of(units), _first_block(units)
    before = sum(part.update for part in parts[:first])
    inside = sum(bound.seconds or 0.0 for bound in found.bounds if bound.phase == "update" and bound.kind == "adamw")
    waits = max(last * (found.seconds["update"] or 0.0), before * inside)
    share = min(1.0, waits / left.seconds["update"]) if left.seconds["update"] else 0.0
    scale = [share / before if before else 0.0] * first + [(1 - share) / (1 - before)] * (len(parts) - first)
    return [replace(part, update=part.update * its) for part, its in zip(parts, scale, strict=True)]


def _asked_of(bound: Bound, *, gpu: bool) -> str:
    """Return the resource that a bound uses."""
    if bound.kind in ("adamw", "compute"):
        return "gpu" if gpu and bound.kind == "compute" else "cpu"
    return {"adamw_gpu": "gpu", "drive": bound.place}.get(bound.kind, bound.kind)
