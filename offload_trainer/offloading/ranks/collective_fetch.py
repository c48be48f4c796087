"""Fetch offloaded weights together with the other ranks of a node, so that bytes are read or copied once per node.

From a drive each rank reads a part into a buffer that all share. From RAM, with `Node.by_parts`, each copies a part to
its device, and an all-gather brings the rest. `Turns` decides which fetches ranks share, without deadlock when they
need different units, as after a skipped layer: in each round every rank announces its next action to all others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from offload_trainer import ranks
from offload_trainer.offloading.device import Copy, QueuedFill, Read, copy_alone
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Exchange, Node
from offload_trainer.plan.tiered.layout import part_of
from offload_trainer.plan.tiered.spec import SHARED_READS
from offload_trainer.plan.tiered.weight_streaming import even_part
from offload_trainer.plan.tiers import on_drive
from offload_trainer.storage.transfer import Future, Workers, done, ending, followed

_BARRIER = -1


class Turn:
    """A fetch that begins once the ranks have decided whether to fetch together, and its destination is known."""

    def __init__(self) -> None:
        self.destination = Future()  # the destination is known and may be overwritten
        self.begun = Future()
        self.together: bool | None = None  # the decision of the ranks, once it is made

    def run(self, work: Callable[[], object]) -> Future:
        """Declare that the destination is known, and run `work` once, on a thread, at this rank's turn."""
        ended = followed(self.begun, work)
        self.destination.finish_part()
        return ended


class Turns:
    """Rounds in which one thread of each rank announces what it does next, and the fetches that all do together."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rounds, self._fetching = Workers(1, "rounds"), Workers(1, "fetches")
        self._error: BaseException | None = None
        self._waiting: list[Turn] = []  # fetches that may not have begun or may lack a destination

    def barrier(self) -> None:
        """Wait until every rank has reached this barrier; raise the first error of any round."""

        def until_all_meet() -> None:
            while not self._all_announce(_BARRIER):
                pass

        self._rounds.submit(until_all_meet).wait()

    def announce(self, unit: int) -> Turn:
        """Announce that this rank needs the unit next; its destination may be given later."""
        turn = Turn()
        self._waiting = [one for one in self._waiting if not one.begun.done] + [turn]

        def decide() -> None:
            turn.together = self._all_announce(unit)
            if turn.together:
                self._fetching.put(ending(turn.begun, turn.destination.wait))
            else:
                turn.destination.then(turn.begun.finish_part)

        self._rounds.submit(decide).then(lambda error: turn.begun.finish_part(error) if error else None)
        return turn

    def _all_announce(self, mine: int) -> bool:
        """Return whether all ranks announce the same action in this round."""
        if self._error is not None:
            raise self._error
        try:
            return set(self._exchange(mine)) == {mine}
        except BaseException as error:
            self._error = error
            raise

    def cancel(self) -> None:
        """Fail all fetches that have not begun; no further ones may be announced."""
        closed = RuntimeError("closed before it was fetched")
        for turn in self._waiting:
            if not turn.destination.done:
                turn.destination.finish_part(closed)
            if turn.together is None:
                turn.begun.finish_part(closed)

    def close(self) -> None:
        """End the threads after `cancel`. One that waits for ranks that never come is left to the process's end."""
        self._fetching.close(patience=1.0)
        self._rounds.close(patience=1.0)


class WeightFetches:
    """The sources from which this rank fetches the units in `store`, alone or together with its node's other ranks."""

    def __init__(self, store: UnitStore, *, node: Node, gpus: bool) -> None:
        """Allocate shared buffers and start threads if there are several ranks. All ranks call it."""
        self._store = store
        self._here, self._number = len(node.local_ranks), node.rank - node.local_ranks.start
        self._turns: Turns | None = None
        self._between: Any = None  # the group that gathers weights
        self._buffers: list[torch.Tensor] = []
        reads, gathers = node.world > 1 and any(map(on_drive, store.homes)), node.by_parts and any(store.elements)
        if reads or gathers:
            self._turns = Turns(node.exchange())
            node.meet = self._turns.barrier
        if reads:
            largest = max(count for count, home in zip(store.elements, store.homes, strict=True) if on_drive(home))
            size = largest * store.dtype.itemsize
            self._buffers = [node.memory(size).view(store.dtype) for _ in range(SHARED_READS)]
            self._group, self._copies, self._copied = node.group(in_step=False), Workers(1, "shared copies"), done()
            self._failed: BaseException | None = None
        if gathers:
            self._between = ranks.group_of(node.nodes, gpus=gpus)

    def source(self, unit: int) -> torch.Tensor | Read:
        """Return the source of a unit's weights: host memory, or a function that fills a buffer, announced already."""
        host = self._store.host(unit)
        if self._turns is None:
            return host if host is not None else (lambda buffer: self._store.read(unit, 0, buffer))
        if host is not None and self._between is None:
            return host
        turn = self._turns.announce(unit)
        if host is None:
            return lambda buffer: turn.run(lambda: self._read_at_turn(unit, buffer, turn))
        return QueuedFill(turn.run, partial(self._gather, turn, host))

    def _gather(self, turn: Turn, host: torch.Tensor, into: torch.Tensor, copy: Copy) -> None:
        """Fill `into` (on the device) with a unit in RAM, by an all-gather if all ranks fetch it together."""
        part = even_part(host.numel(), ranks=self._here) if turn.together else 0
        whole, mine = part * self._here, slice(part * self._number, part * (self._number + 1))
        if whole < host.numel():
            copy(host[whole:], into[whole:])
        if whole:
            copy(host[mine], into[mine])
            ranks.all_gather_parts(into[:whole], self._number, group=self._between)

    def _read_at_turn(self, unit: int, buffer: torch.Tensor, turn: Turn) -> Future:
        """Read a unit, together on the fetching thread. All ranks' threads read the same units in the same order."""
        if not turn.together:
            return self._store.read(unit, 0, buffer)
        try:
            if self._failed is not None:
                raise self._failed
            elements = self._store.elements[unit]
            whole = self._buffers[0][:elements]
            self._buffers.append(self._buffers.pop(0))  # the least recently used one is first
            first, end = part_of(elements, self._number, ranks=self._here)
            if first < end:
                self._store.read(unit, first, whole[first:end]).wait()
            self._copied.wait()  # after the barrier other ranks may overwrite the previous unit's buffer
            self._group.all_gather_numbers(0)
            self._copied = self._copies.submit(lambda: copy_alone(whole, buffer))
            return self._copied
        except BaseException as error:
            self._failed = error
            raise

    def cancel(self) -> None:
        """Fail the fetches that have not begun, because other ranks may never join them."""
        if self._turns is not None:
            self._turns.cancel()

    def close(self) -> None:
        self.cancel()
        if self._turns is not None:
            self._turns.close()
        if self._buffers:
            self._copies.close()
