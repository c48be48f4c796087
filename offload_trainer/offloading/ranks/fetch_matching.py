"""Decide which weight fetches ranks share as a collective, without deadlock when ranks need different units.

    rank 0   fetch 5   fetch 4   barrier       in each round every rank announces its next action to all others
    rank 1   fetch 5   barrier   fetch 4       fetch 5 is shared; each rank fetches 4 alone, in its own round

Ranks usually announce the same actions in the same order. They differ if a rank skips a layer, or if no token is routed
to an expert: that rank has no gradients for the unit and reaches the unit's barrier later than the others, with fetches
in between that the others have not announced yet. It fetches these units alone.
"""

from __future__ import annotations

from collections.abc import Callable

from offload_trainer.storage.transfer import Future, Workers, ending

_BARRIER = -1

Exchange = Callable[[int], list[int]]  # this rank's number -> those of all ranks, once all have given theirs


class FetchMatching:
    """Rounds between all ranks, announced by one thread of each rank and carried out on a separate thread."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._thread = Workers(1, "rounds")
        self._error: BaseException | None = None

    def barrier(self) -> None:
        """Wait until every rank has reached this barrier; raise the first error of any round."""
        future = Future()

        def until_all_meet() -> None:
            while set(self._round(_BARRIER)) != {_BARRIER}:
                pass

        self._thread.put(ending(future, until_all_meet))
        future.wait()

    def ask(self, what: int, then: Callable[[bool, BaseException | None], None]) -> None:
        """Announce the action `what` (0 or more), and call `then(together, error)` on the thread.

        `together` is true if all ranks have announced the same action in this round.
        """
        assert what >= 0

        def poll() -> None:
            try:
                together = set(self._round(what)) == {what}
            except BaseException as error:
                then(False, error)
            else:
                then(together, None)

        self._thread.put(poll)

    def _round(self, mine: int) -> list[int]:
        if self._error is not None:
            raise self._error
        try:
            return self._exchange(mine)
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        """End the thread. If it waits for a rank that never comes, leave it to the end of the process."""
        self._thread.close(patience=1.0)
