"""Rules of the update: what each element's is computed from beside its gradient and its state, for one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW defines it (Loshchilov and Hutter 2019)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float  # a weight is multiplied by 1 - lr x decay
