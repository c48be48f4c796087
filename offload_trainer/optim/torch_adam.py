"""The reference CPU update kernel: the rules' own arithmetic in torch (`rules.py`), for all formats of state.

The rules only support fp32. Moments in 16 and 8 bits are converted to fp32 before the update and back after it, one
chunk at a time. The compiled kernels must match this one bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from offload_trainer.optim.kernel_api import PageUpdate, clip_ranges
from offload_trainer.optim.moments import stored_moment
from offload_trainer.optim.muon import Muon
from offload_trainer.plan.tiered.state_formats import FP32, MOMENTS

# Elements that are converted, updated and copied out at a time; a multiple of 256. At 28 bytes each they fit the
# last-level cache, and each of the three calls takes longer than its overhead. 2^19 was the fastest size of 2^13 to
# 2^21 (EPYC, 32 MB L3).
CHUNK = 2**19


class TorchKernel:
    """A kernel of torch operations that matches torch.optim.AdamW(fused=True), except for padding (`AdamW.update`)."""

    name = "torch"

    def __init__(self) -> None:
        self._scratch = torch.empty(CHUNK)

    @torch.no_grad()
    def update_page(self, page: PageUpdate) -> None:
        """Update each part of the page; see `Kernel.update_page`."""
        fields, grad, out, parts, scale = page.fields, page.grad, page.out, page.parts, page.scale
        if page.format.moments is not FP32:
            # Cut the parts at multiples of CHUNK, so that elements outside the parts are not even converted.
            parts = [
                replace(part, start=start + part.start, end=start + part.end)
                for start in range(0, grad.numel(), CHUNK)
                for part in clip_ranges(parts, start, min(start + CHUNK, grad.numel()))
            ]
        for part in parts:
            here = slice(part.start, part.end)
            stored = [stored_moment(moment, fields, here) for moment in MOMENTS.values()]
            wide = [moment.read() for moment in stored]
            master = fields["master"][here]
            for start in range(0, part.end - part.start, self._scratch.numel()):
                piece = slice(start, min(start + self._scratch.numel(), part.end - part.start))
                scaled = self._scratch[: piece.stop - start].copy_(grad[here][piece])
                if scale != 1.0:
                    scaled.mul_(scale)
                assert not isinstance(part.hyper, Muon), "`MatrixKernel` updates matrices"
                part.hyper.update(master[piece], [values[piece] for values in wide], scaled, step=part.step)
                if out is not None:
                    out[here][piece].copy_(master[piece])
            for moment, values in zip(stored, wide, strict=True):
                moment.write(values, noise=page.bits(moment.moment.name, here.start))
