"""The update of an offloaded model as an optimizer of torch: real groups of parameters, any scheduler of rates, betas.

It holds no tensors. `step` is the session's update; its state is saved and loaded by the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.offloading.parameter import OffloadedParameter
from offload_trainer.optim.rules import Hyper, hyper_of
from offload_trainer.plan.formats import UpdateRule

Update = Callable[[dict[str, Hyper]], None]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Made by `Session.adamw` and `lion`. `param_groups` have `lr`, `betas`, `weight_decay` and AdamW's `eps`.

    They are read at each step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        rule: UpdateRule,
        defaults: dict[str, Any],
        update: Update,
        clear: Callable[[], None],
    ) -> None:
        self._rule, self._update, self._clear = rule, update, clear
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """UserError for a parameter that is not of the session's model."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not isinstance(parameter, OffloadedParameter):
                self.param_groups.pop()
                raise UserError(
                    f"a parameter of shape {tuple(parameter.shape)} is not of the session's model: give it an "
                    "optimizer of its own"
                )

    def rules(self) -> dict[str, Hyper]:
        """What each weight is updated by, as the groups say now."""
        return {
            parameter.weight: hyper_of(
                self._rule,
                lr=float(group["lr"]),
                betas=(float(group["betas"][0]), float(group["betas"][1])),
                eps=float(group.get("eps", 0.0)),
                decay=float(group["weight_decay"]),
            )
            for group in self.param_groups
            for parameter in group["params"]
        }

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
