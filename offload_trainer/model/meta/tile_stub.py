"""Replace tiled modules while memory is counted on meta tensors: keep input and output, and mark where pieces run.

The number of pieces depends on the row length, so a meta-tensor pass that ran them would not show how memory grows.
Instead a tiled module keeps its input and returns its output as `tiled_mlp.py` does, and marks the time at which pieces
would run. `model/meta/activations.py` counts the memory of one piece separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offload_trainer.model.meta.allocation_trace import AllocationTrace
from offload_trainer.model.tiled_mlp import rounded, zeros

FORWARD, BACKWARD = "pieces", "pieces' backward"  # names of marks


class TileStub:
    """Replaces the forwards of `tiles` while a model runs."""

    def __init__(self, tiles: Sequence[nn.Module]) -> None:
        self._tiles = tiles
        self.called: list[tuple[nn.Module, torch.Size]] = []  # module and input shape, by the number of the mark

    @contextmanager
    def marking(self, held: AllocationTrace) -> Iterator[None]:
        self.called = []
        for module in self._tiles:
            module.forward = partial(self._run, held, module)
        try:
            yield
        finally:
            for module in self._tiles:
                del module.forward

    def _run(
        self, held: AllocationTrace, module: nn.Module, *given: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor:
        (x,) = (*given, *named.values())
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        self.called.append((module, x.shape))
        return _Part.apply(held, len(self.called) - 1, x, *weights)


class _Part(torch.autograd.Function):
    """Like `tiled_mlp._Pieces`, without running the pieces."""

    @staticmethod
    def forward(ctx: Any, held: AllocationTrace, number: int, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.held, ctx.number, ctx.weights = held, number, weights
        ctx.save_for_backward(x)
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        held.mark(FORWARD, number)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        back = torch.empty(x.shape, dtype=x.dtype, device=x.device) if ctx.needs_input_grad[2] else None
        sums: list[torch.Tensor | None] = [zeros(weight) for weight in ctx.weights]
        ctx.held.mark(BACKWARD, ctx.number)
        return None, None, back, *rounded(sums, ctx.weights)
