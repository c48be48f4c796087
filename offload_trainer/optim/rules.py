"""Hyperparameters of one optimizer step for each update rule (AdamW, Lion)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from offload_trainer.plan.tiered.state_formats import ADAMW, LION, UpdateRule


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW defines it (Loshchilov and Hutter 2019)."""

    rule: ClassVar[UpdateRule] = ADAMW
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float  # each weight is multiplied by 1 - lr * decay


@dataclass(frozen=True)
class Lion:
    """Lion: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), algorithm 2.

    With gradient g and moment m, the weight is multiplied by 1 - lr * decay and then reduced by lr times the sign of
    beta1 * m + (1 - beta1) * g. After that m becomes beta2 * m + (1 - beta2) * g. Each product and each sum is rounded
    to fp32 separately.
    """

    rule: ClassVar[UpdateRule] = LION
    lr: float
    betas: tuple[float, float]
    decay: float


Hyper = AdamW | Lion


def hyper_of(rule: UpdateRule, *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> Hyper:
    """Return the hyperparameters of one step for `rule`; Lion ignores `eps`."""
    return AdamW(lr, betas, eps, decay) if rule is ADAMW else Lion(lr, betas, decay)


def hyper_of_group(rule: UpdateRule, group: Mapping[str, Any]) -> Hyper:
    """Return the current hyperparameters of a torch parameter group."""
    betas = float(group["betas"][0]), float(group["betas"][1])
    numbers = {"lr": float(group["lr"]), "eps": float(group.get("eps", 0.0)), "decay": float(group["weight_decay"])}
    return hyper_of(rule, betas=betas, **numbers)
