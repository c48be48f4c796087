"""Muon for the matrices of blocks and AdamW for all other weights, by torch's own optimizers, as a reference."""

from collections.abc import Iterable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW(fused=True) as one optimizer, which has their groups."""

    def __init__(self, groups: Iterable[dict[str, Any]], matrices: Iterable[torch.Tensor], **muon: Any) -> None:
        """Take the groups of an AdamW; of these, Muon with the options `muon` updates `matrices`.

        In a tensor of three dimensions, each index of the first one selects a matrix.
        """
        whole, of_muon, others = set(matrices), [], []
        self._parts: list[tuple[torch.nn.Parameter, torch.Tensor, int | None]] = []  # part, its weight, and which it is
        for group in groups:
            parts = [part for p in group["params"] if p in whole for part in self._parts_of(p)]
            of_muon.append({"params": parts, "weight_decay": group["weight_decay"]})
            others.append({**group, "params": [p for p in group["params"] if p not in whole]})
        self.muon = torch.optim.Muon([group for group in of_muon if group["params"]], **muon)
        self.adamw = torch.optim.AdamW([group for group in others if group["params"]], fused=True)
        super().__init__([part for part, _, _ in self._parts], {})
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def _parts_of(self, weight: torch.Tensor) -> list[torch.nn.Parameter]:
        if weight.dim() == 2:
            found = [(torch.nn.Parameter(weight.data), weight, None)]
        else:
            found = [(torch.nn.Parameter(one), weight, number) for number, one in enumerate(weight.data)]
        self._parts += found  # type: ignore[arg-type]
        return [part for part, _, _ in found]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part, weight, number in self._parts:
            part.grad = weight.grad if number is None or weight.grad is None else weight.grad[number]
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, weight, _ in self._parts:
            weight.grad = None
        self.adamw.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: accelerate loads the state that it has just taken, and would separate the groups."""
