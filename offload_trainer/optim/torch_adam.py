"""The update on host memory by torch: AdamW by its fused kernel, Lion by its operations. The reference.

Both know fp32 only. 16-bit and 8-bit moments, and masters in 16 bits, are widened before and narrowed after, some at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from offload_trainer.optim.protocol import PageNoise, Stretch, within
from offload_trainer.optim.remainders import read_masters, write_masters
from offload_trainer.optim.rules import AdamW, Lion
from offload_trainer.optim.stored import stored_moment
from offload_trainer.plan.formats import FP32, StateFormat

# Elements that are converted, updated and copied out at a time: their 28 bytes each stay in the last cache, and each of
# the three calls on them outlasts its own start. Of 2^13 to 2^21 the fastest (EPYC, 32 MB L3). A multiple of 256.
CHUNK = 2**19
# Whole cache lines of fp32: torch's vectorised loop takes multiples of 8 or 16 elements, by the CPU.
_LINE = 16


class TorchKernel:
    """torch's operations, chunk by chunk: of AdamW the bits of torch.optim.AdamW(fused=True).

    But for this: of a tensor whose length does not divide by 8 (16 with AVX-512), torch computes the last few elements
    by a loop that rounds exp_avg_sq differently. They are padded here, so that an element's result does not depend on
    where a weight is cut.
    """

    name = "torch"

    def __init__(self) -> None:
        self._scratch = torch.empty(CHUNK)

    @torch.no_grad()
    def update_page(
        self,
        fields: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor | None,
        parts: Sequence[Stretch],
        *,
        format: StateFormat,
        scale: float,
        noise: PageNoise | None,
    ) -> None:
        """On each of the page's parts, its moments widened before and narrowed after."""
        whole = format.moments is FP32 and not format.remainders
        for part in parts if whole else _pieces(parts, grad.numel()):
            here = slice(part.start, part.end)
            stored = [stored_moment(moment, fields, here) for moment in format.rule.moments]
            wide = [moment.read() for moment in stored]
            master = read_masters(fields, out, here)
            for piece, scaled in _scaled_chunks(grad[here], scale, self._scratch):
                _update(master[piece], [values[piece] for values in wide], scaled, part)
                if out is not None and not format.remainders:
                    out[here][piece].copy_(master[piece])
            if format.remainders:
                assert out is not None
                write_masters(fields, out, master, here)
            for moment, values in zip(stored, wide, strict=True):
                moment.write(values, noise=noise.bits(moment.moment.name, here.start) if noise else None)


def _update(master: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, part: Stretch) -> None:
    """One step on fp32 tensors of one length."""
    if isinstance(part.hyper, AdamW):
        _adamw([master, *moments, grad], part.hyper, step=part.step)
    else:
        lion(master, moments[0], grad, part.hyper)


def _adamw(tensors: Sequence[torch.Tensor], hyper: AdamW, *, step: int) -> None:
    """`tensors` are master, exp_avg, exp_avg_sq and the gradient."""

    def fused(weights: torch.Tensor, average: torch.Tensor, square: torch.Tensor, gradient: torch.Tensor) -> None:
        torch._fused_adamw_(
            [weights],
            [gradient],
            [average],
            [square],
            [],
            [torch.tensor(float(step))],
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )

    left = tensors[0].numel() % _LINE
    whole = tensors[0].numel() - left
    fused(*(tensor[:whole] for tensor in tensors))
    if left:
        padded = [torch.nn.functional.pad(tensor[whole:], (0, _LINE - left)) for tensor in tensors]
        fused(*padded)
        for tensor, result in zip(tensors, padded, strict=True):
            tensor[whole:] = result[:left]


def lion(master: torch.Tensor, exp_avg: torch.Tensor, grad: torch.Tensor, hyper: Lion) -> None:
    """One step in place. No `add(alpha=)` nor `lerp`, which fuse a product with a sum on some CPUs."""
    beta1, beta2 = hyper.betas
    way = exp_avg.mul(beta1).add_(grad.mul(1 - beta1)).sign_()  # of a NaN 0
    master.mul_(1 - hyper.lr * hyper.decay).sub_(way.mul_(hyper.lr))
    exp_avg.mul_(beta2).add_(grad.mul(1 - beta2))


def _scaled_chunks(grad: torch.Tensor, scale: float, scratch: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of `grad`, each with its values in fp32 x `scale`, which lie in `scratch` until the next piece."""
    for start in range(0, grad.numel(), scratch.numel()):
        piece = slice(start, min(start + scratch.numel(), grad.numel()))
        scaled = scratch[: piece.stop - start].copy_(grad[piece])
        yield piece, scaled.mul_(scale) if scale != 1.0 else scaled


def _pieces(parts: Sequence[Stretch], elements: int) -> Iterator[Stretch]:
    """The parts of a page, none longer than CHUNK. Only these: not all that is stored outlives being widened."""
    for start in range(0, elements, CHUNK):
        for part in within(parts, start, min(start + CHUNK, elements)):
            yield replace(part, start=start + part.start, end=start + part.end)
