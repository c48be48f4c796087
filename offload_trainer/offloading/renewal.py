"""Which units have their new weights home, while an update is under way: whoever needs one waits for that one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

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

    def begin(self) -> None:
        """An update begins, the one before is over."""
        with self._lock:
            self._left = Counter(self._pages)
            self._units = {unit: Future() for unit in self._pages}
            self._end = Future()

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
        self._end.finish_part(error)

    # -- who needs new weights ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """No update is under way when this returns. Raises what went wrong with the last one, each time."""
        self._end.wait()
