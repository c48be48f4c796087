"""The update of an offloaded model as an optimizer of torch: real groups of parameters, any scheduler of rates, betas.

`step` is the session's update; the session saves and loads what it keeps, which is in `state` for parameters beside the
offloaded ones (`resident.py`) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.offloading.parameter import OffloadedParameter
from offload_trainer.optim.rules import Hyper, hyper_of_group
from offload_trainer.plan.formats import LION, UpdateRule
from offload_trainer.session.resident import named_residents, update_residents

Update = Callable[[dict[str, Hyper]], None]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Made by `Session.adamw` and `lion`. `param_groups` have `lr`, `betas`, `weight_decay` and AdamW's `eps`.

    They are read at each step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        model: nn.Module,
        rule: UpdateRule,
        defaults: dict[str, Any],
        update: Update,
        clear: Callable[[], None],
    ) -> None:
        """`model`: where the names of parameters that are not offloaded come from."""
        self.rule, self._model, self._update, self._clear = rule, model, update, clear
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Offloaded ones, and any others beside them. UserError for what Lion cannot update exactly."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            kept = isinstance(parameter, OffloadedParameter) or parameter.dtype is torch.float32
            if self.rule is LION and not kept:
                self.param_groups.pop()
                raise UserError(
                    f"a parameter of shape {tuple(parameter.shape)} in {parameter.dtype} beside the offloaded ones: "
                    "Lion's are kept in fp32; give it an optimizer of its own"
                )

    @property
    def residents(self) -> dict[str, nn.Parameter]:
        """Parameters of the groups that are not offloaded, by name."""
        return named_residents(self._model, self.param_groups)

    def names(self) -> list[list[str]]:
        """Of each group's parameters."""
        beside = {parameter: name for name, parameter in self.residents.items()}
        return [[beside.get(p) or p.weight for p in group["params"]] for group in self.param_groups]

    def rules(self) -> dict[str, Hyper]:
        """What each offloaded weight is updated by, as the groups say now."""
        return {
            parameter.weight: hyper_of_group(self.rule, group)
            for group in self.param_groups
            for parameter in group["params"]
            if isinstance(parameter, OffloadedParameter)
        }

    def update_residents(self, *, scale: float) -> None:
        """The step of those that are not offloaded, with `scale` times their gradients."""
        update_residents(self.param_groups, self.state, rule=self.rule, scale=scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter of the groups that got a gradient; the gradients are used up."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self.rules())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients that came since the last step, of all parameters."""
        self._clear()
