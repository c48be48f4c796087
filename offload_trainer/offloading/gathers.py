"""Units of weights in host memory that the ranks of a node bring to their devices by parts.

    RAM ──each rank its part──> its device ──all-gather (NCCL; gloo where CPUs compute)──> every device

Where a rank needs a unit that not all others need next (`offloading/rounds`) it copies that whole. Who gathers comes
to the same units in the same order as the others do, on a thread of its own, and over connections of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offload_trainer.offloading.device import copy_alone
from offload_trainer.offloading.node import Node
from offload_trainer.offloading.rounds import Rounds
from offload_trainer.plan.take import even_part
from offload_trainer.storage.transfer import Future, Workers, ending

Told = Callable[[BaseException | None], None]
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # host memory, and where on the device it goes
Join = Callable[[torch.Tensor, int], None]  # fills (on the device, 1-D) with equal parts, of which this rank's is there


class Gather:
    """A unit that this rank needs. It is called with memory to fill where that is the host's; see `when` and `fill`."""

    def __init__(self, host: torch.Tensor, *, rank: int, ranks: int, join: Join) -> None:
        """`host`: the unit, 1-D; `rank` of the `ranks` of the node."""
        self._host, self._rank, self._ranks, self._join = host, rank, ranks, join
        self._given = Future()  # what it goes to may be overwritten, and its new weights are home
        self._lock = threading.Lock()
        self._then: Told | None = None
        self._closed: RuntimeError | None = None
        self._together = False
        self.begun = False  # whether the other ranks have told what they do next

    def __call__(self, into: torch.Tensor) -> Future:
        """Fill `into`, in host memory, once it is this rank's turn."""
        future, fill = Future(), lambda: self.fill(into, copy_alone)
        self.when(lambda error: future.finish_part(error) if error else ending(future, fill)())
        return future

    def when(self, then: Told) -> None:
        """Call `then` once, on a thread, when it is this rank's turn, to `fill` at once; or with what went wrong."""
        with self._lock:
            self._then, closed = then, self._closed
        if closed is None:
            self._given.finish_part()
        else:
            self._tell(closed)

    def fill(self, into: torch.Tensor, copy: Copy) -> None:
        """Bring the unit `into` a device's memory, by this rank's part where the others are at it too."""
        part = even_part(self._host.numel(), ranks=self._ranks) if self._together else 0
        whole, mine = part * self._ranks, slice(part * self._rank, part * (self._rank + 1))
        if whole < self._host.numel():
            copy(self._host[whole:], into[whole:])
        if whole:
            copy(self._host[mine], into[mine])
            self._join(into[:whole], self._rank)

    # -- for `Gathers` ------------------------------------------------------------------------------------------------

    def begin_alone(self, error: BaseException | None) -> None:
        self.begun = True
        self._given.then(lambda closed: self._tell(error or closed))

    def begin_together(self) -> None:
        """On the thread that gathers."""
        try:
            self._given.wait()
        except RuntimeError:
            return  # closed before it was given
        self._together = True
        self._tell(None)

    def abandon(self, closed: RuntimeError) -> None:
        """Whoever waits for it, or would, is told so; but what has begun goes on."""
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


class Gathers:
    """What this rank wants by parts. All ranks of the node have one each."""

    def __init__(self, node: Node, *, rounds: Rounds, join: Join) -> None:
        """`join`: of the ranks that gather, for a thread here alone."""
        self._node, self._rounds, self._join = node, rounds, join
        self._wanted: list[Gather] = []  # that have not been given or have not begun, perhaps
        self._thread = Workers(1, "gathers")

    def want(self, unit: int, host: torch.Tensor) -> Gather:
        """The unit, which is `host`, is what this rank needs next.

        Where it goes may be said later, once the unit's new weights are home; then they are on every rank's way.
        """
        rank = self._node.rank - self._node.here.start
        wanted = Gather(host, rank=rank, ranks=len(self._node.here), join=self._join)
        self._wanted = [one for one in self._wanted if not one.is_over] + [wanted]
        self._rounds.ask(unit, lambda together, error: self._begin(wanted, together, error))
        return wanted

    def _begin(self, wanted: Gather, together: bool, error: BaseException | None) -> None:
        if together:
            wanted.begun = True
            self._thread.put(wanted.begin_together)
        else:
            wanted.begin_alone(error)

    def abandon(self) -> None:
        """Who waits for what has not begun, and perhaps never will, is told so. Nothing more is wanted."""
        closed = RuntimeError("closed before it was brought")
        for wanted in self._wanted:
            wanted.abandon(closed)

    def close(self) -> None:
        """After `abandon`. A thread that still waits for ranks that will not come is left to the end of the process."""
        self._thread.close(patience=1.0)
