"""Units of weights that several ranks need, each read once from its drive.

    drive ──each rank its part──> memory that all ranks of the node see ──all have read──> each rank's buffer

Where a rank needs a unit that not all others need next (`offloading/ranks/fetch_matching`) it reads that alone. Two
buffers take turns: who has read its part of a unit has copied the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload_trainer.offloading.device.base import copy_alone
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.fetch_matching import FetchMatching
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import Unit, part_of
from offload_trainer.plan.tiered.spec import SHARED_READS
from offload_trainer.storage.transfer import Future, Workers, done, ending


@dataclass
class _Wanted:
    """A unit that this rank needs, and where it goes."""

    unit: int
    given: Future = field(default_factory=Future)  # the buffer that it goes to
    buffer: torch.Tensor | None = None
    begun: bool = False  # whether the other ranks have told what they do next
    filled: Future = field(default_factory=Future)

    def into(self, buffer: torch.Tensor) -> Future:
        """Fill it, from now on."""
        self.buffer = buffer
        self.given.finish_part()
        return self.filled


class SharedReads:
    """Reads `units` of `store` that live on drives, for the ranks of `node`."""

    def __init__(
        self, units: Sequence[Unit], store: UnitStore, *, node: Node, rounds: FetchMatching, barrier: Callable[[], None]
    ) -> None:
        """`barrier`: of the ranks that read together, for a thread here alone."""
        self._store, self._node, self._rounds, self._meet = store, node, rounds, barrier
        self._elements = {unit.index: unit.elements for unit in units if store.homes[unit.index] >= 0}
        size = max(self._elements.values()) * store.dtype.itemsize
        self._buffers = [node.memory(size).view(store.dtype) for _ in range(SHARED_READS)]
        self._turn, self._copied = 0, done()
        self._wanted: list[_Wanted] = []  # that have no buffer yet or have not begun, perhaps
        self._error: BaseException | None = None
        self._reader, self._copies = Workers(1, "shared reads"), Workers(1, "shared copies")

    def want(self, unit: int) -> Callable[[torch.Tensor], Future]:
        """The unit is what this rank needs next; what is returned fills a buffer with it.

        It may be called later, once the unit's new weights are home; then they are on every rank's way.
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
        """On a thread: all ranks' threads come to the same units in the same order."""
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
        self._copied.wait()  # the other ranks may overwrite that once they have met here
        self._meet()
        self._copied = Future()
        self._copies.put(ending(self._copied, lambda: copy_alone(whole, buffer)))
        self._copied.then(wanted.filled.finish_part)

    def cancel(self) -> None:
        """Who waits for what has not begun, and perhaps never will, is told so. Nothing more is wanted."""
        closed = RuntimeError("closed before it was read")
        for wanted in self._wanted:
            if not wanted.given.done:
                wanted.given.finish_part(closed)
            if not wanted.begun:
                wanted.filled.finish_part(closed)

    def close(self) -> None:
        """After `cancel`, and once nobody waits for what has begun."""
        self._reader.close(patience=1.0)
        self._copies.close()
