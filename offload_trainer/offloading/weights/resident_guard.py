"""Weights that stay on the device, while an update is under way: without memory until their unit's new ones are home.

A module's pre-hook waits for its units and gives their parameters the memory back. Before that a weight has its shape
and one NaN, as those have that come and go, so that code which uses it without a hook is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload_trainer.offloading.autograd import not_compiled, set_memory
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.weights.placed import PlacedWeights


class ResidentGuard:
    """Of the units of `weights` that live on the device. `parameters` are by name, one for each use."""

    def __init__(
        self,
        weights: PlacedWeights,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        update_progress: UpdateProgress,
        *,
        place: torch.device,
    ) -> None:
        """`place`: the device's."""
        self._renewal = update_progress
        self._away = torch.full((), torch.nan, dtype=weights.dtype, device=place)
        self._parts = _on_the_device(weights, parameters)
        self._resident_guard: set[int] = set()

    def attach(self, wanted: Mapping[nn.Module, Sequence[int]]) -> None:
        """Watch these modules, each with the units that it needs."""
        for module, units in wanted.items():
            held = [unit for unit in units if unit in self._parts]
            if held:
                module.register_forward_pre_hook(self._before(held))

    def _before(self, units: Sequence[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.restore(units)

        return not_compiled(hook)

    def begin(self) -> None:
        """An update has begun: take away what it changes."""
        for unit, parts in self._parts.items():
            if not self._renewal.is_home(unit):
                self._resident_guard.add(unit)
                for parameter, memory in parts:
                    set_memory(parameter, self._away.expand(memory.shape))

    def restore(self, units: Iterable[int]) -> None:
        """These units' parameters have their new values when this returns."""
        for unit in self._resident_guard.intersection(units) if self._resident_guard else ():
            self._renewal.wait(unit)
            for parameter, memory in self._parts[unit]:
                set_memory(parameter, memory)
            self._resident_guard.discard(unit)

    def give_all_back(self) -> None:
        self.restore(self._parts)


def give_memory(weights: PlacedWeights, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Parameters on their units' memory, where that stays on the device; a stream gives it to the others."""
    for parts in _on_the_device(weights, parameters).values():
        for parameter, memory in parts:
            parameter.data = memory


def _on_the_device(
    weights: PlacedWeights, parameters: Mapping[str, Sequence[nn.Parameter]]
) -> dict[int, list[tuple[nn.Parameter, torch.Tensor]]]:
    """Of each unit that lives there, each use of its weights and where that is."""
    resident = {unit: weights.resident(unit.index) for unit in weights.units}
    return {
        unit.index: [
            (use, memory[at.start :][: at.weight.numel].view(at.weight.shape))
            for at in unit.places
            for use in parameters[at.weight.name]
        ]
        for unit, memory in resident.items()
        if memory is not None
    }
