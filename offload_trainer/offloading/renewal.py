"""Which units have their new weights home, while an update is under way: whoever needs one waits for that one.

    update   page home, page home, ... ──told_by──> the unit's future ──> `wait`, or `fetched`: its way to the device
    end      all of them, and what the update does last ──> `finish`

What goes wrong ends every future that is left with it, and is raised by each wait from then on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from offload_trainer.offloading.device import Arrival
from offload_trainer.plan.layout import Page
from offload_trainer.storage.transfer import Future, done


class Renewal:
    """Of one update after the other. Told of pages on any thread."""

    def __init__(self, pages: Sequence[Page]) -> None:
        """`pages`: all that an update changes."""
        self._pages = Counter(page.unit for page in pages)
        self._left: Counter[int] = Counter()  # pages of each unit that are not home
        self._units: dict[int, Future] = {}  # those that are not home, or never will be
        self._end = done()
        self._lock = threading.Lock()
        self._began = 0.0
        self.waited = 0.0  # seconds, by those who need new weights
        self._took = 0.0  # seconds, from an update's begin to its end; of all so far

    def begin(self) -> None:
        """An update begins, the one before is over."""
        with self._lock:
            self._left = Counter(self._pages)
            self._units = {unit: Future() for unit in self._pages}
            self._end, self._began = Future(), time.perf_counter()

    def told_by(self, unit: int, *, pages: int = 1) -> Callable[[BaseException | None], None]:
        """What is to be called when so many of a unit's pages are home, or with what went wrong on the way."""

        def told(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error)
                return
            with self._lock:
                self._left[unit] -= pages
                future = self._units.pop(unit, None) if self._left[unit] == 0 else None
            if future is not None:
                future.finish_part()

        return told

    def _fail(self, error: BaseException) -> None:
        """Nobody waits for a page that may never come."""
        with self._lock:
            left = list(self._units.values())
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

    # -- who needs new weights ----------------------------------------------------------------------------------------

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
