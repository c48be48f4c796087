"""The ranks of a run, on one node or on several: memory that is there once a node, and how ranks wait for each other.

    memory   the same bytes in every rank of the node; each writes what is its own
    meet     what ranks wrote before it, all read after it
    spread   what one rank's device holds, to all devices: NCCL between GPUs, sockets where CPUs stand for them
    across   what one rank has written into its node's memory, to the ranks of the same number on the other nodes
    trade    what ranks have for each other, in host memory
    joining  what the devices of a node's ranks have a part of each, whole on all of them

A node holds the state of its own ranks, and all weights. With one rank all of it is what it always was: memory of its
own, and nobody to wait for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from offload_trainer import ranks
from offload_trainer.offloading.ranks.fetch_matching import Exchange, FetchMatching, SideGroup, exchange_of
from offload_trainer.storage.host_memory import PAGE, host_buffer, mapped, memory_file, pin

T = TypeVar("T")
Addressed = Sequence[tuple[int, torch.Tensor]]  # (rank, 1-D and contiguous, on the CPU)


class Node:
    """This process alone, or `together` with the other ranks of its process group."""

    def __init__(self, *, together: bool = False, by_parts: bool = False, stalled: float = ranks.STALLED) -> None:
        """`by_parts`: whether its ranks bring weights of its memory to their devices by parts, where there are several.

        `stalled`: seconds after which a rank that does not `barrier` ends the run.
        """
        self.rank, self.world = ranks.place_here() if together else (0, 1)
        self.nodes = ranks.nodes() if together else (range(1),)
        self.number = next(number for number, its in enumerate(self.nodes) if self.rank in its)
        self.by_parts = by_parts and len(self.here) > 1
        self._stalled = stalled
        self._between_gpus: Any = None
        self._rounds: FetchMatching | None = None
        self._trading: Any = ranks.group_of() if self.world > 1 else None
        several = len(self.nodes) > 1
        self._inside = ranks.group_of(self.nodes, in_step=False) if several else None
        self._across = ranks.group_of(self.all_alike) if several else None

    @property
    def here(self) -> range:
        """The ranks of this node."""
        return self.nodes[self.number]

    @property
    def elsewhere(self) -> list[int]:
        """The ranks of other nodes."""
        return [rank for rank in range(self.world) if rank not in self.here]

    @property
    def is_first(self) -> bool:
        """Whether this rank does what its node does once."""
        return self.rank == self.here.start

    def memory(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        """`size` zeroed bytes (uint8), the same ones in every rank of the node, which ask alike, in the same order."""
        if len(self.here) == 1 or size == 0:
            return host_buffer(size, pinned=pinned)
        descriptor = memory_file(size) if self.is_first else -1
        pid, number = ranks.share((os.getpid(), descriptor), source=self.here.start, group=self._inside)
        if not self.is_first:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mapped(descriptor, size, pinned=pinned)
            ranks.wait_for_all(group=self._inside)
        finally:
            os.close(descriptor)
        return memory

    def memory_of_each(self, size: int, *, pinned: bool = False) -> dict[int, torch.Tensor]:
        """Return `size` bytes for each rank of the node, which all of them can read.

        `pinned` is of this rank's own: no other device copies into them, and what all ranks pin of all would be as many
        times as much of the driver's tables.
        """
        if size == 0:
            return {}
        if len(self.here) == 1:
            return {self.rank: self.memory(size, pinned=pinned)}
        each = -(-size // PAGE) * PAGE  # CUDA pins whole pages of memory
        parts = [part[:size] for part in self.memory(len(self.here) * each).split(each)]
        found = dict(zip(self.here, parts, strict=True))
        if pinned:
            pin(found[self.rank])
        return found

    def barrier(self) -> None:
        """Every rank has come this far when this returns. TrainerError, Elsewhere where one does not or has ended."""
        if self._rounds is not None:
            self._rounds.barrier()
        elif self.world > 1:
            ranks.barrier(stalled=self._stalled)

    def rounds(self) -> FetchMatching:
        """From now on ranks `barrier` in rounds, where they do something else together too. All ranks call it."""
        if self._rounds is None:
            self._rounds = FetchMatching(self.exchange())
        return self._rounds

    def exchange(self) -> Exchange:
        """Exchange numbers between one thread of each rank; every rank waits, as in `barrier`. Collective."""
        return exchange_of(stalled=self._stalled)

    def align(self) -> None:
        """What ranks told each other in rounds is done when this returns: before they wait for each other otherwise."""
        if self._rounds is not None:
            self._rounds.barrier()

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()

    def once(self, work: Callable[[], None]) -> None:
        """Do `work` on the first rank of each node while the others wait. A failure there is every rank's."""
        if self.world == 1:
            work()
        else:
            ranks.on_some(work, mine=self.is_first)

    def each(self, work: Callable[[], T]) -> T:
        """What `work` gives here, done by every rank. A failure of one is every rank's."""
        if self.world == 1:
            return work()
        found: list[T] = []
        ranks.everybody().each(lambda: found.append(work()))
        return found[0]

    def broadcast(self, values: torch.Tensor, *, source: int, beside: SideGroup | None = None) -> None:
        """Fill `values` (1-D, contiguous), on the device, with what they are on rank `source`; all ranks call.

        `beside`: of the thread that calls, where it is not the one that trains. GPUs have connections for one of them
        at a time.
        """
        if self.world == 1:
            return
        if values.is_cuda and self._between_gpus is None:
            self._between_gpus = ranks.group_of(in_step=False, gpus=True)
        between = self._between_gpus if values.is_cuda else beside.group if beside else None
        ranks.broadcast(values, source=source, group=between)

    def joining(self, *, gpus: bool) -> Callable[[torch.Tensor, int], None]:
        """What fills memory on the device with equal parts of this node's ranks, its number's being there already.

        For a thread of each rank, over connections of its own. All ranks of all nodes call this.
        """
        group = ranks.group_of(self.nodes, gpus=gpus)
        return lambda values, number: ranks.join_parts(values, number, group=group)

    @property
    def all_alike(self) -> list[tuple[int, ...]]:
        """Ranks that have the same place on their nodes, for each place; empty where there is one node."""
        return list(zip(*self.nodes, strict=True)) if len(self.nodes) > 1 else []

    @property
    def alike(self) -> list[int]:
        """The ranks that have this one's place on their nodes, its own first to last node."""
        return [its[self.rank - self.here.start] for its in self.nodes]

    def across(self, values: torch.Tensor, *, source: int, beside: SideGroup | None = None) -> None:
        """Fill `values` (1-D, contiguous), in host memory, with what they are on rank `source` of `alike`, who call.

        `beside`: see `broadcast`.
        """
        if len(self.nodes) > 1:
            ranks.broadcast(values, source=source, group=beside.across if beside else self._across)

    def complete(self, values: torch.Tensor, begins: Sequence[int]) -> None:
        """Fill `values` with what each node has of them: from its element of `begins` up to the next node's."""
        for source, first, end in zip(self.alike, begins, [*begins[1:], values.numel()], strict=True):
            self.across(values[first:end], source=source)

    def send_recv(self, out: Addressed, into: Addressed) -> Callable[[], None]:
        """Begin to send each of `out` to its rank, and to fill each of `into` from its; what is given waits for it."""
        return ranks.send_recv(out, into, group=self._trading)

    def add_up(self, values: torch.Tensor) -> None:
        """Set `values` to their sum over all ranks, of which one at most has another than 0 for an element."""
        ranks.add_up(values, group=self._trading)
