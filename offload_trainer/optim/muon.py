"""Muon's arithmetic: momentum, and its orthogonalisation by a Newton-Schulz iteration, for one whole matrix.

    gradient ──momentum, Nesterov──> direction (bf16) ──Newton-Schulz──> nearly orthogonal ──rate──> master

The steps and constants are those of torch.optim.Muon (Jordan et al. 2024; the rate by shape is that of Liu et al. 2025,
Muon is Scalable for LLM Training, arXiv 2502.16982), whose CPU kernels fuse multiplications with additions. Here they
are computed in double precision and rounded to fp32, which is the same on every device.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload_trainer.optim.cpu_units import has_native_16bit
from offload_trainer.plan.step_time import ITERATIONS

_A, _B, _C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic polynomial
_EPS = 1e-7
_PIECE = 1 << 18  # elements that are computed in double precision at a time
_ROWS = 256  # about the rows of a product that one thread computes at a time

AdjustLr = Literal["original", "match_rms_adamw"]
# What a run of the command uses: updates are as large as AdamW's, so its rate and weight decay can be kept.
SETTINGS: Mapping[str, Any] = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


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
        """Return the Frobenius norm, bf16 and 0-dim."""
        return self._threads.submit(matrix.norm).result() if self._threads else matrix.norm()

    def mm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return left @ right."""
        right = right.to(self._dtype)
        return self._by_blocks(left, right, lambda rows: torch.mm(left[rows].to(self._dtype), right))

    def addmm(
        self, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float, alpha: float
    ) -> torch.Tensor:
        """Return beta * added + alpha * (left @ right)."""
        right = right.to(self._dtype)

        def block(rows: slice) -> torch.Tensor:
            given = (added[rows].to(self._dtype), left[rows].to(self._dtype))
            return torch.addmm(*given, right, beta=beta, alpha=alpha)

        return self._by_blocks(left, right, block)

    def _by_blocks(
        self, left: torch.Tensor, right: torch.Tensor, block: Callable[[slice], torch.Tensor]
    ) -> torch.Tensor:
        if self._threads is None:
            return block(slice(None))
        rows, out = left.shape[0], left.new_empty(left.shape[0], right.shape[1])
        size = math.ceil(rows / (2 * max(1, round(rows / (2 * _ROWS)))))

        def compute(first: int) -> None:
            here = slice(first, first + size)
            out[here] = block(here)

        list(self._threads.map(compute, range(0, rows, size)))
        return out


@dataclass(frozen=True)
class Lerp:
    """torch's start + weight * (end - start), which is computed from the end that is nearer."""

    factor: float  # the weight if that is below 1/2, else the weight minus 1, in fp32
    from_end: bool

    @classmethod
    def of(cls, weight: float) -> Lerp:
        rounded = to_fp32(weight)
        return cls(rounded, from_end=False) if rounded < 0.5 else cls(to_fp32(rounded - 1), from_end=True)

    def __call__(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Return the result for fp32 tensors, rounded twice: the difference, and the whole."""
        way = (end - start).double()
        return torch.add((end if self.from_end else start).double(), way, alpha=self.factor).float()


@dataclass(frozen=True)
class Muon:
    """The hyperparameters of one matrix in one step."""

    lr: float
    momentum: float
    decay: float  # the matrix is multiplied by 1 - lr * decay
    adjust: AdjustLr
    shape: tuple[int, int]

    @property
    def adjusted_lr(self) -> float:
        """Return the rate of this shape, as torch.optim.Muon's `adjust_lr_fn` defines it."""
        rows, columns = self.shape
        ratio = max(1, rows / columns) ** 0.5 if self.adjust == "original" else 0.2 * max(rows, columns) ** 0.5
        return self.lr * ratio

    @property
    def keep(self) -> float:
        """Return the factor of weight decay."""
        return 1 - self.lr * self.decay

    @property
    def lerps(self) -> tuple[Lerp, Lerp]:
        """Return the lerp from the momentum to the gradient, and the one from the gradient to the new momentum."""
        return Lerp.of(1 - self.momentum), Lerp.of(self.momentum)


class TorchMuon:
    """The elementwise part of Muon for one matrix, by torch's operations on any device.

    All tensors are 1-D, contiguous and on one device.
    """

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


def to_fp32(value: float) -> float:
    """Round a constant as torch's fp32 kernels do."""
    return ctypes.c_float(value).value


def orthogonalised(direction: torch.Tensor, products: Products) -> torch.Tensor:
    """Return the matrix (bf16) with its singular values pushed to about 1; overwrites `direction`."""
    tall = direction.shape[0] > direction.shape[1]
    matrix = direction.T if tall else direction
    matrix.div_(products.norm(matrix).clamp(min=_EPS))
    for _ in range(ITERATIONS):
        gram = products.mm(matrix, matrix.T)
        gram = products.addmm(gram, gram, gram, beta=_B, alpha=_C)
        matrix = products.addmm(matrix, gram, matrix, beta=_A, alpha=1.0)
    return matrix.T if tall else matrix
