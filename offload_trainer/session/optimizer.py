"""torch.optim.Optimizer interface of a Session, and the parameters that it trains without offloading them.

Those resident parameters, such as adapters or a value head, belong to the caller and stay in memory. A step treats them
together with the offloaded ones: one gradient norm, one clipping factor, the groups of one optimizer. torch's AdamW
updates them. A save has them in resident/, one file per kind (weight, step, exp_avg, exp_avg_sq).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.weights.parameter import OffloadedParameter
from offload_trainer.optim.rules import Hyper, adamw_of, hypers_of
from offload_trainer.optim.state_files import write_file
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.shape import Weight
from offload_trainer.plan.tiered.state_formats import MOMENTS, UpdateRule
from offload_trainer.plan.tiers import Item
from offload_trainer.run.checkpoint import RESIDENT
from offload_trainer.storage.atomic_io import StoredFile
from offload_trainer.storage.tensorfile import TensorEntry, TensorFileReader

if TYPE_CHECKING:
    from offload_trainer.session.session import Session

State = MutableMapping[torch.Tensor, dict[str, torch.Tensor]]  # an optimizer's state: parameter -> kind -> tensor
WEIGHT = "weight"
_SAVES = "session.save(directory, scheduler, ...) saves it all, session.resume(directory, scheduler, ...) loads it"


class OffloadedOptimizer(torch.optim.Optimizer):
    """Optimizer of a Session, by `Session.adamw` or `Session.muon`. `param_groups` are read at each step."""

    def __init__(self, params: Iterable[Any], *, session: Session, rule: UpdateRule, defaults: dict[str, Any]) -> None:
        """Take the parameters or groups, as torch.optim.Optimizer does, and `defaults` for options that they lack."""
        self.rule, self._session = rule, session
        # The caller saves the moments of offloaded parameters with the session; state dicts are silently without them.
        self.saved_apart = False
        super().__init__(params, defaults)

    @property
    def residents(self) -> dict[str, nn.Parameter]:
        """Parameters of the groups that are not offloaded, by name; those outside the model are beside.0, ..."""
        names = {parameter: name for name, parameter in self._session.model.named_parameters()}
        found = [p for group in self.param_groups for p in group["params"] if not isinstance(p, OffloadedParameter)]
        others = iter(range(len(found)))
        return {names.get(p) or f"beside.{next(others)}": p for p in found}

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
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._session._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients accumulated since the last step."""
        if not set_to_none:
            raise UserError("zero_grad(set_to_none=False): zero gradients would change weights; leave set_to_none out")
        self._session._clear()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict before the first step, as accelerate's `prepare` needs it; UserError afterwards."""
        if (steps := self._session._offloaded.steps_done) and not self.saved_apart:
            raise UserError(
                f"the optimizer's state_dict() would have no moments of the offloaded weights after {steps} "
                f"steps: {_SAVES}. Give the optimizer to accelerator.prepare() before session.resume()"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict without moments of offloaded parameters, before the first step; else raise UserError."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = dict(zip(numbers, parameters, strict=False))
        held = [saved.get(number) for number, kinds in state_dict["state"].items() if kinds]
        given = sum(isinstance(parameter, OffloadedParameter) for parameter in held)
        steps = self._session._offloaded.steps_done
        if (given or steps) and not self.saved_apart:
            has = f"has the state of {given} offloaded weights" if given else "has no state of the offloaded weights"
            raise UserError(
                f"load_state_dict(): the given state {has}, the session's optimizer has {steps} steps: {_SAVES}"
            )
        super().load_state_dict(state_dict)


def with_gradient(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """Return the gradients, where there are any, of parameters that are not offloaded. UserError for a sparse one."""
    found = {p: p.grad for p in parameters if not isinstance(p, OffloadedParameter) and p.grad is not None}
    for p, gradient in found.items():
        if gradient.layout is not torch.strided:
            raise UserError(f"a parameter of shape {tuple(p.shape)} got a sparse gradient: make it with sparse=False")
    return found


def norm_of_all(parameters: Iterable[nn.Parameter], offloaded: Mapping[str, torch.Tensor], order: float = 2.0) -> float:
    """Return the norm of the per-gradient norms, combined in the order of `parameters`, as torch's clipping does.

    `offloaded`: norms of the offloaded gradients by weight name. The first one's device computes.
    """
    left, norms = dict(offloaded), []
    for parameter in dict.fromkeys(parameters):
        if isinstance(parameter, OffloadedParameter):
            norms += [left.pop(parameter.weight)] if parameter.weight in left else []
        elif parameter.grad is not None:
            norms.append(torch.linalg.vector_norm(parameter.grad, order, dtype=torch.float32))
    norms += left.values()
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order))


