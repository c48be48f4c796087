"""What one step's update is told: rates and counts of steps of each weight, the factor on gradients, the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_trainer.optim.moments import Noise
from offload_trainer.optim.protocol import Stretch
from offload_trainer.optim.rules import Hyper
from offload_trainer.plan.layout import Unit


@dataclass(frozen=True)
class Decision:
    """All that a page's new state follows from, beside the page and its gradient."""

    stretches: Sequence[Sequence[Stretch]]  # of each unit
    scale: float  # the gradients are multiplied by it: clipping, and what undoes the loss scale
    noise: Noise | None  # for moments that are rounded by chance

    def says_the_same(self, other: Decision, unit: int) -> bool:
        """Whether a unit's pages become the same under both."""
        same = self.scale == other.scale and self.noise == other.noise
        return same and self.stretches[unit] == other.stretches[unit]


def decision_of(
    units: Sequence[Unit],
    rules: Mapping[str, Hyper],
    steps: Mapping[str, int],
    *,
    scale: float,
    noise_of: int | None,
) -> Decision:
    """Of the weights in `rules`; `steps`: of each weight, with this one. `noise_of`: the seed where chance rounds."""
    noise = None if noise_of is None else Noise(seed=noise_of, step=max(steps.values(), default=0))
    return Decision([_stretches_of(unit, rules, steps) for unit in units], scale=scale, noise=noise)


def _stretches_of(unit: Unit, rules: Mapping[str, Hyper], steps: Mapping[str, int]) -> list[Stretch]:
    """The unit's elements that are updated, those of the weights in `rules`, as long as they are updated alike."""
    places = [place for place in unit.places if place.weight.trainable]
    ends = [place.start for place in places[1:]] + [unit.trained]
    found: list[Stretch] = []
    for place, end in zip(places, ends, strict=False):
        name = place.weight.name
        if name not in rules:
            continue
        alike = (rules[name], steps[name])
        if found and found[-1].end == place.start and (found[-1].hyper, found[-1].step) == alike:
            found[-1] = Stretch(found[-1].start, end, *alike)
        else:
            found.append(Stretch(place.start, end, *alike))
    return found
