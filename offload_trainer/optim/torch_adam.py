"""The reference CPU update kernel in torch: AdamW by torch's fused kernel, Lion by elementwise operations.

Both only support fp32. Moments in 16 and 8 bits, and split masters, are converted to fp32 before the update and back
after it, one chunk at a time. The compiled kernels must match this one bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from offload_trainer.optim.kernel_api import ParamRange, RoundingNoise, within
from offload_trainer.optim.moments import stored_moment
from offload_trainer.optim.rules import AdamW, Lion
from offload_trainer.optim.split_masters import read_masters, write_masters
from offload_trainer.plan.tiered.state_formats import FP32, StateFormat

# Elements that are converted, updated and copied out at a time; a multiple of 256. At 28 bytes each they fit the
# last-level cache, and each of the three calls takes longer than its overhead. 2^19 was the fastest size of 2^13 to
# 2^21 (EPYC, 32 MB L3).
CHUNK = 2**19
# One cache line of fp32. torch's vectorised loop processes 8 or 16 elements at a time, depending on the CPU.
_LINE = 16


class TorchKernel:
    """A kernel of torch operations that matches torch.optim.AdamW(fused=True) bit for bit, with one exception.

    If a tensor's length is not a multiple of 8 (16 with AVX-512), torch updates the last elements in a scalar loop that
    rounds exp_avg_sq differently. This kernel pads them, so that an element's result does not depend on where pages are
    cut.
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
        parts: Sequence[ParamRange],
        *,
        format: StateFormat,
        scale: float,
        noise: RoundingNoise | None,
    ) -> None:
        """Update each part of the page; see `Kernel.update_page`."""
        if format.moments is not FP32 or format.remainders:
            # Cut the parts at multiples of CHUNK, so that elements outside the parts are not even converted.
            parts = [
                replace(part, start=start + part.start, end=start + part.end)
                for start in range(0, grad.numel(), CHUNK)
                for part in within(parts, start, min(start + CHUNK, grad.numel()))
            ]
        for part in parts:
            here = slice(part.start, part.end)
            stored = [stored_moment(moment, fields, here) for moment in format.rule.moments]
            wide = [moment.read() for moment in stored]
            master = read_masters(fields, out, here)
            for start in range(0, part.end - part.start, self._scratch.numel()):
                piece = slice(start, min(start + self._scratch.numel(), part.end - part.start))
                scaled = self._scratch[: piece.stop - start].copy_(grad[here][piece])
                if scale != 1.0:
                    scaled.mul_(scale)
                moments = [values[piece] for values in wide]
                if isinstance(part.hyper, AdamW):
                    _adamw([master[piece], *moments, scaled], part.hyper, step=part.step)
                else:
                    lion(master[piece], moments[0], scaled, part.hyper)
                if out is not None and not format.remainders:
                    out[here][piece].copy_(master[piece])
            if format.remainders:
                assert out is not None
                write_masters(fields, out, master, here)
            for moment, values in zip(stored, wide, strict=True):
                moment.write(values, noise=noise.bits(moment.moment.name, here.start) if noise else None)


def _adamw(tensors: Sequence[torch.Tensor], hyper: AdamW, *, step: int) -> None:
    """Apply one step of AdamW; `tensors` are master, exp_avg, exp_avg_sq and the gradient."""

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
    """Apply one step of Lion in place, without `add(alpha=)` and `lerp`, which fuse operations on some CPUs."""
    beta1, beta2 = hyper.betas
    way = exp_avg.mul(beta1).add_(grad.mul(1 - beta1)).sign_()  # the sign of NaN is 0
    master.mul_(1 - hyper.lr * hyper.decay).sub_(way.mul_(hyper.lr))
    exp_avg.mul_(beta2).add_(grad.mul(1 - beta2))
