"""Read units of weights from drives once per node instead of once per rank.

    drive ──each rank reads its part──> shared host buffer ──barrier──> each rank copies the whole unit to its buffer

A unit that not all ranks need next (`offloading/ranks/fetch_matching.py`) is read by each rank alone. Two shared
buffers alternate. A rank reaches the barrier for one buffer only after it has copied the previous unit out of the other
one, which may then be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload_trainer.offloading.device import copy_alone
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.fetch_matching import FetchMatching
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import Unit, part_of
from offload_trainer.plan.tiered.spec import SHARED_READS
from offload_trainer.storage.transfer import Future, Workers, done, ending


@dataclass
class _Wanted:
    """A unit that this rank needs, and its destination."""

    unit: int
    given: Future = field(default_factory=Future)  # the destination is known
    buffer: torch.Tensor | None = None
    begun: bool = False  # the ranks have decided whether to read it together
    filled: Future = field(default_factory=Future)

    def into(self, buffer: torch.Tensor) -> Future:
        """Set the destination, which may be overwritten from now on; return the future of the read."""
        self.buffer = buffer
        self.given.finish_part()
        return self.filled


class SharedReads:
    """The shared reads of one rank: units of `store` that are on drives, read with the other ranks of `node`."""

    def __init__(
        self, units: Sequence[Unit], store: UnitStore, *, node: Node, rounds: FetchMatching, barrier: Callable[[], None]
    ) -> None:
        """Allocate the shared buffers and start the threads. All ranks call it.

        `barrier` synchronises the reading threads of all ranks; only that thread uses it.
        """
        self._store, self._node, self._rounds, self._meet = store, node, rounds, barrier
        self._elements = {unit.index: unit.elements for unit in units if store.homes[unit.index] >= 0}
        size = max(self._elements.values()) * store.dtype.itemsize
        self._buffers = [node.memory(size).view(store.dtype) for _ in range(SHARED_READS)]
        self._turn, self._copied = 0, done()
        self._wanted: list[_Wanted] = []  # reads that may not have begun or may lack a destination
        self._error: BaseException | None = None
        self._reader, self._copies = Workers(1, "shared reads"), Workers(1, "shared copies")

    def want(self, unit: int) -> Callable[[torch.Tensor], Future]:
        """Announce that this rank needs the unit next; return a function that fills a buffer with it.

        The function may be called later, when the unit's new weights have been written.
        """
        wanted = _Wanted(unit)
        self._wanted = [one for one in self._wanted if not (one.given.done and one.begun)] + [wanted]
        self._rounds.ask(unit, lambda together, error: self._begin(wanted, together, error))
        return wanted.into

    def _begin(self, wanted: _Wanted, together: bool, error: BaseException | None) -> None:
        wanted.begun = True
        if together:
            self._reader.put(lambda: self._read_together(wanted))
        else:
            wanted.given.then(lambda closed: self._read_alone(wanted, error or closed))

    def _read_alone(self, wanted: _Wanted, error: BaseException | None) -> None:
        if error is not None:
            wanted.filled.finish_part(error)
            return
        assert wanted.buffer is not None
        self._store.read(wanted.unit, 0, wanted.buffer).then(wanted.filled.finish_part)

    def _read_together(self, wanted: _Wanted) -> None:
        """Read a unit together, on the reading thread. All ranks' threads read the same units in the same order."""
        try:
            if self._error is not None:
                raise self._error
            wanted.given.wait()
            assert wanted.buffer is not None
            self._read(wanted, wanted.buffer)
        except BaseException as error:
            self._error = error
            wanted.filled.finish_part(error)

    def _read(self, wanted: _Wanted, buffer: torch.Tensor) -> None:
        elements, node = self._elements[wanted.unit], self._node
        whole = self._buffers[self._turn][:elements]
        self._turn = (self._turn + 1) % SHARED_READS
        first, end = part_of(elements, node.rank - node.here.start, ranks=len(node.here))
        if first < end:
            self._store.read(wanted.unit, first, whole[first:end]).wait()
        self._copied.wait()  # after the barrier other ranks may overwrite the previous unit's buffer
        self._meet()
        self._copied = Future()
        self._copies.put(ending(self._copied, lambda: copy_alone(whole, buffer)))
        self._copied.then(wanted.filled.finish_part)

    def cancel(self) -> None:
        """Fail all reads that have not begun; no further ones may be announced."""
        closed = RuntimeError("closed before it was read")
        for wanted in self._wanted:
            if not wanted.given.done:
                wanted.given.finish_part(closed)
            if not wanted.begun:
                wanted.filled.finish_part(closed)

    def close(self) -> None:
        """End the threads; call it after `cancel`, when no caller waits for a read any more."""
        self._reader.close(patience=1.0)
        self._copies.close()
