"""Run position-wise modules (MLPs) on pieces of a row, so that their memory does not grow with the row: tiled MLPs.

    forward   x ──> piece by piece ──> output     without a graph; only the output of a piece is kept
    backward  for each piece: its forward with a graph, then its backward; weight gradients are summed in fp32

This follows Arctic Long Sequence Training (Bekman et al. 2025, arXiv 2506.13996, section 3.3). All pieces are one node
of autograd's graph, so each weight gets a single gradient, which is summed in fp32 and rounded once. Streamed weights
are fetched by the hooks of the inner modules as usual, and nothing else is fetched between two pieces. The node saves
its input before it computes. So the recomputation of a checkpointed block that ends with a tiled module stops there,
and the module's forward runs twice in total, as without tiles.

Torch's checkpointing around each piece would need as little memory. However, it sums gradients in 16 bits, which is off
by up to 1/256 each time, and it runs the module a third time inside a checkpointed block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Tiled:
    """A replacement forward for a module that maps [..., tokens, width] to the same shape.

    Each piece of 1 x `chunk` tokens calls the module itself, so the module's hooks see pieces.
    """

    def __init__(self, module: nn.Module, chunk: int) -> None:
        self.module, self.chunk, self._whole = module, chunk, module.forward

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        (x,) = (*given, *named.values())
        if x.shape[:-1].numel() <= self.chunk:
            return self._whole(x)
        weights = [weight for weight in self.module.parameters() if weight.requires_grad]
        if not torch.is_grad_enabled() or not (x.requires_grad or weights):
            return self.outputs(x)
        here = torch.empty(0, requires_grad=True)
        return _Pieces.apply(self, (_Input.apply(here, x),), x, *weights)  # in a tuple, it is no input of the node

    def pieces(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split [rows, tokens, width] or [tokens, width] into pieces, which are views of a contiguous tensor."""
        return values.reshape(*(1,) * (values.dim() - 2), -1, values.shape[-1]).split(self.chunk, dim=-2)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output without a graph."""
        every = None
        for number, piece in enumerate(self.pieces(x.detach())):
            output = self.module(piece)
            if every is None:
                every = torch.empty(x.shape, dtype=output.dtype, device=x.device)
                into = self.pieces(every)
            into[number].copy_(output)
        assert every is not None
        return every

    def gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, back: torch.Tensor | None, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the sums of the weights' gradients, and write the input's into `back` if it needs one."""
        sums: list[torch.Tensor | None] = [None] * len(weights)
        into = self.pieces(back) if back is not None else ()
        for number, (piece, of_piece) in enumerate(zip(self.pieces(x.detach()), self.pieces(gradient), strict=True)):
            piece = piece.detach().requires_grad_(back is not None)
            with torch.enable_grad():
                output = self.module(piece)
            wanted = [*([piece] if back is not None else []), *weights]
            found: list[Any] = list(torch.autograd.grad(output, wanted, of_piece, allow_unused=True))
            del output
            if back is not None:
                into[number].copy_(found.pop(0))
            _add(sums, found)
        return sums


class _Input(torch.autograd.Function):
    """Save a tensor under the saved-tensor hooks that are active now, until the returned one goes.

    It is read as `saved_tensors` of the returned tensor's node. Torch 2.11 empties a node whose tensor is gone.
    """

    @staticmethod
    def forward(ctx: Any, here: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return here.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("part of no graph")


class _Pieces(torch.autograd.Function):
    """The autograd node of a tiled module. Weights are its inputs, so each receives exactly one gradient."""

    @staticmethod
    def forward(
        ctx: Any, tiled: Tiled, kept: tuple[torch.Tensor], x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.tiled, ctx.kept, ctx.weights = tiled, kept, weights
        ctx.on_cpu, ctx.on_gpu = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        return tiled.outputs(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,), needed, weights = ctx.kept[0].grad_fn.saved_tensors, ctx.needs_input_grad[2], ctx.weights
        ctx.kept = None  # otherwise the input would stay in memory as long as the graph
        back = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None
        with torch.random.fork_rng(devices=[x.device] if ctx.on_gpu is not None else []):
            torch.set_rng_state(ctx.on_cpu)  # draw as the forward did
            if ctx.on_gpu is not None:
                torch.cuda.set_rng_state(ctx.on_gpu, x.device)
            sums = ctx.tiled.gradients(x, gradients[0], back, weights)
        # Each sum is freed when it has been rounded.
        rounded = [None if (one := sums.pop(0)) is None else one.to(weight.dtype) for weight in weights]
        return None, None, back, *rounded


def _add(sums: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> None:
    """Add a piece's gradients to sums of at least fp32, and empty `found` to free each one early."""
    for number in range(len(sums)):
        one = found.pop(0)
        if one is None:  # no token chose this expert
            continue
        before = sums[number]
        sums[number] = (zeros(one) if before is None else before).add_(one)


def zeros(like: torch.Tensor) -> torch.Tensor:
    """Return a zero sum for gradients like this one, of at least fp32."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
