"""Fetch offloaded weights together with the other ranks of a node, so that each byte is read or copied once per node.

    drive  ──each rank reads its part──> shared host buffer ──barrier──> each rank copies the whole unit to its buffer
    RAM    ──each rank its part──> its device ──all-gather (NCCL; gloo where CPUs compute)──> every device

A unit that not all ranks need next (`FetchMatching`) is read or copied by each rank alone. Ranks fetch the same units
together in the same order, on a separate thread and over separate connections.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_trainer.offloading.device import Read, copy_alone
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import FetchMatching, Node, SideGroup
from offload_trainer.plan.tiered.layout import part_of
from offload_trainer.plan.tiered.spec import SHARED_READS
from offload_trainer.plan.tiered.weight_streaming import even_part
from offload_trainer.plan.tiers import on_drive
from offload_trainer.storage.transfer import Future, Workers, done, ending

Told = Callable[[BaseException | None], None]
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # host memory, and where on the device it goes
Join = Callable[[torch.Tensor, int], None]  # all-gather in place: (1-D on the device, this rank's part filled; rank)


class WeightFetches:
    """The sources from which this rank fetches the units in `store`, alone or together with its node's other ranks."""

    def __init__(self, store: UnitStore, *, node: Node, gpus: bool) -> None:
        """Allocate shared buffers and start threads if there are several ranks. All ranks call it."""
        self._store, self._node = store, node
        self._reads: SharedReads | None = None
        if node.world > 1 and any(map(on_drive, store.homes)):
            self._reads = SharedReads(store, node=node, rounds=node.fetch_matching(), barrier=SideGroup().barrier)
        self._gathers: Turns | None = None
        if node.by_parts and any(store.elements):
            self._gathers, self._join = Turns(node.fetch_matching(), "gathers"), node.make_all_gather(gpus=gpus)

    def source(self, unit: int) -> torch.Tensor | Read:
        """Return the source of a unit's weights: host memory, or a function that fills a buffer.

        With several ranks this already announces the fetch, so that ranks that need the same unit next share it.
        """
        host = self._store.host(unit)
        if host is not None:
            gathers = self._gathers
            return PendingGather(gathers.announce(unit), host, node=self._node, join=self._join) if gathers else host
        return self._reads.request(unit) if self._reads else lambda buffer: self._store.read(unit, 0, buffer)

    def cancel(self) -> None:
        """Fail the fetches that have not begun, because other ranks may never join them."""
        for turns in (self._reads.turns if self._reads else None, self._gathers):
            if turns is not None:
                turns.cancel()

    def close(self) -> None:
        self.cancel()
        for shared in (self._reads, self._gathers):
            if shared is not None:
                shared.close()
        self._node.close()  # only these fetches use the node's rounds


class Turn:
    """A fetch that begins once the ranks have decided whether to fetch together, and its destination is known."""

    def __init__(self) -> None:
        self._destination = Future()  # the destination is known and may be overwritten
        self._decided = False
        self._begun = Future()
        self.together = False

    def when(self, then: Told) -> None:
        """Declare that the destination is known, and call `then` once, on a thread, at this rank's turn or on error."""
        self._begun.then(then)
        self._destination.finish_part()

    def decide(self, error: BaseException | None, *, thread: Workers | None) -> None:
        """Let the fetch begin: on `thread` if all ranks fetch together, else alone; or fail it with `error`."""
        self._decided, self.together = True, thread is not None
        if thread is not None:
            thread.put(ending(self._begun, self._destination.wait))
        else:
            self._destination.then(lambda closed: self._begun.finish_part(error or closed))

    def cancel(self, closed: RuntimeError) -> None:
        """Fail everything that waits for this turn, unless it has begun."""
        if not self._destination.done:
            self._destination.finish_part(closed)
        if not self._decided:
            self._begun.finish_part(closed)

    @property
    def is_over(self) -> bool:
        return self._begun.done


