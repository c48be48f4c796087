"""Enumerate the numbers of tensor-parallel ranks that `parallel.tensor=auto` tries: the divisors of a node's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offload_trainer.config import ParallelSection, TrainSection
from offload_trainer.plan.plan import Plan
from offload_trainer.units import format_seconds


def tensor_of(section: ParallelSection) -> int:
    """Return the number of tensor-parallel ranks; 1 while `auto` is unresolved."""
    return 1 if section.tensor == "auto" else section.tensor


def divisions(train: TrainSection, *, world: int, nodes: int) -> Iterator[tuple[int, TrainSection]]:
    """Yield each possible number of tensor-parallel ranks with its train section, 1 first.

    The tokens per step stay the same: a group of N ranks takes N times the rows, of which each rank holds about 1/N.
    Groups stay inside a node because every block waits for their all-reduce.
    """
    here = world // nodes
    for count in range(1, here + 1):
        if here % count:
            continue
        update = {"micro_batch_size": train.micro_batch_size * count} if train.tokens_per_step == "auto" else {}
        yield count, train.model_copy(update=update)


def why(chosen: int, plans: Mapping[int, Plan], refused: Mapping[int, str]) -> str:
    """Return a sentence with the chosen number, and the seconds or the shortfall of each number that was tried."""
    told = [f"parallel.tensor=auto: {chosen}"]
    for count, plan in plans.items():
        if not plan.fits:
            told.append(f"{count}: " + "; ".join(plan.shortfalls()))
        else:
            step = plan.forecast.step
            told.append(f"{count}: " + ("not timed" if step is None else f"{format_seconds(step)} a step"))
    return ", ".join([*told, *(f"{count}: {reason}" for count, reason in refused.items())])
