"""Define the parameters of one step's update, and what is updated before they are known.

`StepParams` holds hyperparameters and step counts per weight, the gradient factor and the noise. Pages on drives, and
some in RAM, may be updated during the backward, with the parameters that are expected:

    a unit's gradients are complete ──> its pages are read and updated as if the step were not clipped
    state      on a drive: is written to the page's second copy (`pages/store.py`), and the previous step's stays valid
               in RAM: is updated in place, after its old bytes were copied to shadow memory (`ShadowPages`)
    weights    are written in place: a unit whose gradients are complete is not used again in this step
    decision   step as expected: the pages are valid; at the step's end one small record switches all copies
               step clipped: the pages are updated again from their old state
               step skipped: the pages get their old state, and the weights are rounded again from its masters

The same kernel computes the same page from the same parameters, so no bit depends on speculation. Keeping new weights
back until the decision would need 2 bytes of RAM for each parameter on a drive. Reading masters again only costs time
in a skipped step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_trainer.offloading.update.page_pipeline import PendingWrite
from offload_trainer.optim.kernel_api import ParamRange
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.rules import Hyper
from offload_trainer.plan.tiered.layout import Page, Unit

_RECENT, _AT_MOST = 8, 2  # recent steps, and how many of them may have been mispredicted


@dataclass(frozen=True)
class StepParams:
    """Everything that determines a page's new state besides the page itself and its gradient."""

    ranges: Sequence[Sequence[ParamRange]]  # the updated ranges of each unit
    scale: float  # factor on the gradients: clipping and the inverse of the loss scale
    noise: Noise | None  # random bits for stochastically rounded moments

    def same_for(self, other: StepParams, unit: int) -> bool:
        """Return whether both parameter sets give a unit's pages the same new state."""
        same = self.scale == other.scale and self.noise == other.noise
        return same and self.ranges[unit] == other.ranges[unit]


def step_params_of(
    units: Sequence[Unit], rules: Mapping[str, Hyper], steps: Mapping[str, int], *, scale: float, noise_seed: int | None
) -> StepParams:
    """Return the parameters of a step that updates the weights in `rules`.

    `steps` counts the steps of each weight, including this one. `noise_seed` seeds stochastic rounding, if any.
    """
    noise = None if noise_seed is None else Noise(seed=noise_seed, step=max(steps.values(), default=0))
    return StepParams([_ranges_of(unit, rules, steps) for unit in units], scale=scale, noise=noise)


def _ranges_of(unit: Unit, rules: Mapping[str, Hyper], steps: Mapping[str, int]) -> list[ParamRange]:
    """Return the unit's ranges that are updated (weights in `rules`), merged where hyperparameters and steps agree.

    Ranges include the padding after a weight, except those of weights that consist of matrices updated as a whole.
    """
    places = [place for place in unit.places if place.weight.trainable]
    ends = [place.start for place in places[1:]] + [unit.trained]
    found: list[ParamRange] = []
    for place, end in zip(places, ends, strict=False):
        name = place.weight.name
        if name not in rules:
            continue
        same = (rules[name], steps[name])
        if place.start < unit.matrices:
            found.append(ParamRange(place.start, place.start + place.weight.numel, *same))
        elif found and found[-1].end == place.start and (found[-1].hyper, found[-1].step) == same:
            found[-1] = ParamRange(found[-1].start, end, *same)
        else:
            found.append(ParamRange(place.start, end, *same))
    return found


class SpeculativeStep:
    """The speculative updates of one step."""

    def __init__(self, expected: StepParams) -> None:
        self.expected = expected
        self.written: dict[int, PendingWrite] = {}  # updated pages; those on drives are being written
        self.began: float | None = None  # time of the first page
        self.error: BaseException | None = None  # the error that ended speculation

    def kept(self, params: StepParams, pages: Sequence[Page]) -> set[int]:
        """Return the updated pages that are valid for the step's actual parameters."""
        same = {unit: self.expected.same_for(params, unit) for unit in {pages[n].unit for n in self.written}}
        return {number for number in self.written if same[pages[number].unit]}


class MispredictionWatch:
    """A record of recent mispredictions; speculation is allowed with at most 2 in the last 8 steps.

    A misprediction wastes the speculative updates and moves their drive bytes again.
    """

    def __init__(self) -> None:
        self._other: deque[bool] = deque(maxlen=_RECENT)

    @property
    def rarely(self) -> bool:
        """Return whether mispredictions are rare enough to speculate."""
        return sum(self._other) <= _AT_MOST

    def decided(self, *, as_expected: bool) -> None:
        """Record whether a step's parameters were as expected (neither clipped nor skipped)."""
        self._other.append(not as_expected)
