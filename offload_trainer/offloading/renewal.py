"""Which units have their new weights home, while an update is under way: whoever needs one waits for that one.

    update   page home, page home, ... ──told_by──> the unit's future ──> `wait`, or `fetched`: its way to the device
    end      all of them, and what the update does last ──> `finish`

Of several ranks each updates its pages of a unit. A thread goes through the units in the order of the forward, waits
for this rank's pages and then for the other ranks' threads: only then is the unit home. It waits for nobody who trains.

What goes wrong ends every future that is left with it, and is raised by each wait from then on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from offload_trainer.offloading.device import Arrival
from offload_trainer.plan.layout import Page
from offload_trainer.storage.transfer import Future, Workers, done


class Renewal:
    """Of one update after the other. Told of pages on any thread."""

    def __init__(
        self, pages: Sequence[Page], *, units: Sequence[int] = (), agree: Callable[[int], None] | None = None
    ) -> None:
        """`pages`: all that an update changes here.

        `agree(unit)`, with several ranks: returns once every rank has called it, and the new weights of all are here;
        `units`: that one of them changes, in the order of the forward.
        """
        self._pages = Counter(page.unit for page in pages)
        self._left: Counter[int] = Counter()  # pages of each unit that are not home
        self._units: dict[int, Future] = {}  # those that are not home, or never will be
        self._agree, self._order = agree, tuple(units)
        self._here: dict[int, Future] = {}  # of those to agree on: this rank's pages are home
        self._thread = Workers(1, "renewal") if agree else None
        self._end = done()
        self._lock = threading.Lock()
        self._began = 0.0
        self.waited = 0.0  # seconds, by those who need new weights
        self._took = 0.0  # seconds, from an update's begin to its end; of all so far

    def begin(self, *, since: float | None = None) -> None:
        """An update begins, the one before is over. `since`: when its first page was computed, if one was."""
        with self._lock:
            self._left = Counter(self._pages)
            self._units = {unit: Future() for unit in (self._order if self._agree else self._pages)}
            self._here = {unit: Future() for unit in self._pages} if self._agree else {}
            self._end, self._began = Future(), since or time.perf_counter()
        if self._thread is not None:
            self._thread.put(self._agree_on_all)

    def _agree_on_all(self) -> None:
        """On the thread: one unit after the other, as the other ranks' threads do."""
        assert self._agree is not None
        try:
            for unit in self._order:
                if unit in self._here:
                    self._here[unit].wait()
                self._agree(unit)
                with self._lock:
                    future = self._units.pop(unit)
                future.finish_part()
        except BaseException as error:
            self._fail(error)

    def told_by(self, unit: int, *, pages: int = 1) -> Callable[[BaseException | None], None]:
        """What is to be called when the new weights of so many of a unit's pages are home, or with what went wrong."""

        def told(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error)
                return
            with self._lock:
                self._left[unit] -= pages
                future = None
                if self._left[unit] == 0:
                    future = self._here.get(unit) if self._agree else self._units.pop(unit, None)
            if future is not None:
                future.finish_part()

        return told

    def _fail(self, error: BaseException) -> None:
        """Nobody waits for a page that may never come."""
        with self._lock:
            left = [*self._units.values(), *self._here.values()]
        for future in left:
            if not future.done:
                future.finish_part(error)

    def wait_for_pages(self) -> None:
        """All units are home when this returns."""
        with self._lock:
            left = list(self._units.values())
        for future in left:
            future.wait()

    def end(self, error: BaseException | None) -> None:
        """The update is over."""
        if error is not None:
            self._fail(error)
        self._took += time.perf_counter() - self._began
        self._end.finish_part(error)

    def close(self) -> None:
        """No update is under way; what waits for a rank that will not come is left to the end of the process."""
        if self._thread is not None:
            self._thread.close(patience=1.0)

    # -- who needs new weights ----------------------------------------------------------------------------------------

    @property
    def of_all_ranks(self) -> bool:
        """Whether a unit is home once other ranks' pages of it are, too."""
        return self._agree is not None

    @property
    def hidden(self) -> float:
        """Seconds of all updates so far for which nobody waited."""
        return max(0.0, self._took - self.waited)

    def is_home(self, unit: int) -> bool:
        return unit not in self._units

    def wait(self, unit: int) -> None:
        """The unit's new weights are home when this returns. Raises what went wrong with the update."""
        future = self._units.get(unit)
        if future is not None:
            self._wait(future)

    def finish(self) -> None:
        """No update is under way when this returns. Raises what went wrong with the last one, each time."""
        self._wait(self._end)

    @property
    def under_way(self) -> bool:
        return not self._end.done

    def fetched(self, unit: int, fetch: Callable[[], Arrival]) -> Arrival:
        """`fetch()`, begun as soon as the unit is home: now, or by the thread that saw it."""
        future = self._units.get(unit)
        return fetch() if future is None else _Later(future, fetch, self._wait)

    def _wait(self, future: Future) -> None:
        if future.done:
            future.wait()
            return
        start = time.perf_counter()
        try:
            future.wait()
        finally:
            self.waited += time.perf_counter() - start


class _Later:
    """A fetch that begins once its unit is home."""

    def __init__(self, home: Future, fetch: Callable[[], Arrival], wait: Callable[[Future], None]) -> None:
        self._fetch, self._wait = fetch, wait
        self._arrival: Arrival | None = None
        self._begun = Future()
        home.then(self._begin)

    def _begin(self, error: BaseException | None) -> None:
        if error is None:
            try:
                self._arrival = self._fetch()
            except BaseException as caught:
                error = caught
        self._begun.finish_part(error)

    def wait(self) -> None:
        self._wait(self._begun)
        assert self._arrival is not None
        self._arrival.wait()
