"""Speculative updates: update pages on drives during the backward, before the step's clipping factor is known.

    a unit's gradients are complete ──> its pages on drives are read and updated as if the step were not clipped
    state      is written to the page's second copy (`page_places`); the copy of the previous step stays valid
    weights    are written in place: a unit whose gradients are complete is not used again in this step
    decision   as expected: the pages are valid; at the step's end one small record switches all copies
               different: the pages are updated again from the valid copies
               skipped: the pages are discarded, and the weights are rounded again from the valid masters

The same kernel computes the same page from the same decision, so no bit depends on speculation. Keeping new weights
back until the decision would need 2 bytes of RAM for each parameter on a drive. Reading masters again only costs time
in a skipped step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from offload_trainer.offloading.update.page_pipeline import PendingWrite
from offload_trainer.offloading.update.step_params import StepParams
from offload_trainer.plan.tiered.layout import Page

_RECENT, _AT_MOST = 8, 2  # recent steps, and how many of them may have been mispredicted


class SpeculativeStep:
    """The speculative updates of one step."""

    def __init__(self, expected: StepParams) -> None:
        self.expected = expected
        self.written: dict[int, PendingWrite] = {}  # updated pages, whose state is being written to the second copy
        self.began: float | None = None  # time of the first page
        self.error: BaseException | None = None  # the error that ended speculation

    def kept(self, decision: StepParams, pages: Sequence[Page]) -> set[int]:
        """Return the updated pages that are valid for the actual decision."""
        same = {unit: self.expected.says_the_same(decision, unit) for unit in {pages[n].unit for n in self.written}}
        return {number for number in self.written if same[pages[number].unit]}


class MispredictionWatch:
    """Counts mispredictions to decide whether to speculate: at most 2 in the last 8 steps.

    A misprediction wastes the speculative updates and moves their drive bytes again.
    """

    def __init__(self) -> None:
        self._other: deque[bool] = deque(maxlen=_RECENT)

    @property
    def rarely(self) -> bool:
        return sum(self._other) <= _AT_MOST

    def decided(self, *, as_expected: bool) -> None:
        self._other.append(not as_expected)
