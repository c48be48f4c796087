"""Provide shared memory and collective operations for the ranks of a run, on one node or several.

Each node stores the optimizer state of its own ranks, and all weights. With a single rank every operation is local and
does not wait.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from offload_trainer import ranks
from offload_trainer.ranks import Addressed
from offload_trainer.storage.host_memory import PAGE, host_buffer, memory_file, pin

T = TypeVar("T")

Exchange = Callable[[int], list[int]]  # this rank's number -> those of all ranks, once all have given theirs
Connections = tuple[Any, Any]  # the groups of all ranks, and of `counterparts` if there are several nodes


class Node:
    """This rank's view of its node and of the other ranks; by default a single process without other ranks."""

    def __init__(self, *, together: bool = False, by_parts: bool = False, every: int = 1) -> None:
        """Connect to the other ranks, which were joined before, if `together`; all ranks call it then.

        `by_parts`: the node's ranks fetch weights from RAM as shards, if there are several. `every`: only ranks at a
        multiple of this distance belong together; they are numbered 0, 1, ... here.
        """
        (rank, world), nodes = (ranks.place_here(), ranks.nodes()) if together else ((0, 1), (range(1),))
        self.rank, self.world = rank // every, world // every
        self.nodes = tuple(range(its.start // every, its.stop // every) for its in nodes)  # the ranks of each node
        self._groups = [range(first, world, every) for first in range(every)]  # ranks that belong together, of all
        self._members = self._groups[rank % every]
        self.peers = self  # the ranks that compute the same units as this one: with a pipeline, one of each pipeline
        self.number = next(number for number, its in enumerate(self.nodes) if self.rank in its)
        self.local_ranks = self.nodes[self.number]
        self.remote_ranks = [rank for rank in range(self.world) if rank not in self.local_ranks]
        self.is_first = self.rank == self.local_ranks.start  # it does the work that is done once per node
        several, divided = len(self.nodes) > 1, every > 1 and self.world > 1
        # The ranks with this rank's position on each node, in the order of the nodes.
        self.counterparts = [its[self.rank - self.local_ranks.start] for its in self.nodes]
        self.by_parts = by_parts and len(self.local_ranks) > 1
        self._between_gpus: Any = None
        # Set if ranks fetch weights together: carries out the barriers, in turn with these fetches. It waits until all
        # announced rounds are done, before ranks communicate in another way.
        self.meet: Callable[[], None] | None = None
        self._point_to_point = self.group() if self.world > 1 else ranks.ALONE
        self._meeting = self.group() if divided else ranks.everybody()
        inside = [group[its.start : its.stop] for group in self._groups for its in self.nodes]
        self._inside = ranks.group_of(inside, in_step=False) if several or divided else ranks.everybody()
        # Without the limit of a step, because saves and exports use it too, and a rank may wait there for a slow disk.
        self._connections = ranks.everybody(), self._across(in_step=False)

    def _across(self, *, in_step: bool) -> Any:
        return ranks.group_of(list(zip(*ranks.nodes(), strict=True)), in_step=in_step) if len(self.nodes) > 1 else None

    def side_connections(self) -> Connections:
        """Return separate connections for one side thread of each rank. Collective."""
        return ranks.group_of(in_step=False), self._across(in_step=True)

    def memory(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        """Return `size` zeroed bytes (uint8) that all ranks of the node share. They call it in the same order."""
        if len(self.local_ranks) == 1 or size == 0:
            return host_buffer(size, pinned=pinned)
        descriptor = memory_file(size) if self.is_first else -1
        pid, number = self._inside.all_gather_json((os.getpid(), descriptor))[0]
        if not self.is_first:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = host_buffer(size, pinned=pinned, descriptor=descriptor)
            self._inside.all_gather_numbers(0)
        finally:
            os.close(descriptor)
        return memory

    def memory_of_each(self, size: int, *, pinned: bool = False) -> dict[int, torch.Tensor]:
        """Return `size` shared bytes for each rank of the node, by rank; with `pinned` this rank's own are pinned."""
        if size == 0:
            return {}
        each = -(-size // PAGE) * PAGE  # CUDA pins whole pages of memory
        parts = [part[:size] for part in self.memory(len(self.local_ranks) * each).split(each)]
        found = dict(zip(self.local_ranks, parts, strict=True))
        if pinned:
            pin(found[self.rank])
        return found

    def barrier(self) -> None:
        """Wait until every rank has reached the barrier. Raises TrainerError if one does not come in time."""
        if self.meet is not None:
            self.meet()
        elif self.world > 1:
            ranks.exchange_numbers(0, group=self._meeting)

    def group(self, *, in_step: bool = True) -> ranks.Group:
        """Return separate connections between these ranks, for one thread of each. Collective."""
        return ranks.group_of(self._groups, in_step=in_step)

    def exchange(self) -> Exchange:
        """Return `ranks.exchange_numbers` over separate connections, for one thread of each rank. Collective."""
        return partial(ranks.exchange_numbers, group=self.group())

    def on_first_rank(self, work: Callable[[], None]) -> None:
        """Run `work` on the first rank of each node while the others wait; an error is raised on every rank."""
        self.on_each_rank(lambda: work() if self.is_first else None)

    def on_each_rank(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result; an error of one rank is raised on every rank."""
        found: list[T] = []
        ranks.everybody().each(lambda: found.append(work()))
        return found[0]

    def broadcast(self, values: torch.Tensor, *, source: int, connections: Connections | None = None) -> None:
        """Broadcast `values` (1-D, contiguous, on the device) in place from rank `source`. All ranks call it.

        `connections` are those of the calling thread if it is not the training thread; GPUs have them for one thread.
        """
        if self.world == 1:
            return
        if values.is_cuda and self._between_gpus is None:
            self._between_gpus = ranks.group_of(in_step=False, gpus=True)
        between = self._between_gpus if values.is_cuda else (connections or self._connections)[0]
        ranks.broadcast(values, source=source, group=between)

    def broadcast_across(self, values: torch.Tensor, *, source: int, connections: Connections | None = None) -> None:
        """Broadcast `values` (1-D, in host memory) from rank `source` to its `counterparts`, which all call it."""
        if len(self.nodes) > 1:
            ranks.broadcast(values, source=source, group=(connections or self._connections)[1])

    def send_recv(self, out: Addressed, into: Addressed) -> Callable[[], None]:
        """Start sending each of `out` to its rank and filling each of `into` from its rank; return the wait."""
        outward, inward = ([(self._members[rank], values) for rank, values in way] for way in (out, into))
        return self._point_to_point.begin(outward, inward)

    def all_reduce(self, values: torch.Tensor) -> None:
        """All-reduce `values` in place to their sum; for each element at most one rank has a value other than 0."""
        ranks.all_reduce(values, group=self._point_to_point)
