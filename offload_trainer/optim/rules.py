"""Rules of the update: what each element's is computed from beside its gradient and its state, for one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from offload_trainer.plan.formats import ADAMW, LION, UpdateRule


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW defines it (Loshchilov and Hutter 2019)."""

    rule: ClassVar[UpdateRule] = ADAMW
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float  # a weight is multiplied by 1 - lr x decay


@dataclass(frozen=True)
class Lion:
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), algorithm 2.

    With the gradient g and the moment m: the weight is multiplied by 1 - lr x decay, then moves by lr against the sign
    of beta1 x m + (1 - beta1) x g, not at all where that is 0; then m becomes beta2 x m + (1 - beta2) x g. Each product
    and each sum is rounded to fp32 by itself.
    """

    rule: ClassVar[UpdateRule] = LION
    lr: float
    betas: tuple[float, float]
    decay: float


Hyper = AdamW | Lion


def hyper_of(rule: UpdateRule, *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> Hyper:
    """The numbers of one step; `eps` is AdamW's alone."""
    return AdamW(lr, betas, eps, decay) if rule is ADAMW else Lion(lr, betas, decay)


def hyper_of_group(rule: UpdateRule, group: Mapping[str, Any]) -> Hyper:
    """The numbers in a group of an optimizer of torch's kind, as they are now."""
    betas = float(group["betas"][0]), float(group["betas"][1])
    numbers = {"lr": float(group["lr"]), "eps": float(group.get("eps", 0.0)), "decay": float(group["weight_decay"])}
    return hyper_of(rule, betas=betas, **numbers)
