"""Fetch units of weights from host memory as shards that the ranks of a node all-gather between their devices.

    RAM ──each rank its part──> its device ──all-gather (NCCL; sockets where CPUs compute)──> every device

A unit that not all ranks need next (`offloading/ranks/fetch_matching.py`) is copied whole. Ranks gather the same units
in the same order, on a separate thread and over separate connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offload_trainer.offloading.device import copy_alone
from offload_trainer.offloading.ranks.fetch_matching import FetchMatching
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.weight_streaming import even_part
from offload_trainer.storage.transfer import Future, Workers, ending

Told = Callable[[BaseException | None], None]
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # host memory, and where on the device it goes
Join = Callable[[torch.Tensor, int], None]  # all-gather in place: (1-D on the device, this rank's part filled; rank)


class PendingGather:
    """A unit that this rank needs. Call it to fill host memory, or use `when` and `fill` for device memory."""

    def __init__(self, host: torch.Tensor, *, rank: int, ranks: int, join: Join) -> None:
        """Describe the unit `host` (1-D, in RAM) for number `rank` of the node's `ranks`."""
        self._host, self._rank, self._ranks, self._join = host, rank, ranks, join
        self._given = Future()  # the destination is known and may be overwritten
        self._lock = threading.Lock()
        self._then: Told | None = None
        self._closed: RuntimeError | None = None
        self._together = False
        self.begun = False  # the ranks have decided whether to gather it together

    def __call__(self, into: torch.Tensor) -> Future:
        """Fill `into`, in host memory, when it is this rank's turn."""
        future, fill = Future(), lambda: self.fill(into, copy_alone)
        self.when(lambda error: future.finish_part(error) if error else ending(future, fill)())
        return future

    def when(self, then: Told) -> None:
        """Call `then` once, on a thread, when it is this rank's turn to `fill`, or with an error."""
        with self._lock:
            self._then, closed = then, self._closed
        if closed is None:
            self._given.finish_part()
        else:
            self._tell(closed)

    def fill(self, into: torch.Tensor, copy: Copy) -> None:
        """Fill `into` (device memory) with the unit, by an all-gather if all ranks fetch it together."""
        part = even_part(self._host.numel(), ranks=self._ranks) if self._together else 0
        whole, mine = part * self._ranks, slice(part * self._rank, part * (self._rank + 1))
        if whole < self._host.numel():
            copy(self._host[whole:], into[whole:])
        if whole:
            copy(self._host[mine], into[mine])
            self._join(into[:whole], self._rank)

    # -- for `WeightAllGather` ---------------------------------------------------------------------------------------

    def begin_alone(self, error: BaseException | None) -> None:
        self.begun = True
        self._given.then(lambda closed: self._tell(error or closed))

    def begin_together(self) -> None:
        """Wait for the destination and report this rank's turn; runs on the gathering thread."""
        try:
            self._given.wait()
        except RuntimeError:
            return  # closed before there was a destination
        self._together = True
        self._tell(None)

    def cancel(self, closed: RuntimeError) -> None:
        """Fail everything that waits for the unit, unless it has begun."""
        if not self._given.done:
            with self._lock:
                self._closed = closed
            self._given.finish_part(closed)
        if not self.begun:
            self._tell(closed)

    @property
    def is_over(self) -> bool:
        return self.begun and self._given.done

    def _tell(self, error: BaseException | None) -> None:
        with self._lock:
            then, self._then = self._then, None
        if then is not None:
            then(error)


class WeightAllGather:
    """The units that this rank fetches by all-gather. Every rank of the node has one such object."""

    def __init__(self, node: Node, *, rounds: FetchMatching, join: Join) -> None:
        """Start the gathering thread; only that thread uses `join`."""
        self._node, self._rounds, self._join = node, rounds, join
        self._wanted: list[PendingGather] = []  # fetches that may not have begun or may lack a destination
        self._thread = Workers(1, "gathers")

    def want(self, unit: int, host: torch.Tensor) -> PendingGather:
        """Announce that this rank needs the unit `host` next, and return the fetch.

        The destination may be given later, when the unit has its new weights on every rank.
        """
        rank = self._node.rank - self._node.here.start
        wanted = PendingGather(host, rank=rank, ranks=len(self._node.here), join=self._join)
        self._wanted = [one for one in self._wanted if not one.is_over] + [wanted]
        self._rounds.ask(unit, lambda together, error: self._begin(wanted, together, error))
        return wanted

    def _begin(self, wanted: PendingGather, together: bool, error: BaseException | None) -> None:
        if together:
            wanted.begun = True
            self._thread.put(wanted.begin_together)
        else:
            wanted.begin_alone(error)

    def cancel(self) -> None:
        """Fail all fetches that have not begun; no further ones may be announced."""
        closed = RuntimeError("closed before it was brought")
        for wanted in self._wanted:
            wanted.cancel(closed)

    def close(self) -> None:
        """End the thread after `cancel`. If it waits for ranks that never come, leave it to the end of the process."""
        self._thread.close(patience=1.0)
