"""torch.optim.Optimizer interface of a Session, so that parameter groups and learning-rate schedulers work as usual.

`step` runs the session's update. `state` holds only parameters that are not offloaded (`extra_params.py`); the session
keeps, saves and loads the state of the offloaded ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.parameter import OffloadedParameter
from offload_trainer.optim.rules import Hyper, hypers_of
from offload_trainer.plan.shape import Weight
from offload_trainer.plan.tiered.state_formats import UpdateRule
from offload_trainer.session.extra_params import named_residents

if TYPE_CHECKING:
    from offload_trainer.session.session import Session

_SAVES = (
    "session.save(directory, scheduler, ...) saves masters, moments, steps and groups, and session.resume(directory, "
    "scheduler, ...) loads them"
)


class _OffloadedState(dict[str, torch.Tensor]):
    """Empty state of an offloaded parameter, which raises UserError for any key."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(
            f"state[{self._name}][{key!r}]: the state of offloaded weights is stored by the session; {_SAVES}"
        )


class _State(defaultdict[torch.Tensor, dict[str, Any]]):
    """Optimizer state that holds no offloaded parameters and explains that when one is accessed."""

    def __init__(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        super().__init__(dict, state)

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return (
            _OffloadedState(parameter.weight)
            if isinstance(parameter, OffloadedParameter)
            else super().__missing__(parameter)
        )


class OffloadedOptimizer(torch.optim.Optimizer):
    """Optimizer of a Session, created by `Session.adamw` or `Session.muon`.

    `param_groups` have `lr`, `betas`, `eps` and `weight_decay`. They are read at each step.
    """

    def __init__(self, params: Iterable[Any], *, session: Session, rule: UpdateRule, defaults: dict[str, Any]) -> None:
        """Take the parameters or groups, as torch.optim.Optimizer does, and `defaults` for options that they lack."""
        self.rule, self._session, self._saved_apart = rule, session, False
        super().__init__(params, defaults)
        self.state = _State(self.state)

    @property
    def _steps(self) -> int:
        """Number of updates of the offloaded parameters' state."""
        return self._session._offloaded.steps_done

    @property
    def residents(self) -> dict[str, nn.Parameter]:
        """Parameters of the groups that are not offloaded, by name."""
        return named_residents(self._session.model, self.param_groups)

    def names(self) -> list[list[str]]:
        """Return the parameters' names, one list per group."""
        residents = {parameter: name for name, parameter in self.residents.items()}
        return [[residents.get(p) or p.weight for p in group["params"]] for group in self.param_groups]

    def rules(self, weights: Mapping[str, Weight]) -> dict[str, Hyper]:
        """Return the current hyperparameters of each offloaded weight, from its group; `weights` are those by name."""
        found: dict[str, Hyper] = {}
        for group in self.param_groups:
            ours = [weights[p.weight] for p in group["params"] if isinstance(p, OffloadedParameter)]
            found |= hypers_of(self.rule, group, ours)
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter of the groups that has a gradient, and clear the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._session._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients accumulated since the last step. Raises UserError for set_to_none=False."""
        if not set_to_none:
            raise UserError(
                "zero_grad(set_to_none=False) would keep zero gradients, with which a step changes weights that no "
                "backward reached: leave set_to_none out"
            )
        self._session._clear()

    # -- state_dict ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict before the first step, when there are no moments; raise UserError afterwards.

        It must work before the first step, because accelerate calls it and loads the result in `prepare`.
        """
        if self._steps and not self._saved_apart:
            raise UserError(
                f"the optimizer's state_dict() would have no moments of the offloaded weights after {self._steps} "
                f"steps: {_SAVES}. Give the optimizer to accelerator.prepare() before session.resume()"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict without moments of offloaded parameters, before the first step.

        Raises UserError if it has moments of offloaded parameters, or after the first step.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = dict(zip(numbers, parameters, strict=False))
        given = sum(isinstance(saved.get(number), OffloadedParameter) for number in state_dict["state"])
        if (given or self._steps) and not self._saved_apart:
            has = f"has the state of {given} offloaded weights" if given else "has no state of the offloaded weights"
            raise UserError(
                f"load_state_dict(): the given state {has}, the session's optimizer has {self._steps} steps: {_SAVES}"
            )
        super().load_state_dict(state_dict)
        self.state = _State(self.state)

    @contextmanager
    def saved_apart(self) -> Iterator[None]:
        """Within this context, state_dict() and load_state_dict() omit the moments of offloaded parameters silently.

        The caller must save and load them with the session's `save` and `resume`.
        """
        self._saved_apart = True
        try:
            yield
        finally:
            self._saved_apart = False
