"""The update of pages on drives behind the backward, before their step is decided.

    a unit's gradients are complete ──> its pages on drives come, and are computed as if the step were not clipped
    state      to its page's other place (`page_places`); the one of the step before still holds
    weights    to their home: what has given all its gradients computes no more with the old ones in this step
    decided    as expected: the pages are done; at the step's end one small record flips all places at once
               otherwise: they are done again from the places that hold
               skipped: they never were, and the weights are rounded once more out of the masters that hold

Nothing is decided by what was done ahead, and the same kernel makes the same page of the same decision, so no bit
depends on it. Holding the new weights back until the decision would take 2 bytes of RAM for each parameter on a drive;
reading masters again costs nothing but in a step that is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from offload_trainer.offloading.decision import Decision
from offload_trainer.offloading.moving import Sent
from offload_trainer.plan.layout import Page

_RECENT, _AT_MOST = 8, 2  # steps; that were other than expected


class Ahead:
    """What is done of one step before it is decided."""

    def __init__(self, expected: Decision) -> None:
        self.expected = expected
        self.written: dict[int, Sent] = {}  # pages that were computed, their state on its way to its other place
        self.began: float | None = None  # when the first came, by the clock of seconds that are hidden
        self.error: BaseException | None = None  # that ended it

    def kept(self, decision: Decision, pages: Sequence[Page]) -> set[int]:
        """Those of the written pages that are what the decision makes of them."""
        same = {unit: self.expected.says_the_same(decision, unit) for unit in {pages[n].unit for n in self.written}}
        return {number for number in self.written if same[pages[number].unit]}


class Watch:
    """Whether steps are rarely enough other than expected for the next one to be begun ahead: 2 of the last 8.

    What was done ahead of such a step was in vain, and its drives' bytes are moved once more.
    """

    def __init__(self) -> None:
        self._other: deque[bool] = deque(maxlen=_RECENT)

    @property
    def rarely(self) -> bool:
        return sum(self._other) <= _AT_MOST

    def decided(self, *, as_expected: bool) -> None:
        self._other.append(not as_expected)
