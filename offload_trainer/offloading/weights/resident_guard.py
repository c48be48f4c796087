"""Block access to weights on the device while an update is writing them, until their unit has its new weights.

When an update begins, the parameters of units that it changes lose their memory. Before a module runs, a pre-hook waits
for its units and restores their memory. In between, a parameter has the right shape over a single NaN, so that code
that uses it without a hook produces NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload_trainer.offloading.autograd import not_compiled, set_memory
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.offloading.weights.prefetch import HasPreHooks


class ResidentGuard:
    """The guard of the units that the model uses where `weights` stores them; `WeightPrefetcher` has the others.

    `parameters` are by name, one for each use.
    """

    def __init__(
        self,
        weights: PlacedWeights,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        update_progress: UpdateProgress,
        *,
        place: torch.device,
    ) -> None:
        """Point the parameters of these units to their unit's memory on the torch device `place`."""
        self._update_progress = update_progress
        self._placeholder = torch.full((), torch.nan, dtype=weights.dtype, device=place)
        self._parts: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        for unit in weights.units:
            memory = weights.in_place(unit.index)
            if memory is not None:
                self._parts[unit.index] = [
                    (use, weights.values(memory, place))
                    for place in unit.places
                    for use in parameters[place.weight.name]
                ]
        for parameter, values in (part for parts in self._parts.values() for part in parts):
            parameter.data = values
        self._blocked: set[int] = set()
        self._called: set[int] = set()  # units that a module's call has needed so far

    def attach(self, wanted: Mapping[HasPreHooks, Sequence[int]]) -> None:
        """Register pre-hooks on the modules of `wanted`, which maps each module to the units it needs."""
        for module, units in wanted.items():
            resident = [unit for unit in units if unit in self._parts]
            if resident:
                module.register_forward_pre_hook(self._before(resident))

    def _before(self, units: Sequence[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._called.update(units)
            self.restore(units)

        return not_compiled(hook)

    def begin(self) -> None:
        """Block the units that the update that has just begun will change."""
        for unit, parts in self._parts.items():
            if not self._update_progress.is_ready(unit):
                self._blocked.add(unit)
                for parameter, memory in parts:
                    set_memory(parameter, self._placeholder.expand(memory.shape))

    def restore(self, units: Iterable[int]) -> None:
        """Wait until these units have their new weights, and restore their parameters' memory."""
        for unit in self._blocked.intersection(units) if self._blocked else ():
            self._update_progress.wait(unit)
            for parameter, memory in self._parts[unit]:
                set_memory(parameter, memory)
            self._blocked.discard(unit)

    def begin_forward(self) -> None:
        """Restore the units that no module's call has needed so far: code may read their weights directly.

        ProphetNet reads its n-gram embeddings so. The first forward shows which they are, before the first update.
        """
        self.restore(self._blocked - self._called)

    def restore_all(self) -> None:
        """Wait for all new weights, and restore all parameters' memory."""
        self.restore(self._parts)
