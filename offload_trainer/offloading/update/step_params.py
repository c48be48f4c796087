"""Define the parameters of one step's update: hyperparameters and step counts per weight, gradient factor, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_trainer.optim.kernel_api import ParamRange
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.rules import Hyper
from offload_trainer.plan.tiered.layout import Unit


@dataclass(frozen=True)
class StepParams:
    """Everything that determines a page's new state besides the page itself and its gradient."""

    stretches: Sequence[Sequence[ParamRange]]  # the updated ranges of each unit
    scale: float  # factor on the gradients: clipping and the inverse of the loss scale
    noise: Noise | None  # random bits for stochastically rounded moments

    def says_the_same(self, other: StepParams, unit: int) -> bool:
        """Return whether both parameter sets give a unit's pages the same new state."""
        same = self.scale == other.scale and self.noise == other.noise
        return same and self.stretches[unit] == other.stretches[unit]


def step_params_of(
    units: Sequence[Unit],
    rules: Mapping[str, Hyper],
    steps: Mapping[str, int],
    *,
    scale: float,
    noise_of: int | None,
) -> StepParams:
    """Return the parameters of a step that updates the weights in `rules`.

    `steps` counts the steps of each weight, including this one. `noise_of` is the seed for stochastic rounding, if any.
    """
    noise = None if noise_of is None else Noise(seed=noise_of, step=max(steps.values(), default=0))
    return StepParams([_stretches_of(unit, rules, steps) for unit in units], scale=scale, noise=noise)


def _stretches_of(unit: Unit, rules: Mapping[str, Hyper], steps: Mapping[str, int]) -> list[ParamRange]:
    """Return the unit's ranges that are updated (weights in `rules`), merged where hyperparameters and steps agree."""
    places = [place for place in unit.places if place.weight.trainable]
    ends = [place.start for place in places[1:]] + [unit.trained]
    found: list[ParamRange] = []
    for place, end in zip(places, ends, strict=False):
        name = place.weight.name
        if name not in rules:
            continue
        alike = (rules[name], steps[name])
        if found and found[-1].end == place.start and (found[-1].hyper, found[-1].step) == alike:
            found[-1] = ParamRange(found[-1].start, end, *alike)
        else:
            found.append(ParamRange(place.start, end, *alike))
    return found
