"""What ranks do next, matched: those who do the same do it together, and nobody waits for one who waits for him.

    rank 0   fetch 5   fetch 4   meet          a round: each tells what it does next, and sees what the others do
    rank 1   fetch 5   meet      fetch 4       fetch 5 together, fetch 4 each alone, as soon as it is told

Ranks that run the same program tell the same in the same order. They need not: of a layer that was left out, or
experts that no token went to, a rank has no gradients, and comes to where all ranks meet for that unit later than
others do, with fetches in between that those have not told yet. It has to do these alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from offload_trainer.ranks import group_of, naming_the_late, patience_in_step, wait_for_all
from offload_trainer.storage.transfer import Future, Workers, ending

_MEET = -1
_NUMBER = struct.Struct("!q")

Exchange = Callable[[int], list[int]]  # this rank's number -> those of all ranks, once all have given theirs


class FetchMatching:
    """Told by one thread of each rank, carried out on one of its own."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._thread = Workers(1, "rounds")
        self._error: BaseException | None = None

    def barrier(self) -> None:
        """Every rank has come this far when this returns. Raises what went wrong, there or before."""
        future = Future()
        self._thread.put(ending(future, self._until_all_meet))
        future.wait()

    def ask(self, what: int, then: Callable[[bool, BaseException | None], None]) -> None:
        """This rank does `what` next (0 or more). `then(together, error)`, on the thread: whether all ranks do."""
        assert what >= 0

        def look() -> None:
            try:
                together = set(self._round(what)) == {what}
            except BaseException as error:
                then(False, error)
            else:
                then(together, None)

        self._thread.put(look)

    def _until_all_meet(self) -> None:
        while set(self._round(_MEET)) != {_MEET}:
            pass

    def _round(self, mine: int) -> list[int]:
        if self._error is not None:
            raise self._error
        try:
            return self._exchange(mine)
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        """A thread that still waits for ranks that will not come is left to the end of the process."""
        self._thread.close(patience=1.0)


def exchange_of(*, stalled: float) -> Exchange:
    """Rounds between all ranks, over connections of their own.

    Raises TrainerError on rank 0, which names those that have not come after `stalled` seconds; Elsewhere where another
    rank has ended.
    """
    mesh, patience = group_of(), patience_in_step(stalled)

    def exchange(mine: int) -> list[int]:
        with naming_the_late(stalled):
            told = mesh.all_gather_equal(_NUMBER.pack(mine), patience=patience)
        return [int(_NUMBER.unpack(one)[0]) for one in told]

    return exchange


class SideGroup:
    """All ranks, for one thread of each beside the one that trains: connections of its own. All make it, in order."""

    def __init__(self, *, across: Sequence[Sequence[int]] = ()) -> None:
        """`across`: ranks that send each other what is on their nodes, some together each, where that is done too."""
        self.across = group_of(across) if across else None
        self.group = group_of(in_step=False)

    def barrier(self) -> None:
        """Every rank's thread has come this far when this returns. Elsewhere where one has ended."""
        wait_for_all(group=self.group)
