"""Record the order in which forward and backward use the model's weights, while it runs on meta tensors.

    forward    a module uses its own weights when it begins, a block all weights inside it, as the engine's hooks fetch
    backward   an autograd operation uses a weight that was saved for it; embeddings are not saved, nor are frozen
               weights with nothing trained before them

Modules that text does not pass through (a vision tower) do not occur, whatever the order of registration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from offload_trainer.offloading.autograd import in_backward
from offload_trainer.plan.shape import Order


class AccessTrace:
    """The recorder. It watches a run of the model's body and then one of its head; the last runs count."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._blocks, inside = blocks, {model.get_submodule(name) for name in blocks}
        self._unit_of = {
            parameter: next((block for block in blocks if name.startswith(f"{block}.")), name.rpartition(".")[0])
            for name, parameter in model.named_parameters()
        }
        self._wanted = {
            module: [self._unit_of[parameter] for parameter in module.parameters(recurse=module in inside)]
            for module in model.modules()
        }
        self._passes: list[list[str]] = []  # forward and backward of the body, then of the head
        self._storages: dict[int, str] = {}

    @contextmanager
    def noting(self, *, first: bool) -> Iterator[None]:
        """Record one forward and its backward; `first` marks the body's. Passes after the head's are ignored."""
        self._passes = [*([] if first else self._passes), [], []]
        self._storages = {weight.untyped_storage()._cdata: unit for weight, unit in self._unit_of.items()}
        handles = [module.register_forward_pre_hook(self._begin) for module, units in self._wanted.items() if units]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._passes[-2] += self._wanted[module]

    def given(self, arguments: Any) -> None:
        """Record the weights among an operation's arguments, if it belongs to a backward."""
        if not in_backward():
            return
        for value in tree_iter(arguments):
            unit = self._storages.get(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None
            if unit is not None:
                self._passes[-1].append(unit)

    def order(self, ran: Sequence[int]) -> Order | None:
        """Return the recorded order, or None if no blocks are known.

        `ran` lists the blocks that ran; every other block is used like the next one that did.
        """
        if not self._blocks:
            return None
        others = {
            block: self._blocks[min(n for n in ran if n > number)]
            for number, block in enumerate(self._blocks)
            if number not in ran
        }
        body, body_back, head, head_back = self._passes[:4]
        backward = _filled([*head_back, *body_back][::-1], others)
        return Order(_filled([*body, *head], others), backward[::-1])


def _filled(units: Sequence[str], others: Mapping[str, str]) -> tuple[str, ...]:
    """Drop consecutive repetitions, and insert the blocks that did not run before the one that they are like."""
    found: list[str] = []
    for unit, _ in groupby(units):
        if unit not in found:
            found += [other for other, like in others.items() if like == unit]
        found.append(unit)
    return tuple(found)
