"""Muon for the matrices of blocks and AdamW for all other weights, by torch's own optimizers, as a reference."""

from collections.abc import Iterable
from typing import Any

import torch


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of three dimensions, of which each index of the first one selects a matrix."""
    return weight if weight.dim() == 3 else weight[None]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW(fused=True) as one optimizer, which has their groups."""

    def __init__(self, groups: Iterable[dict[str, Any]], matrices: Iterable[torch.Tensor], **muon: Any) -> None:
        """Take the groups of an AdamW; of these, Muon with the options `muon` updates `matrices`."""
        whole, of_muon, others = set(matrices), [], []
        self._parts: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []  # a matrix, its weight, and which it is
        for group in groups:
            parts = [
                (torch.nn.Parameter(one), p, number)
                for p in group["params"]
                if p in whole
                for number, one in enumerate(_matrices(p.data))
            ]
            self._parts += parts
            of_muon.append({"params": [part for part, _, _ in parts], "weight_decay": group["weight_decay"]})
            others.append({**group, "params": [p for p in group["params"] if p not in whole]})
        self.muon = torch.optim.Muon([group for group in of_muon if group["params"]], **muon)
        self.adamw = torch.optim.AdamW([group for group in others if group["params"]], fused=True)
        super().__init__([part for part, _, _ in self._parts], {})
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part, weight, number in self._parts:
            part.grad = None if weight.grad is None else _matrices(weight.grad)[number]
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, weight, _ in self._parts:
            weight.grad = None
        self.adamw.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: accelerate loads the state that it has just taken, and would separate the groups."""
