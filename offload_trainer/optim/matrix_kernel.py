"""The update kernel for rules on whole matrices: matrices by Muon, pages of other weights by an AdamW kernel.

Where the matrices are orthogonalised is decided once: on the GPU if there is one, even for pages that the CPU updates.
Each matrix then moves there and back with 16 bits an element, which is a hundredth of what the CPU's products take.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from offload_trainer.optim.kernel_api import Kernel, PageUpdate
from offload_trainer.optim.muon import Muon, Products, TorchMuon, orthogonalised
from offload_trainer.optim.native_kernel import NativeKernel
from offload_trainer.plan.tiered.state_formats import ADAMW, StateFormat


class MatrixKernel:
    """A kernel for Muon, whose results depend neither on placement nor on the number of threads."""

    name = "muon"

    def __init__(self, elementwise: Kernel, *, gpu: torch.device | None, threads: int = 1) -> None:
        """Update pages of other weights with `elementwise`.

        `gpu` orthogonalises the matrices; None: `threads` of the CPU do.
        """
        self._elementwise, self._gpu = elementwise, gpu
        self._stream = None if gpu is None else torch.cuda.Stream(gpu)
        self._products = Products(threads if gpu is None else None)
        self._arithmetic: TorchMuon | NativeKernel = TorchMuon()
        if isinstance(elementwise, NativeKernel) and has_torchs_muon(elementwise):
            self._arithmetic = elementwise

    @torch.no_grad()
    def update_page(self, page: PageUpdate) -> None:
        """Update the page; see `Kernel.update_page`. A part of a page of matrices is one weight's, without padding."""
        if not page.parts:
            return
        if not isinstance(page.parts[0].hyper, Muon):
            self._elementwise.update_page(replace(page, format=StateFormat(ADAMW, page.format.moments)))
            return
        for part in page.parts:
            assert isinstance(part.hyper, Muon), "a page has either matrices or other weights"
            size = math.prod(part.hyper.shape)
            for start in range(part.start, part.end, size):
                self._update(slice(start, start + size), part.hyper, page)

    def _update(self, here: slice, hyper: Muon, page: PageUpdate) -> None:
        """Update one matrix, at the page's elements `here`."""
        fields, out = page.fields, page.out
        direction = self._arithmetic.muon_direction(hyper, page.grad[here], fields["exp_avg"][here], scale=page.scale)
        orthogonal = self._orthogonal(direction.view(hyper.shape)).view(-1)
        self._arithmetic.muon_step(hyper, fields["master"][here], orthogonal, None if out is None else out[here])

    def _orthogonal(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the orthogonalised direction, contiguous and where `direction` is."""
        if self._gpu is None or direction.is_cuda:
            return orthogonalised(direction, self._products).contiguous()
        with torch.cuda.stream(self._stream):  # on the default stream it would wait for the model's products
            return orthogonalised(direction.to(self._gpu), self._products).contiguous().cpu()


def has_torchs_muon(kernel: NativeKernel) -> bool:
    """Return whether the kernel has the bits of `TorchMuon` on the CPU, for numbers of all magnitudes."""
    random, n = torch.Generator().manual_seed(1), 70_001
    for dtype, hyper in (
        (torch.bfloat16, Muon(3e-3, 0.95, 0.1, "match_rms_adamw", (1, n))),
        (torch.float32, Muon(0.02, 0.3, 0.0, "original", (n, 1))),
    ):
        size = torch.empty(4, n).uniform_(-30, 5, generator=random).exp_()
        master, grad, average, way = torch.randn(4, n, generator=random) * size
        results = []
        for arithmetic in (TorchMuon(), kernel):
            held, changed, out = average.clone(), master.clone(), torch.empty(n, dtype=dtype)
            direction = arithmetic.muon_direction(hyper, grad.to(dtype), held, scale=0.37)
            arithmetic.muon_step(hyper, changed, way.bfloat16(), out)
            results.append((held, changed, out, direction))
        if not all(map(torch.equal, *results)):
            return False
    return True
