"""How many ranks share each product where that is left open: each number that the ranks of a node divide into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offload_trainer.config import ParallelSection, TrainSection
from offload_trainer.plan.plan import Plan
from offload_trainer.units import format_seconds


def tensor_of(section: ParallelSection) -> int:
    """Ranks that share each product; 1 until it is chosen."""
    return 1 if section.tensor == "auto" else section.tensor


def divisions(train: TrainSection, *, world: int, nodes: int) -> Iterator[tuple[int, TrainSection]]:
    """Each number with the wish for its rows, 1 first, and the tokens that a step has with 1: as many times the rows.

    A rank holds about as much of a micro-batch that is so much larger, since the group divides it. A group stays inside
    a node: its sums are waited for.
    """
    here = world // nodes
    for count in range(1, here + 1):
        if here % count:
            continue
        update = {"micro_batch": train.micro_batch * count} if train.tokens_per_step == "auto" else {}
        yield count, train.model_copy(update=update)


def why(chosen: int, plans: Mapping[int, Plan], refused: Mapping[int, str]) -> str:
    """What was chosen, and what was known of each number."""
    told = [f"parallel.tensor=auto: {chosen}"]
    for count, plan in plans.items():
        if not plan.fits:
            told.append(f"{count}: " + "; ".join(plan.shortfalls()))
        else:
            step = plan.forecast.step
            told.append(f"{count}: " + ("not timed" if step is None else f"{format_seconds(step)} a step"))
    return ", ".join([*told, *(f"{count}: {reason}" for count, reason in refused.items())])
