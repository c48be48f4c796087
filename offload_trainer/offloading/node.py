"""The ranks of one node: memory that is there once for all of them, and how they wait for each other.

    memory   the same bytes in every rank; each writes what is its own
    meet     what ranks wrote before it, all read after it
    spread   what one rank's device holds, to all devices: NCCL between GPUs, gloo where CPUs stand for them

With one rank all of it is what it always was: memory of its own, and nobody to wait for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from offload_trainer import ranks
from offload_trainer.offloading.rounds import Beside, Rounds, exchange_of
from offload_trainer.storage.host_memory import host_buffer, mapped, memory_file

T = TypeVar("T")


class Node:
    """This process alone, or `together` with the other ranks of its process group, all on this node."""

    def __init__(self, *, together: bool = False, stalled: float = ranks.STALLED) -> None:
        """`stalled`: seconds after which a rank that does not `meet` ends the run."""
        self.rank, self.world = ranks.place_here() if together else (0, 1)
        self._stalled = stalled
        self._between_gpus: Any = None
        self._rounds: Rounds | None = None

    def memory(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        """`size` zeroed bytes (uint8), the same ones in every rank. All ranks ask alike, in the same order."""
        if self.world == 1 or size == 0:
            return host_buffer(size, pinned=pinned)
        descriptor = memory_file(size) if self.rank == 0 else -1
        pid, number = ranks.share_from_zero((os.getpid(), descriptor))
        if self.rank:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mapped(descriptor, size, pinned=pinned)
            ranks.wait_for_all()
        finally:
            os.close(descriptor)
        return memory

    def memory_of_each(self, size: int, *, pinned: bool = False) -> list[torch.Tensor]:
        """`size` bytes for each rank, which all can read."""
        return list(self.memory(self.world * size, pinned=pinned).split(size)) if size else []

    def meet(self) -> None:
        """Every rank has come this far when this returns. TrainerError, Elsewhere where one does not or has ended."""
        if self._rounds is not None:
            self._rounds.meet()
        elif self.world > 1:
            ranks.meet(stalled=self._stalled)

    def rounds(self) -> Rounds:
        """From now on ranks `meet` in rounds, where they do something else together too. All ranks call it."""
        if self._rounds is None:
            board = self.memory(8 * self.world).view(torch.int64)
            self._rounds = Rounds(exchange_of(board, rank=self.rank, stalled=self._stalled))
        return self._rounds

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()

    def once(self, work: Callable[[], T]) -> T:
        """What `work` gives, done by rank 0 while the others wait. A failure there is every rank's."""
        if self.world == 1:
            return work()
        found: list[T] = []
        ranks.on_rank_zero(lambda: found.append(work()))
        (result,) = ranks.share_from_zero(found)
        return result

    def spread(self, values: torch.Tensor, *, source: int, beside: Beside | None = None) -> None:
        """Fill `values` (1-D, contiguous), on the device, with what they are on rank `source`; all ranks call.

        `beside`: of the thread that calls, where it is not the one that trains. GPUs have connections for one of them
        at a time.
        """
        if self.world == 1:
            return
        if values.is_cuda and self._between_gpus is None:
            self._between_gpus = dist.new_group(backend="nccl")
        between = self._between_gpus if values.is_cuda else beside.group if beside else None
        ranks.spread(values, source=source, group=between)
