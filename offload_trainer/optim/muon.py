"""Muon: momentum, and its orthogonalisation by a Newton-Schulz iteration; other weights follow AdamW.

The steps and constants are those of torch.optim.Muon (Jordan et al. 2024; the rate by shape: arXiv 2502.16982), whose
CPU kernels fuse multiplications with additions. `TorchMuon` computes each fused pair in double precision and rounds it
to fp32, which is the same on every device.
"""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from offload_trainer.optim.cpu_units import has_native_16bit
from offload_trainer.optim.kernel_api import Kernel, PageUpdate
from offload_trainer.optim.native_kernel import NativeKernel
from offload_trainer.optim.rules import Muon, to_fp32
from offload_trainer.plan.step_time import ITERATIONS
from offload_trainer.plan.tiered.state_formats import ADAMW

_A, _B, _C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic polynomial
_EPS = 1e-7
_PIECE = 1 << 18  # elements that are computed in double precision at a time
_ROWS = 256  # about the rows of a product that one thread computes at a time


class Products:
    """The matrix operations of a Newton-Schulz iteration on bf16 matrices; sums are in fp32 and rounded once.

    On the CPU products are computed in blocks of rows, one thread each: their bits do not depend on the number of
    threads. The blocks of a matrix have about 256 rows and are even in number, so that two threads have the same work.
    Without units for bf16 the CPU computes them from fp32 copies.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Use torch's products, as on a GPU, or start `threads` on the CPU.

        Call it where torch's number of threads is the one that new threads shall have.
        """
        self._threads: ThreadPoolExecutor | None = None
        self._dtype = torch.bfloat16 if threads is None or has_native_16bit(torch.bfloat16) else torch.float32
        if threads is None:
            return
        before, started = torch.get_num_threads(), threading.Barrier(threads)

        def begin(_: int) -> None:
            torch.get_num_threads()  # otherwise the thread's first operation sets it to the number of all threads
            torch.set_num_threads(1)
            started.wait()

        self._threads = ThreadPoolExecutor(threads, "muon")
        list(self._threads.map(begin, range(threads)))
        torch.set_num_threads(before)

    def norm(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._threads.submit(matrix.norm).result() if self._threads else matrix.norm()

    def mm(
        self, left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None = None, **factors: Any
    ) -> torch.Tensor:
        """Return left @ right, or beta * added + alpha * (left @ right) with these `factors`."""
        right = right.to(self._dtype)

        def block(rows: slice) -> torch.Tensor:
            some = left[rows].to(self._dtype)
            return some @ right if added is None else torch.addmm(added[rows].to(self._dtype), some, right, **factors)

        if self._threads is None:
            return block(slice(None))
        rows, out = left.shape[0], left.new_empty(left.shape[0], right.shape[1])
        size = math.ceil(rows / (2 * max(1, round(rows / (2 * _ROWS)))))

        def compute(first: int) -> None:
            here = slice(first, first + size)
            out[here] = block(here)

        list(self._threads.map(compute, range(0, rows, size)))
        return out


class TorchMuon:
    """The elementwise part of Muon for one matrix, by torch's operations on 1-D, contiguous tensors of any device."""

    def muon_direction(self, hyper: Muon, grad: torch.Tensor, exp_avg: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Add a gradient times `scale` to the momentum (fp32); return the direction to orthogonalise (bf16)."""
        average, nesterov = hyper.lerps
        found = torch.empty(grad.numel(), dtype=torch.bfloat16, device=grad.device)
        for piece in _pieces(grad):
            scaled = grad[piece].float() * scale
            exp_avg[piece] = average(exp_avg[piece], scaled)
            found[piece] = nesterov(scaled, exp_avg[piece])
        return found

    def muon_step(self, hyper: Muon, master: torch.Tensor, orthogonal: torch.Tensor, out: torch.Tensor | None) -> None:
        """Update the master (fp32) in place by the orthogonal direction (bf16), and round it to `out`, if any."""
        for piece in _pieces(master):
            kept = master[piece].mul_(hyper.keep).double()
            master[piece] = torch.add(kept, orthogonal[piece].double(), alpha=to_fp32(-hyper.adjusted_lr))
        if out is not None:
            out.copy_(master)


def _pieces(tensor: torch.Tensor) -> Iterator[slice]:
    return (slice(start, start + _PIECE) for start in range(0, tensor.numel(), _PIECE))


def orthogonalised(direction: torch.Tensor, products: Products) -> torch.Tensor:
    """Return the matrix (bf16) with its singular values pushed to about 1; overwrites `direction`."""
    tall = direction.shape[0] > direction.shape[1]
    matrix = direction.T if tall else direction
    matrix.div_(products.norm(matrix).clamp(min=_EPS))
    for _ in range(ITERATIONS):
        gram = products.mm(matrix, matrix.T)
        gram = products.mm(gram, gram, gram, beta=_B, alpha=_C)
        matrix = products.mm(gram, matrix, matrix, beta=_A, alpha=1.0)
    return matrix.T if tall else matrix


class MatrixKernel:
    """A kernel for Muon, whose results depend neither on placement nor on the number of threads."""

    name = "muon"

    def __init__(self, elementwise: Kernel, *, gpu: torch.device | None, threads: int = 1) -> None:
        """Orthogonalise matrices on `gpu`, or on `threads` of the CPU; update other weights with `elementwise`."""
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
            self._elementwise.update_page(replace(page, format=replace(page.format, rule=ADAMW)))
            return
        for part in page.parts:
            assert isinstance(part.hyper, Muon), "a page has either matrices or other weights"
            size = math.prod(part.hyper.shape)
            for start in range(part.start, part.end, size):
                here, arithmetic = slice(start, start + size), self._arithmetic
                momentum, master = page.fields["exp_avg"][here], page.fields["master"][here]
                direction = arithmetic.muon_direction(part.hyper, page.grad[here], momentum, scale=page.scale)
                orthogonal = self._orthogonal(direction.view(part.hyper.shape)).view(-1)
                arithmetic.muon_step(part.hyper, master, orthogonal, None if page.out is None else page.out[here])

    def _orthogonal(self, direction: torch.Tensor) -> torch.Tensor:
        if self._gpu is None or direction.is_cuda:
            return orthogonalised(direction, self._products).contiguous()
        with torch.cuda.stream(self._stream):  # on the default stream it would wait for the model's products
            return orthogonalised(direction.to(self._gpu), self._products).contiguous().cpu()


def has_torchs_muon(kernel: NativeKernel) -> bool:
    """Return whether the kernel has the bits of `TorchMuon` on the CPU, for numbers of all magnitudes."""
    random, n = torch.Generator().manual_seed(1), 70_001
    both: tuple[TorchMuon | NativeKernel, ...] = (TorchMuon(), kernel)
    for dtype, hyper in (
        (torch.bfloat16, Muon(3e-3, 0.95, 0.1, "match_rms_adamw", (1, n))),
        (torch.float32, Muon(0.02, 0.3, 0.0, "original", (n, 1))),
    ):
        size = torch.empty(4, n).uniform_(-30, 5, generator=random).exp_()
        master, grad, average, way = torch.randn(4, n, generator=random) * size
        results = []
        for arithmetic in both:
            held, changed, out = average.clone(), master.clone(), torch.empty(n, dtype=dtype)
            direction = arithmetic.muon_direction(hyper, grad.to(dtype), held, scale=0.37)
            arithmetic.muon_step(hyper, changed, way.bfloat16(), out)
            results.append((held, changed, out, direction))
        if not all(map(torch.equal, *results)):
            return False
    return True
