"""Parameters that are trained beside the offloaded ones: adapters, a value head. They are the caller's, in memory.

A step takes both: one norm, one factor, and torch's own AdamW for these, by the groups of the session's optimizer. In a
save they have a directory of their own, what torch keeps of each in a file of its name:

    resident/weight.safetensors  step ...  exp_avg ...  exp_avg_sq ...     by name, each in its dtype
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_trainer.checkpoint import RESIDENT
from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.parameter import OffloadedParameter
from offload_trainer.optim.rules import Lion, hyper_of_group
from offload_trainer.optim.state_files import StateFile, write_files
from offload_trainer.optim.torch_adam import lion
from offload_trainer.plan.memory.common import Item
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.tiered.state_formats import UpdateRule
from offload_trainer.storage.tensorfile import TensorEntry, TensorFileReader
from offload_trainer.units import format_bytes

Groups = Sequence[Mapping[str, Any]]  # an optimizer's param_groups
State = MutableMapping[torch.Tensor, dict[str, torch.Tensor]]  # an optimizer's state: of each parameter, by kind
Changes = dict[torch.Tensor, int]
_WEIGHT = "weight"


def named_residents(model: nn.Module, groups: Groups) -> dict[str, nn.Parameter]:
    """The groups' parameters that are not offloaded: by their names in `model`, others as beside.0, beside.1, ..."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [p for group in groups for p in group["params"] if not isinstance(p, OffloadedParameter)]
    others = iter(range(len(found)))
    return {names.get(p) or f"beside.{next(others)}": p for p in found}


# -- a step ----------------------------------------------------------------------------------------------------------


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that are not offloaded and have a gradient, each once. UserError where it is sparse."""
    held = [p for p in dict.fromkeys(parameters) if not isinstance(p, OffloadedParameter)]
    found = [p for p in held if p.grad is not None]
    for parameter in found:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} got a sparse gradient, which AdamW does not take: make "
                "its embedding with sparse=False"
            )
    return found


def changes_of(parameters: Iterable[nn.Parameter]) -> Changes:
    """Their gradients, and how often each has been written: equal to another only if nothing came in between."""
    return {g: g._version for parameter in parameters if (g := parameter.grad) is not None}


def norm_of_all(parameters: Iterable[nn.Parameter], offloaded: Mapping[str, torch.Tensor], order: float = 2.0) -> float:
    """The norm of all gradients, added up in the order of `parameters`; `offloaded`: the norms of sums, by weight.

    As torch.nn.utils.clip_grad_norm_ takes it of a plain model: of each gradient, then of these, on the first one's
    device. 0 where there are none.
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
def update_residents(groups: Groups, state: State, *, rule: UpdateRule, scale: float) -> None:
    """One step of those that have a gradient, with `scale` times it; `state` is as torch's AdamW keeps it."""
    for group in groups:
        parameters = with_gradient(group["params"])
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        hyper = hyper_of_group(rule, group)
        if isinstance(hyper, Lion):
            _lion(parameters, state, hyper)
        elif parameters:
            adamw = torch.optim.AdamW(
                parameters, lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, weight_decay=hyper.decay, fused=True
            )
            adamw.state = state  # type: ignore[assignment]  # what it has kept so far, and keeps now
            adamw.step()


def _lion(parameters: Iterable[nn.Parameter], state: State, hyper: Lion) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        kept = state[parameter]
        if not kept:
            kept["step"], kept["exp_avg"] = torch.zeros(()), torch.zeros_like(parameter)
        kept["step"] += 1
        lion(parameter, kept["exp_avg"], parameter.grad, hyper)


def steps_of(state: State) -> int:
    """The most that any of them has been updated."""
    return max((int(kept["step"]) for kept in state.values() if kept), default=0)


# -- what they take --------------------------------------------------------------------------------------------------


def counted_in(plan: Plan, parameters: Iterable[nn.Parameter], rule: UpdateRule) -> Plan:
    """The plan with values, gradients and moments of `parameters`. UserError where it fits without them only."""
    added: dict[str, int] = {}
    for parameter in parameters:
        tier = "gpu" if parameter.is_cuda else "ram"
        added[tier] = added.get(tier, 0) + (2 + len(rule.moments)) * parameter.nbytes
    why = "other trained parameters: values, gradients, moments"
    items = (*plan.items, *(Item(tier, "adapters", size, why) for tier, size in added.items()))
    tiers = {tier: room | {"need": room["need"] + added.get(tier, 0)} for tier, room in plan.tiers.items()}
    counted = replace(plan, items=items, tiers=tiers)
    if plan.fits and not counted.fits:
        told = "; ".join(counted.shortfalls())
        size = format_bytes(sum(added.values()))
        raise UserError(f"with {size} for the other trained parameters this does not fit: {told}")
    return counted


# -- saves -----------------------------------------------------------------------------------------------------------


def layout_of(residents: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """What a save's manifest says of them, to be compared at resume."""
    return {
        f"{RESIDENT}/{name}": {"shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
        for name, p in residents.items()
    }


def write_residents(directory: Path, residents: Mapping[str, nn.Parameter], state: State) -> dict[str, Any]:
    """Their files, with size and CRC-32 by name for the manifest. TrainerError for values that cannot be used."""
    if not residents:
        return {}
    kinds: dict[str, dict[str, torch.Tensor]] = {_WEIGHT: dict(residents)}
    for name, parameter in residents.items():
        for kind, value in state.get(parameter, {}).items():
            kinds.setdefault(kind, {})[name] = value
    (directory / RESIDENT).mkdir()
    written = write_files(directory / RESIDENT, list(_files(kinds)), writes=True)
    return {f"{RESIDENT}/{name}": about for name, about in written.items()}


def _files(kinds: Mapping[str, Mapping[str, torch.Tensor]]) -> Iterator[StateFile]:
    for kind, tensors in kinds.items():
        entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        yield StateFile(kind, entries, lambda name, tensors=tensors: tensors[name].detach().cpu())  # type: ignore[misc]


def read_residents(
    directory: Path, residents: Mapping[str, nn.Parameter], *, rule: UpdateRule
) -> dict[str, dict[str, torch.Tensor]]:
    """What a save, whose layout has been compared, holds of each, by kind. UserError where a file is another's."""
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in residents}
    kinds = [_WEIGHT, "step", *(moment.name for moment in rule.moments)] if residents else []
    for kind in kinds:
        path = directory / RESIDENT / f"{kind}.safetensors"
        if not path.exists() and kind != _WEIGHT:
            continue  # no step was done yet
        with TensorFileReader(path) as file:
            for name, entry in file.entries.items():
                here = residents.get(name)
                if here is None or entry.shape != (() if kind == "step" else tuple(here.shape)):
                    raise UserError(f"{path}: {name} {list(entry.shape)} is not among the parameters trained here")
                found[name][kind] = file.read(name)
    return found


@torch.no_grad()
def set_residents(
    residents: Mapping[str, nn.Parameter], state: State, found: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Values in place, and in `state` what else was kept of each; of one that had none, nothing."""
    for name, parameter in residents.items():
        kept = dict(found[name])
        parameter.copy_(kept.pop(_WEIGHT))
        state[parameter] = {kind: value.to(parameter.device) for kind, value in kept.items()}
