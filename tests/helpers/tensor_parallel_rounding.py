"""Emulate, in one process, the rounding of two tensor-parallel ranks: each product is computed in two
halves and added.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from offload_trainer.plan.shape import ModelShape


class _ForBoth(torch.autograd.Function):
    """An identity that returns one tensor for each half, and adds their gradients with one rounding."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return whole.view_as(whole), whole.view_as(whole)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] + gradients[1]


def in_halves(model: nn.Module, shape: ModelShape) -> None:
    """Patch the modules whose weights `shape` says are split among ranks, or whose gradients ranks add up."""
    splits = {weight.name: weight.split for weight in shape.weights}
    for name, module in model.named_modules():
        split = splits.get(f"{name}.weight", "")
        if split:
            module.forward = _HALVED[split](module)


def _halves(whole: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Return contiguous halves, as ranks store them: other strides may select another kernel."""
    return [half.contiguous() for half in whole.chunk(2, dim)]


def _product(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(values, weight.transpose(-1, -2))


def _column(linear: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(values: torch.Tensor) -> torch.Tensor:
        halves = zip(_ForBoth.apply(values), _halves(linear.weight, 0), strict=True)
        return torch.cat([_product(*half) for half in halves], -1)

    return forward


def _row(linear: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(values: torch.Tensor) -> torch.Tensor:
        first, second = zip(_halves(values, -1), _halves(linear.weight, 1), strict=True)
        return _product(*first) + _product(*second)

    return forward


def _summed(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward of a norm over heads, half of them for each rank: [rows, tokens, heads, head size]."""

    def forward(values: torch.Tensor) -> torch.Tensor:
        halves = zip(_halves(values, 2), _ForBoth.apply(norm.weight), strict=True)
        own = {"variance_epsilon": norm.variance_epsilon}
        return torch.cat([type(norm).forward(SimpleNamespace(weight=w, **own), half) for half, w in halves], 2)

    return forward


_HALVED = {"column": _column, "row": _row, "summed": _summed}
