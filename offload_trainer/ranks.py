"""The other processes of a run: agreeing on objects, waiting for each other. With one process all of it is free.

A rank that fails tells why and ends; the others find its connections closed, and end with `LOST` and without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from offload_trainer.errors import Elsewhere, TrainerError

T = TypeVar("T")

LOST = 69  # exit code of a rank whose only trouble is that another has gone
STALLED = 300  # seconds that ranks wait for each other within a step
_SETTING_UP = timedelta(days=1)  # while rank 0 draws a model or writes a checkpoint; who dies is noticed at once
_LATER = 30  # seconds: rank 0 can name who is missing, and is the first to give up


def join() -> None:
    """Become one of the ranks that the launcher has started, as its environment says."""
    dist.init_process_group("gloo", timeout=_SETTING_UP)


def place_here() -> tuple[int, int]:
    """(rank, world); (0, 1) where no ranks have been joined."""
    return (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)


@contextmanager
def _noticing() -> Iterator[None]:
    """What torch raises where another rank is gone: Elsewhere, since that one has told why."""
    try:
        yield
    except RuntimeError as error:
        raise Elsewhere(f"another rank has ended: {str(error).splitlines()[0]}", code=LOST) from error


def meet(*, stalled: float = STALLED) -> None:
    """Return once all ranks are here. TrainerError on rank 0, which names the one that is not after so many seconds."""
    if not _several():
        return
    first, began = dist.get_rank() == 0, time.monotonic()
    try:
        with _noticing():
            dist.monitored_barrier(timeout=timedelta(seconds=stalled + (0 if first else _LATER)))
    except Elsewhere as error:
        if first and time.monotonic() - began >= stalled:
            raise TrainerError(
                f"after {stalled:g} s another rank has not come to where all ranks meet in a step, and the run ends: "
                f"{str(error.__cause__).splitlines()[0]}. The same command goes on from the newest checkpoint"
            ) from error
        raise


def spread(values: torch.Tensor, *, source: int, group: Any = None) -> None:
    """Fill `values` (1-D, contiguous) with what they are on rank `source`."""
    if _several() and values.numel():
        with _noticing():
            dist.broadcast(values.view(torch.uint8), src=source, group=group)


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
    told = share_from_zero(None if failed is None else (getattr(failed, "exit_code", LOST), str(failed)))
    if failed is not None:
        raise failed
    if told is not None:
        raise Elsewhere(told[1], code=told[0])


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
    with _noticing():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, on every rank."""
    if not _several():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    with _noticing():
        dist.all_gather_object(box, value)
    return box


def wait_for_all() -> None:
    if _several():
        with _noticing():
            dist.barrier()
