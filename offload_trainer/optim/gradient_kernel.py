"""Add gradients to sums in host memory, and measure gradients and sums for their norm.

    gradient ──widen──> + sum ──round──> sum         in fp32, stored in the sums' dtype
                           └──squares──> one partial result a piece of `Pieces.width` elements

`gradients.h` does this in one pass over memory on the update kernel's threads. `TorchGradients` is the reference and
has the same bits; it passes over memory several times. `Pieces.norm` combines the partial results.

Norms, for clipping and logging, have the same bits wherever the gradients are placed:

    one gradient                    `norm_of`, on the device that computed it
    a sum over micro-batches        `norm_of` if a CPU trains; `ordered_norm` if a GPU trains, wherever the sum is

With a GPU a sum may be on the GPU, in host memory or on a drive, and torch's norm adds in a different order on each.
`ordered_norm` therefore consists of single additions in a fixed order. In host memory both are combined from the
partial results of `Pieces`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.optim.kernel_api import Kernel
from offload_trainer.optim.native_adam import NativeKernel, NativeLibrary
from offload_trainer.optim.rules import TYPES
from offload_trainer.plan.parallel.comm_cost import piece_width


@dataclass(frozen=True)
class Pieces:
    """Sums are measured in pieces of `width` elements, a multiple of 256 unless there is one piece.

    `halving`: a piece's result is its sum of squares, added by halves; `width` is a power of two. Otherwise it is the
    norm of the piece with the bits of torch on this CPU.
    """

    width: int
    halving: bool

    @classmethod
    def of(cls, numel: int, *, ordered: bool) -> Pieces:
        """Return the pieces of a weight of `numel` elements, counted from its start.

        Its norm has the bits of `ordered_norm` if `ordered`, else those of `norm_of` on the CPU.
        """
        return cls(piece_width(numel, ordered=ordered), halving=ordered)

    def norm(self, results: torch.Tensor) -> torch.Tensor:
        """Return the norm (fp32, 0-dim) from the partial results of all pieces, which several ranks may compute."""
        return root_of_sum(results) if self.halving else torch.linalg.vector_norm(results)

    def results(self, elements: int) -> torch.Tensor:
        """Return memory (fp32) for the results of `elements` elements."""
        return torch.empty(-(-elements // self.width))


class TorchGradients:
    """The gradient kernel in torch's operations. All tensors are 1-D and contiguous, in fp32, bf16 or fp16."""

    name = "torch"

    def add(
        self,
        sums: torch.Tensor,
        values: torch.Tensor | None,
        *,
        first: bool = False,
        pieces: Pieces | None = None,
        on_torch_threads: bool = False,
    ) -> torch.Tensor:
        """Add `values` to `sums`, and return the partial results of the new sums.

        Args:
            sums: the sums in host memory, changed in place with the bits of `Tensor.add_`.
            values: as many gradients; None: the sums are only measured.
            first: the gradients replace the sums.
            pieces: how the sums are measured; None: not at all, and the result is empty.
            on_torch_threads: the caller is the thread that computes with torch. Its OpenMP threads spin for
                milliseconds after each operation, and would take the cores from other threads.

        Returns:
            fp32, one result a piece.
        """
        if values is not None:
            sums.copy_(values) if first else sums.add_(values)
        if pieces is None:
            return torch.empty(0)
        if pieces.halving:
            return torch.cat([sums_of_squares(part, pieces.width) for part in sums.split(pieces.width)])
        # The pieces' copy and norms use two preallocated tensors, because small allocations between freed copies would
        # fragment the heap.
        results, copy = pieces.results(sums.numel()), torch.empty(min(pieces.width, sums.numel()))
        for index, piece in enumerate(sums.split(pieces.width)):
            torch.linalg.vector_norm(copy[: piece.numel()].copy_(piece), out=results[index])
        return results


