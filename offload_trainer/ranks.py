"""The other processes of a run: agreeing on objects, waiting for each other. With one process all of it is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from offload_trainer.errors import TrainerError, UserError

T = TypeVar("T")


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_rank_zero(work: Callable[[], object]) -> None:
    """Do `work` on rank 0 only. A failure there is every rank's failure."""
    failed: Exception | None = None
    if not _several() or dist.get_rank() == 0:
        try:
            work()
        except Exception as error:
            failed = error
    told = share_from_zero(None if failed is None else (isinstance(failed, UserError), str(failed)))
    if failed is not None:
        raise failed
    if told is not None:
        raise (UserError if told[0] else TrainerError)(told[1])


def rank_zero_first(work: Callable[[], T]) -> T:
    """Do `work` on rank 0, then on the others, which find done what it leaves behind."""
    if _several():
        on_rank_zero(work)
    return work()


def share_from_zero(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not _several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, on every rank."""
    if not _several():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def wait_for_all() -> None:
    if _several():
        dist.barrier()