@torch.no_grad()
def update_residents(groups: Sequence[Mapping[str, Any]], state: State, *, scale: float) -> None:
    """Update the resident parameters in place by AdamW, whose `state` this is, with gradients times `scale`."""
    for group in groups:
        gradients = with_gradient(group["params"])
        for gradient in gradients.values():
            gradient.mul_(scale)
        if gradients:
            hyper = adamw_of(group)
            adamw = torch.optim.AdamW(
                list(gradients), lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, weight_decay=hyper.decay, fused=True
            )
            adamw.state = state  # type: ignore[assignment]  # continue with the existing state
            adamw.step()


@torch.no_grad()
def broadcast_residents(parameters: Iterable[nn.Parameter], node: Node) -> None:
    """Set the parameters that are not offloaded to the values of rank 0. All ranks call it."""
    for parameter in dict.fromkeys(parameters):
        if not isinstance(parameter, OffloadedParameter):
            values = parameter.detach().to("cpu", copy=True).reshape(-1)
            node.broadcast(values, source=0)
            parameter.copy_(values.view(parameter.shape))


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], node: Node) -> None:
    """Set gradients of parameters that are not offloaded to their means over all ranks; a missing one is zeros."""
    held = [p for p in dict.fromkeys(parameters) if p.requires_grad and not isinstance(p, OffloadedParameter)]
    have = torch.tensor([float(parameter.grad is not None) for parameter in held])
    with_gradient(held)  # refuses sparse gradients
    node.all_reduce(have)
    for parameter, count in zip(held, have.tolist(), strict=True):
        if count:
            given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = given.to("cpu", torch.float32, copy=True).reshape(-1).div_(node.world)
            node.all_reduce(mean)
            parameter.grad = mean.view(parameter.shape).to(parameter.device, parameter.dtype)


def counted_in(plan: Plan, parameters: Iterable[nn.Parameter]) -> Plan:
    """Add the values, gradients and moments of `parameters` to the plan. Raises UserError if it no longer fits."""
    added: dict[str, int] = {}
    for parameter in parameters:
        tier = "gpu" if parameter.is_cuda else "ram"
        added[tier] = added.get(tier, 0) + (2 + len(MOMENTS)) * parameter.nbytes
    why = "other trained parameters: values, gradients, moments"
    items = (*plan.items, *(Item(tier, "adapters", size, why) for tier, size in added.items()))
    tiers = {tier: room | {"need": room["need"] + added.get(tier, 0)} for tier, room in plan.tiers.items()}
    counted = replace(plan, items=items, tiers=tiers)
    if plan.fits and not counted.fits:
        shortfalls = "; ".join(counted.shortfalls())
        size = format_bytes(sum(added.values()))
        raise UserError(f"with {size} for the other trained parameters this does not fit: {shortfalls}")
    return counted


def layout_of(residents: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the shapes and dtypes for a save's manifest, compared at resume."""
    return {
        f"{RESIDENT}/{name}": {"shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
        for name, p in residents.items()
    }


def write_residents(directory: Path, residents: Mapping[str, nn.Parameter], state: State) -> dict[str, StoredFile]:
    """Write the parameters and their state; return size and CRC-32 of each file for the manifest."""
    if not residents:
        return {}
    kinds: dict[str, dict[str, torch.Tensor]] = {WEIGHT: dict(residents)}
    for name, parameter in residents.items():
        for kind, value in state.get(parameter, {}).items():
            kinds.setdefault(kind, {})[name] = value
    (directory / RESIDENT).mkdir()
    written: dict[str, StoredFile] = {}
    for kind, tensors in kinds.items():
        entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        written |= write_file(directory / RESIDENT / f"{kind}.safetensors", entries, tensors.__getitem__)
    return {f"{RESIDENT}/{name}": about for name, about in written.items()}


def read_residents(directory: Path, residents: Mapping[str, nn.Parameter]) -> dict[str, dict[str, torch.Tensor]]:
    """Read the parameters and their state from a save whose layout was already compared: name -> kind -> tensor.

    Raises UserError if a file has other names or shapes.
    """
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in residents}
    for kind in (WEIGHT, "step", *MOMENTS) if residents else ():
        path = directory / RESIDENT / f"{kind}.safetensors"
        if not path.exists() and kind != WEIGHT:
            continue  # saved before the first step
        with TensorFileReader(path) as file:
            for name, entry in file.entries.items():
                here = residents.get(name)
                if here is None or entry.shape != (() if kind == "step" else tuple(here.shape)):
                    raise UserError(f"{path}: {name} {list(entry.shape)} is not among the parameters trained here")
                found[name][kind] = file.read(name)
    return found
