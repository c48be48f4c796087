"""Track which units have their new weights while an update runs, so that a forward waits only for the unit it needs.

With several ranks a thread visits the units in the order of the forward, waits for this rank's pages and for the other
ranks' threads, and only then reports the unit. An error completes all pending futures; a later wait raises it, except
for a unit that has all of its new weights.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from offload_trainer.offloading.device import DeviceCopy
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.storage.transfer import Future, Workers, done, followed


class UpdateProgress:
    """The progress of the current update, by unit. Any thread may report pages."""

    def __init__(
        self, pages: Sequence[Page], *, units: Sequence[int] = (), agree: Callable[[int], None] | None = None
    ) -> None:
        """Track `pages`, which are all that an update changes on this rank.

        With several ranks, `agree(unit)` returns when the new weights of all have arrived; `units` are those that any
        rank changes, in the order of the forward.
        """
        self._pages = Counter(page.unit for page in pages)
        self._left: Counter[int] = Counter()  # pages of each unit that are not written yet
        self._units: dict[int, Future] = {}  # units without their new weights, or whose update failed
        self._agree, self._order = agree, tuple(units)
        self._own_pages: dict[int, Future] = {}  # the same of this rank's pages; with one rank it is the same dict
        self._thread = Workers(1, "update_progress") if agree else None
        self._end = done()
        self._lock = threading.Lock()
        self._began = 0.0
        self.waited = 0.0  # seconds that others have waited for new weights
        self._took = 0.0  # total seconds of all updates

    def begin(self, *, since: float | None = None) -> None:
        """Begin an update after the previous one has ended. `since`: the time of its first speculative page, if any."""
        with self._lock:
            self._left = Counter(self._pages)
            self._own_pages = {unit: Future() for unit in self._pages}
            self._units = {unit: Future() for unit in self._order} if self._agree else self._own_pages
            self._end, self._began = Future(), since or time.perf_counter()
        if self._thread is not None:
            self._thread.put(self._agree_on_all)

    def _agree_on_all(self) -> None:
        """Agree on one unit after the other on the thread, in the same order as the other ranks' threads."""
        assert self._agree is not None
        try:
            for unit in self._order:
                if (own := self._own_pages.get(unit)) is not None:
                    own.wait()
                self._agree(unit)
                with self._lock:
                    future = self._units.pop(unit)
                future.finish_part()
        except BaseException as error:
            self._fail(error)

    def when_written(self, unit: int, *, weights: Future, whole: Future, pages: int = 1) -> None:
        """Report pages of the unit when their weights are written; with several ranks, when their state is as well."""

        def written(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error)
                return
            with self._lock:
                self._left[unit] -= pages
                future = self._own_pages.pop(unit, None) if self._left[unit] == 0 else None
            if future is not None:
                future.finish_part()

        (whole if self._agree else weights).then(written)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            left = [*self._units.values(), *self._own_pages.values()]
        for future in left:
            if not future.done:
                future.finish_part(error)

    def left(self) -> list[Future]:
        """Return a future for each unit without its new weights; once all have them, all gradients have been read."""
        with self._lock:
            return list(self._units.values())

    def end(self, error: BaseException | None) -> None:
        """End the update."""
        if error is not None:
            self._fail(error)
        self._took += time.perf_counter() - self._began
        self._end.finish_part(error)

    def close(self) -> None:
        """End the thread. If it waits for a rank that never comes, leave it to the end of the process."""
        if self._thread is not None:
            self._thread.close(patience=1.0)

    @property
    def hidden(self) -> float:
        """Return the total seconds of updates that were hidden behind other work."""
        return max(0.0, self._took - self.waited)

    @property
    def is_running(self) -> bool:
        """Return whether an update is running."""
        return not self._end.done

    def is_ready(self, unit: int) -> bool:
        """Return whether the unit has its new weights."""
        return unit not in self._units

    def wait(self, unit: int) -> None:
        """Wait for the unit's new weights; raise the update's error."""
        if (future := self._units.get(unit)) is not None:
            self._wait(future)

    def wait_for_weights(self) -> None:
        """Wait until all units have their new weights, as `wait` does."""
        for future in self.left():
            self._wait(future)

    def finish(self) -> None:
        """Wait for the end of the update; raise its error, each time."""
        self._wait(self._end)

    def fetch_when_ready(self, unit: int, fetch: Callable[[], DeviceCopy]) -> DeviceCopy:
        """Call `fetch` as soon as the unit has its new weights: now, or on the thread that reports it."""
        future = self._units.get(unit)
        return fetch() if future is None else _DeferredFetch(future, fetch, self._wait)

    def _wait(self, future: Future) -> None:
        start = None if future.done else time.perf_counter()
        try:
            future.wait()
        finally:
            if start is not None:
                self.waited += time.perf_counter() - start


class _DeferredFetch:
    """A fetch that begins when its unit has its new weights."""

    def __init__(self, home: Future, fetch: Callable[[], DeviceCopy], wait: Callable[[Future], None]) -> None:
        self._wait, self._arrivals = wait, list[DeviceCopy]()
        self._begun = followed(home, lambda: self._arrivals.append(fetch()))

    def wait(self) -> None:
        self._wait(self._begun)
        self._arrivals[0].wait()
