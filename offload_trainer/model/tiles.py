"""Parts of a model that compute each token by itself, run on a piece of the row at a time: tiled MLPs.

    forward   x ──> piece by piece ──> output     no graph: of a piece nothing stays but its output
    backward  of each piece its forward again, with a graph, and its backward; weights' gradients are added up beside it

What a wide MLP holds grows with a piece then, and not with the row (Bekman et al. 2025, Arctic Long Sequence Training,
arXiv 2506.13996, section 3.3). All pieces are one node of autograd's graph, so a weight gets one gradient, once, which
is added up in fp32 and rounded once; and weights that come and go are asked for by the hooks of the modules inside, as
at any other time: between two pieces nothing else is asked for. The input is kept before anything is computed, so the
recomputation of a checkpointed block that ends with such a part stops there, and its forward runs twice in all, as it
does without pieces.

Which parts those are is proven, not listed: model/positionwise.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def tile(module: nn.Module, *, chunk: int) -> None:
    """From now on `module` runs on at most `chunk` tokens at a time; fewer go through it as they are."""
    module.forward = Tiled(module, chunk)


class Tiled:
    """The forward of a module of one tensor, [..., tokens, width] -> the same shape.

    A piece, 1 x `chunk` tokens of [rows, tokens, width], goes through the module as a whole, so its hooks see pieces.
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
        return _Pieces.apply(self, _Input.apply(here, x).grad_fn, x, *weights)

    def pieces(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of [rows, tokens, width], or [tokens, width]: views where that is contiguous."""
        flat = values.reshape(*(1,) * (values.dim() - 2), -1, values.shape[-1])
        return flat.split(self.chunk, dim=-2)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Without a graph."""
        every = None
        for number, piece in enumerate(self.pieces(x.detach())):
            output = self.module(piece)
            if every is None:
                every = torch.empty(x.shape, dtype=output.dtype, device=x.device)
                into = self.pieces(every)
            into[number].copy_(output)
        assert every is not None
        return every


class _Input(torch.autograd.Function):
    """Keeps a tensor as autograd's hooks keep it at this moment; what is read back is this node's `saved_tensors`."""

    @staticmethod
    def forward(ctx: Any, here: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return here.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("part of no graph")


class _Pieces(torch.autograd.Function):
    """A tiled module. Its weights are inputs of the node, so that each gets what this returns, and nothing before."""

    @staticmethod
    def forward(ctx: Any, tiled: Tiled, kept: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.tiled, ctx.kept, ctx.weights, ctx.chance = tiled, kept, weights, _chance(x)
        return tiled.outputs(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,), needed, weights = ctx.kept.saved_tensors, ctx.needs_input_grad[2], ctx.weights
        ctx.kept = None  # or it would stay as long as the graph
        sums: list[torch.Tensor | None] = [None] * len(weights)
        back = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None
        into = ctx.tiled.pieces(back) if back is not None else ()
        both = zip(ctx.tiled.pieces(x.detach()), ctx.tiled.pieces(gradients[0]), strict=True)
        with _drawn_again(ctx.chance, x):
            for number, (piece, gradient) in enumerate(both):
                piece = piece.detach().requires_grad_(needed)
                with torch.enable_grad():
                    output = ctx.tiled.module(piece)
                wanted = [*([piece] if needed else []), *weights]
                found: list[Any] = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
                del output
                if needed:
                    into[number].copy_(found.pop(0))
                _add(sums, found)
        return None, None, back, *rounded(sums, weights)


def rounded(sums: list[torch.Tensor | None], weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Sums, of which the list then holds none, in their weights' dtypes."""
    return [None if (one := sums.pop(0)) is None else one.to(weight.dtype) for weight in weights]


def _add(sums: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> None:
    """Add a piece's gradients, of which `found` then holds none, to sums of fp32 at least."""
    for number in range(len(sums)):
        one = found.pop(0)
        if one is None:  # an expert that no token chose
            continue
        before = sums[number]
        sums[number] = (zeros(one) if before is None else before).add_(one)


def zeros(like: torch.Tensor) -> torch.Tensor:
    """What gradients of this dtype are added up in."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _chance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of torch's generators, of which dropout is drawn."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


@contextmanager
def _drawn_again(chance: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor) -> Iterator[None]:
    """Inside, the generators begin as they did in the forward; afterwards they are as they were before."""
    on_cpu, on_gpu = chance
    with torch.random.fork_rng(devices=[x.device] if on_gpu is not None else []):
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, x.device)
        yield
