"""Rules of the update: what each element's is computed from beside its gradient and its state, for one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
