"""Lion in plain torch, as a reference."""

from __future__ import annotations

from typing import Any

import torch


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, written out literally."""

    def __init__(self, groups: Any, *, betas: tuple[float, float], lr: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                m = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                c = beta1 * m + (1 - beta1) * weight.grad
                weight.copy_((1 - lr * group["weight_decay"]) * weight - lr * torch.sign(c))
                m.copy_(beta2 * m + (1 - beta2) * weight.grad)