def sums_of_squares(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sum of squares (fp32) of each `width` elements, added by halves, on the device of `part`."""
    rows = -(-part.numel() // width)
    squares = torch.zeros(rows * width, dtype=torch.float32, device=part.device)
    values = squares[: part.numel()].copy_(part)
    values.mul_(values)
    return sum_by_halves(squares.view(rows, width))


def sum_by_halves(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's sum, computed in place by halving; the row length is a power of two."""
    length = rows.shape[1]
    while length > 1:
        length //= 2
        rows[:, :length].add_(rows[:, length : 2 * length])
    return rows[:, 0]


def root_of_sum(sums: torch.Tensor) -> torch.Tensor:
    filled = sums.new_zeros(1, 1 << max(0, sums.numel() - 1).bit_length())  # the next power of two
    filled[0, : sums.numel()].copy_(sums)
    return sum_by_halves(filled)[0].sqrt()


# -- compiled --------------------------------------------------------------------------------------------------------

_NO_NORM, _LANES, _FUSED_LANES, _HALVES = range(4)  # gradients.h's Order


class _Addition(ctypes.Structure):
    """gradients.h's Addition."""

    _fields_ = (
        ("sums", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("results", ctypes.c_void_p),
        ("sums_type", ctypes.c_int32),
        ("values_type", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("group", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Lanes:
    """The order in which torch's norm may add squares, as gradients.h's LANES and FUSED_LANES."""

    count: int
    fused: bool  # each square and its addition are rounded once
    group: int = 1  # if not: of the elements that fill no vector, whole groups of so many are not fused, the rest is


class NativeGradients:
    """The compiled gradient kernel. It measures with torch's bits if `lanes` is the order of torch's norm."""

    name = "native"

    def __init__(self, library: NativeLibrary, lanes: Lanes) -> None:
        self.library, self._add = library, library.functions.add_gradient
        self._add.restype = ctypes.c_int32
        self._lanes = lanes

    def add(
        self,
        sums: torch.Tensor,
        values: torch.Tensor | None,
        *,
        first: bool = False,
        pieces: Pieces | None = None,
        on_torch_threads: bool = False,
    ) -> torch.Tensor:
        count = sums.numel()
        assert sums.is_contiguous()
        assert values is None or (values.is_contiguous() and values.numel() == count)
        results = torch.empty(0) if pieces is None else pieces.results(count)
        if not count:
            return results
        order = (
            _NO_NORM if pieces is None else _HALVES if pieces.halving else _FUSED_LANES if self._lanes.fused else _LANES
        )
        addition = _Addition(
            sums=sums.data_ptr(),
            values=None if values is None else values.data_ptr(),
            count=count,
            width=1 if pieces is None else pieces.width,
            results=results.data_ptr(),
            sums_type=TYPES[sums.dtype],
            values_type=TYPES[None if values is None else values.dtype],
            first=first,
            order=order,
            lanes=self._lanes.count,
            group=self._lanes.group,
        )
        parallel = ctypes.c_void_p(self.library.parallel if on_torch_threads else None)
        if self._add(ctypes.byref(addition), ctypes.c_int32(self.library.threads()), parallel):
            raise TrainerError(f"no memory to measure a gradient of {count} elements")
        return results


GradientKernel = TorchGradients | NativeGradients  # add gradients to sums in host memory


def gradient_kernel(kernel: Kernel) -> GradientKernel:
    """Return the gradient kernel that belongs to an update kernel: compiled if it gives torch's bits on this CPU."""
    if isinstance(kernel, NativeKernel):
        found = next(filter(adds_like_torch, _candidates(kernel.library)), None)
        if found is not None:
            return found
    return TorchGradients()


def _candidates(library: NativeLibrary) -> Iterator[NativeGradients]:
    """Yield kernels with the orders of addition of torch's norm on CPUs with AVX2, AVX-512, and neither."""
    for count in (8, 16, 4):
        for group in (4, 8, 16, 1):
            yield NativeGradients(library, Lanes(count, fused=False, group=group))
        yield NativeGradients(library, Lanes(count, fused=True))


def adds_like_torch(kernel: GradientKernel) -> bool:
    """Return whether a gradient kernel has the bits of `TorchGradients`.

    A wrong order of addition changes the result of few pieces, so that many small pieces of all lengths are compared.
    """
    random, small = torch.Generator().manual_seed(3), Pieces(256, halving=False)
    for length in (length for length in range(1, 32) for _ in range(30)):
        sums = torch.randn(length, generator=random)
        if not torch.equal(kernel.add(sums, None, pieces=small), TorchGradients().add(sums, None, pieces=small)):
            return False
    for count, given, stored in (
        (80 * 256 + 203, torch.bfloat16, torch.float32),
        (80 * 256, torch.float32, torch.float32),
        (777, torch.float16, torch.float16),
        (80 * 256 + 6, torch.bfloat16, torch.bfloat16),
    ):
        size = torch.empty(count).uniform_(-3, 3, generator=random).exp_()
        before, more = (torch.randn(2, count, generator=random) * size).unbind()
        for pieces in (small, Pieces(4096, halving=True), None):
            results = []
            for candidate in (kernel, TorchGradients()):
                sums = before.to(stored, copy=True)
                measured = candidate.add(sums, more.to(given), pieces=pieces)
                again = candidate.add(sums, None, pieces=pieces)
                results.append((sums, measured, again))
            if not all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True)):
                return False
    return True


# -- norms -------------------------------------------------------------------------------------------------------------


_CHUNKS_ON_GPU = 8  # chunks that are squared at a time; 32 MiB


def clip_factor(norm: float, *, limit: float) -> float:
    """Return the factor that clips gradients of this norm to `limit`; 1 if `limit` is 0 (no clipping).

    The operations are those of torch.nn.utils.clip_grad_norm_, in fp32, for the same bits.
    """
    if not limit:
        return 1.0
    return float(torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0))


def global_norm(norms: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all gradients from each weight's, in the model's order; infinite or NaN if any element is."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms.values())))) if norms else 0.0


def norm_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the fp32 norm (0-dim) of one 1-D gradient, on its device.

    On the CPU it is computed in pieces. torch would make an fp32 copy of the whole gradient and sum it sequentially,
    with an error of 1 % at 9e7 elements.
    """
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32)
    pieces = Pieces.of(flat.numel(), ordered=False)
    return pieces.norm(TorchGradients().add(flat.contiguous(), None, pieces=pieces))


def ordered_norm(flat: torch.Tensor, *, chunks: int | None = None) -> torch.Tensor:
    """Return the fp32 norm (0-dim) of 1-D values, with the same bits on every device.

    The squares of each chunk of 2^20 elements are summed by halving: element i + half is added to element i, until one
    is left. The chunks' sums are added in the same way. Each step is one fp32 operation per element, rounded once,
    which every device computes identically, and padding with zeros changes nothing. `chunks` are processed at a time:
    by default one on the CPU, which fits its cache, and several on a GPU.
    """
    width = piece_width(flat.numel(), ordered=True)
    at_a_time = chunks or (1 if flat.device.type == "cpu" else _CHUNKS_ON_GPU)
    return root_of_sum(torch.cat([sums_of_squares(part, width) for part in flat.split(width * at_a_time)]))
