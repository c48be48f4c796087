"""The other processes of a run: agreeing on objects, waiting for each other. With one process all of it is free.

A rank that fails tells why and ends; the others find its connections closed, and end with `LOST` and without a word.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offload_trainer.errors import AGAIN, Elsewhere, TrainerError, UserError

T = TypeVar("T")

LOST = 69  # exit code of a rank whose only trouble is that another has gone
STALLED = 300  # seconds that ranks wait for each other within a step
_SETTING_UP = timedelta(days=1)  # while rank 0 draws a model or writes a checkpoint; who dies is noticed at once
_JOINING, _AGAIN = 600.0, 0.1  # seconds until all have imported what they need and come; between two looks
_TELLING, _NOT_COMING = 5.0, "not coming"  # seconds to reach the launcher's store; a key there
_LATER = 30  # seconds: rank 0 can name who is missing, and is the first to give up


def join() -> None:
    """Become one of the ranks that the launcher has started, as its environment says.

    SIGTERM ends the process until all have come: Python would not get to run, and there is nothing to save.
    """
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store, rank, world = _when_all_have_come()
    store.set_timeout(_SETTING_UP)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_SETTING_UP)
    signal.signal(signal.SIGTERM, handler)


def _when_all_have_come() -> tuple[dist.Store, int, int]:
    """What ranks find each other through, the rank and their number. TrainerError where not all have come in time.

    A rank that ends before it has come, for a mistake in its command, closes no connection of anybody's; its launcher
    ends those of its own node only.
    """
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    why = (
        f"after {_JOINING:g} s not all ranks of the run have come to {place}: a node has not been started, has ended "
        "with a message of its own, or does not reach that address (GLOO_SOCKET_IFNAME names the network)"
    )
    until = time.monotonic() + _JOINING
    try:
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=_JOINING)))
    except RuntimeError as error:
        raise TrainerError(f"{why}: {str(error).splitlines()[0]}") from error
    try:
        store.add("come", 1)
        while (come := store.add("come", 0)) < world:
            if store.check([_NOT_COMING]):
                node, told = store.get(_NOT_COMING).decode().split(" ", 1)
                known = node == os.environ.get("GROUP_RANK")  # said on this node, by the rank itself
                raise Elsewhere(told, code=LOST) if known else TrainerError(f"node {node} does not come: {told}")
            if time.monotonic() > until:
                raise TrainerError(f"{why}: {come} of {world} are here")
            time.sleep(_AGAIN)
    except RuntimeError as error:
        ended = f"the launcher at {place} has ended before all ranks have come; its node says why"
        raise TrainerError(ended) from error
    return store, rank, world


def tell_not_coming(why: str) -> None:
    """To ranks of other nodes, which wait for this one to `join`; where there is a launcher's store to tell it by."""
    if _several() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    with suppress(RuntimeError):  # their node has ended
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_TELLING)))
        store.set(_NOT_COMING, f"{os.environ.get('GROUP_RANK')} {why}")


def place_here() -> tuple[int, int]:
    """(rank, world); (0, 1) where no ranks have been joined."""
    return (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)


def nodes() -> tuple[range, ...]:
    """The ranks of each node, as the launcher has counted them there; one node where it does not say. All ranks call.

    UserError where they are not as many on each: each node holds the state of its ranks, and plans for as much.
    """
    rank, world = place_here()
    if world == 1:
        return (range(1),)
    told = gather(int(os.environ.get("LOCAL_RANK", rank)))
    each = world // max(1, told.count(0))
    if told != [number % each for number in range(world)]:
        raise UserError(
            f"ranks are not as many on every node: they are number {', '.join(map(str, told))} of theirs; start as "
            "many on each (torchrun --nproc-per-node)"
        )
    return tuple(range(first, first + each) for first in range(0, world, each))


def group_of(members: Sequence[Sequence[int]] = (), *, in_step: bool = True, backend: str = "gloo") -> Any:
    """The one of several groups of ranks that this rank is in, or one of all. All ranks call, alike.

    `in_step`: what is sent there is sent within a step, and not waited for as long as a start. `backend`: "nccl" for
    what is on GPUs.
    """
    patience = timedelta(seconds=STALLED + _LATER) if in_step else _SETTING_UP
    if not members:
        return dist.new_group(backend=backend, timeout=patience)
    made, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in members], backend=backend, timeout=patience)
    return made


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
                f"{str(error.__cause__).splitlines()[0]}; {AGAIN}"
            ) from error
        raise


def spread(values: torch.Tensor, *, source: int, group: Any = None) -> None:
    """Fill `values` (1-D, contiguous) with what they are on rank `source`."""
    if _several() and values.numel():
        with _noticing():
            dist.broadcast(values.view(torch.uint8), src=source, group=group)


def join_parts(values: torch.Tensor, number: int, *, group: Any) -> None:
    """Fill `values` (1-D, contiguous) with equal parts, of which each rank of the group has its `number`'s in place.

    On a GPU it is queued on the current stream.
    """
    parts = values.view(torch.uint8)
    size = parts.numel() // dist.get_world_size(group)
    with _noticing():
        dist.all_gather_into_tensor(parts, parts[number * size : (number + 1) * size], group=group)