class Turns:
    """The turns of one rank's fetches, and the thread that carries out those that all ranks do together."""

    def __init__(self, rounds: FetchMatching, name: str) -> None:
        self._matching, self._thread = rounds, Workers(1, name)
        self._waiting: list[Turn] = []  # fetches that may not have begun or may lack a destination

    def announce(self, unit: int) -> Turn:
        """Announce that this rank needs the unit next.

        The destination may be given later, when the unit has its new weights on every rank.
        """
        turn = Turn()
        self._waiting = [one for one in self._waiting if not one.is_over] + [turn]
        self._matching.ask(unit, lambda together, error: turn.decide(error, thread=self._thread if together else None))
        return turn

    def cancel(self) -> None:
        """Fail all fetches that have not begun; no further ones may be announced."""
        closed = RuntimeError("closed before it was fetched")
        for turn in self._waiting:
            turn.cancel(closed)

    def close(self) -> None:
        """End the thread after `cancel`. If it waits for ranks that never come, leave it to the end of the process."""
        self._thread.close(patience=1.0)


class SharedReads:
    """The shared reads of one rank: units of `store` that are on drives, read with the other ranks of `node`.

    Two shared buffers alternate. A rank reaches the barrier for one buffer only after it has copied the previous unit
    out of the other one, which may then be overwritten.
    """

    def __init__(self, store: UnitStore, *, node: Node, rounds: FetchMatching, barrier: Callable[[], None]) -> None:
        """Allocate the shared buffers and start the threads. All ranks call it.

        `barrier` synchronises the reading threads of all ranks; only that thread uses it.
        """
        self._store, self._node, self._barrier = store, node, barrier
        largest = max(count for count, home in zip(store.elements, store.homes, strict=True) if on_drive(home))
        size = largest * store.dtype.itemsize
        self._buffers = [node.memory(size).view(store.dtype) for _ in range(SHARED_READS)]
        self._next, self._copied = 0, done()
        self._error: BaseException | None = None
        self.turns, self._copies = Turns(rounds, "shared reads"), Workers(1, "shared copies")

    def request(self, unit: int) -> Read:
        """Announce that this rank needs the unit next; return a function that fills a buffer with it."""
        turn = self.turns.announce(unit)

        def into(buffer: torch.Tensor) -> Future:
            filled = Future()

            def fill(error: BaseException | None) -> None:
                if error is not None:
                    filled.finish_part(error)
                elif turn.together:
                    self._read_together(unit, buffer, filled)
                else:
                    self._store.read(unit, 0, buffer).then(filled.finish_part)

            turn.when(fill)
            return filled

        return into

    def _read_together(self, unit: int, buffer: torch.Tensor, filled: Future) -> None:
        """Read a unit on the reading thread. All ranks' threads read the same units in the same order."""
        try:
            if self._error is not None:
                raise self._error
            elements, node = self._store.elements[unit], self._node
            whole = self._buffers[self._next][:elements]
            self._next = (self._next + 1) % SHARED_READS
            first, end = part_of(elements, node.rank - node.local_ranks.start, ranks=len(node.local_ranks))
            if first < end:
                self._store.read(unit, first, whole[first:end]).wait()
            self._copied.wait()  # after the barrier other ranks may overwrite the previous unit's buffer
            self._barrier()
            self._copied = self._copies.submit(lambda: copy_alone(whole, buffer))
            self._copied.then(filled.finish_part)
        except BaseException as error:
            self._error = error
            filled.finish_part(error)

    def close(self) -> None:
        """End the threads; call it after `cancel`, when no caller waits for a read any more."""
        self.turns.close()
        self._copies.close()


class PendingGather:
    """A unit that this rank needs. Call it to fill host memory, or use `when` and `fill` for device memory."""

    def __init__(self, turn: Turn, host: torch.Tensor, *, node: Node, join: Join) -> None:
        """Describe the unit `host` (1-D, in RAM). Only the thread of the turns uses `join`."""
        self._turn, self._host, self._join = turn, host, join
        self._rank, self._ranks = node.rank - node.local_ranks.start, len(node.local_ranks)
        self.when = turn.when

    def __call__(self, into: torch.Tensor) -> Future:
        """Fill `into`, in host memory, when it is this rank's turn."""
        future, fill = Future(), lambda: self.fill(into, copy_alone)
        self.when(lambda error: future.finish_part(error) if error else ending(future, fill)())
        return future

    def fill(self, into: torch.Tensor, copy: Copy) -> None:
        """Fill `into` (device memory) with the unit, by an all-gather if all ranks fetch it together."""
        part = even_part(self._host.numel(), ranks=self._ranks) if self._turn.together else 0
        whole, mine = part * self._ranks, slice(part * self._rank, part * (self._rank + 1))
        if whole < self._host.numel():
            copy(self._host[whole:], into[whole:])
        if whole:
            copy(self._host[mine], into[mine])
            self._join(into[:whole], self._rank)