def all_to_all(parts: torch.Tensor, *, group: Any) -> torch.Tensor:
    """Send part i (contiguous, one for each rank of the group) to its rank i; returns what came of rank i as part i.

    On a GPU it is queued on the current stream.
    """
    come = torch.empty_like(parts)
    with _noticing():
        dist.all_to_all_single(come.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8), group=group)
    return come


def trade(
    out: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]], *, group: Any
) -> Callable[[], None]:
    """Begin to send each of `out` to its rank, and to fill each of `into` from its; what is given waits for all of it.

    1-D, contiguous, on the CPU. Between two ranks they arrive in the order in which they are sent, those of no elements
    not at all.
    """
    begun = []
    with _noticing():
        for rank, values in into:
            if values.numel():
                begun.append(dist.irecv(values.view(torch.uint8), rank, group=group))
        for rank, values in out:
            if values.numel():
                begun.append(dist.isend(values.view(torch.uint8), rank, group=group))

    def wait() -> None:
        with _noticing():
            for one in begun:
                assert one is not None
                one.wait()

    return wait


def add_up(values: torch.Tensor, *, group: Any) -> None:
    """Set `values` (on the CPU) to the sum over all ranks: exact where at most one of them has another than 0."""
    with _noticing():
        dist.all_reduce(values, group=group)


def share(value: Any, *, source: int, group: Any) -> Any:
    """The value of rank `source`, on every rank of a group."""
    box = [value]
    with _noticing():
        dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class Group:
    """Who does something together: all ranks, over connections that only one thread uses; or this process alone."""

    rank: int = 0
    process_group: Any = None  # None: alone

    def first(self, work: Callable[[], object]) -> None:
        """Do `work` on rank 0 only. A failure there is every rank's failure."""
        failed: Exception | None = None
        if self.rank == 0:
            try:
                work()
            except Exception as error:
                failed = error
        told = _from_zero(_told(failed), self.process_group)
        if failed is not None:
            raise failed
        _raise_elsewhere([told])

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank; returns what each made of it, in their order. A failure of one is every rank's."""
        failed: Exception | None = None
        mine: list[T] = []
        try:
            mine.append(work())
        except Exception as error:
            failed = error
        told = _gathered((_told(failed), mine), self.process_group)
        if failed is not None:
            raise failed
        _raise_elsewhere([wrong for wrong, _ in told])
        return [value for _, values in told for value in values]


def _told(failed: Exception | None) -> tuple[int, str] | None:
    """What other ranks are told of a failure: its exit code and its words."""
    return None if failed is None else (getattr(failed, "exit_code", LOST), str(failed))


def _raise_elsewhere(told: Sequence[tuple[int, str] | None]) -> None:
    for wrong in told:
        if wrong is not None:
            raise Elsewhere(wrong[1], code=wrong[0])


ALONE = Group()


def everybody() -> Group:
    """All ranks, in the thread that trains."""
    return Group(dist.get_rank(), dist.group.WORLD) if _several() else ALONE


def beside() -> Group:
    """All ranks, for one thread beside the one that trains. All ranks call it, in the thread that trains."""
    if not _several():
        return ALONE
    with _noticing():
        return Group(dist.get_rank(), dist.new_group(backend="gloo", timeout=_SETTING_UP))


def on_rank_zero(work: Callable[[], object]) -> None:
    """Do `work` on rank 0 only. A failure there is every rank's failure."""
    everybody().first(work)


def on_some(work: Callable[[], object], *, mine: bool) -> None:
    """Do `work` on the ranks of which it is `mine`. A failure on one is every rank's failure."""
    failed: Exception | None = None
    if mine:
        try:
            work()
        except Exception as error:
            failed = error
    told = gather(None if failed is None else (getattr(failed, "exit_code", LOST), str(failed)))
    if failed is not None:
        raise failed
    for failure in told:
        if failure is not None:
            raise Elsewhere(failure[1], code=failure[0])


def rank_zero_first(work: Callable[[], T]) -> T:
    """Do `work` on rank 0, then on the first of each other node, then on the rest: they find done what it leaves.

    Or half done, where nodes have no such directory in common.
    """
    if _several():
        on_rank_zero(work)
        rank, each = place_here()[0], len(nodes()[0])
        on_some(work, mine=rank > 0 and rank % each == 0)
    return work()


def share_from_zero(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return _from_zero(value, everybody().process_group)


def _from_zero(value: Any, process_group: Any) -> Any:
    if process_group is None:
        return value
    box = [value]
    with _noticing():
        dist.broadcast_object_list(box, src=0, group=process_group)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, on every rank."""
    return _gathered(value, everybody().process_group)


def _gathered(value: Any, process_group: Any) -> list[Any]:
    if process_group is None:
        return [value]
    box: list[Any] = [None] * dist.get_world_size(process_group)
    with _noticing():
        dist.all_gather_object(box, value, group=process_group)
    return box


def wait_for_all(*, group: Any = None) -> None:
    if _several():
        with _noticing():
            dist.barrier(group)
