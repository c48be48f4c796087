"""Norms of gradients and of their sums, and the factor that clips their total.

A sum over micro-batches may be on a GPU, in host memory or on a drive, and torch's norm adds in a different order on
each. If a GPU trains, norms of sums are therefore ordered: squares are added by halving. `Pieces` says into which
pieces a weight is cut: in host memory a kernel returns one partial result a piece while it adds a gradient
(`TorchKernel.add`), and `Pieces.norm` combines them.
"""

from dataclasses import dataclass
from typing import Self

import torch

from offload_trainer.plan.communication import piece_width

_CHUNKS_ON_GPU = 8  # chunks that are squared at a time; 32 MiB


@dataclass(frozen=True)
class Pieces:
    """Values are measured in pieces of `width` elements, a multiple of 256 unless there is one piece.

    `halving`: a piece's result is its sum of squares, added by halves; `width` is a power of two. Otherwise it is the
    norm of the piece with the bits of torch on this CPU.
    """

    width: int
    halving: bool

    @classmethod
    def of(cls, numel: int, *, ordered: bool) -> Self:
        """Return the pieces of a weight of `numel` elements, counted from its start, for `norm_of` with `ordered`."""
        return cls(piece_width(numel, ordered=ordered), halving=ordered)

    def results(self, elements: int) -> torch.Tensor:
        return torch.empty(-(-elements // self.width), dtype=torch.float32)

    def measure(self, values: torch.Tensor, *, chunks: int | None = None) -> torch.Tensor:
        """Return the partial results (fp32) of 1-D values, one a piece; `chunks` pieces are halved at a time."""
        if self.halving:
            at_a_time = chunks or (1 if values.device.type == "cpu" else _CHUNKS_ON_GPU)  # one fits a CPU's cache
            found = []
            for part in values.split(self.width * at_a_time):
                rows = -(-part.numel() // self.width)
                squares = torch.zeros(rows * self.width, dtype=torch.float32, device=part.device)
                given = squares[: part.numel()].copy_(part)
                given.mul_(given)
                # a copy, since a view of the sums would keep the squares of all parts in memory
                found.append(_sum_by_halves(squares.view(rows, self.width)).clone())
            return torch.cat(found)
        # The pieces' copy and norms use two preallocated tensors, because small allocations between freed copies would
        # fragment the heap.
        results, copy = self.results(values.numel()), torch.empty(min(self.width, values.numel()), dtype=torch.float32)
        for index, piece in enumerate(values.split(self.width)):
            torch.linalg.vector_norm(copy[: piece.numel()].copy_(piece), out=results[index])
        return results

    def norm(self, results: torch.Tensor) -> torch.Tensor:
        """Return the norm (fp32, 0-dim) from the partial results of all pieces, which several ranks may compute."""
        if not self.halving:
            return torch.linalg.vector_norm(results)
        filled = results.new_zeros(1, 1 << max(0, results.numel() - 1).bit_length())  # the next power of two
        filled[0, : results.numel()].copy_(results)
        return square_root(_sum_by_halves(filled)[0])


def _sum_by_halves(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's sum, computed in place by halving; the row length is a power of two."""
    length = rows.shape[1]
    while length > 1:
        length //= 2
        rows[:, :length].add_(rows[:, length : 2 * length])
    return rows[:, 0]


def square_root(total: torch.Tensor) -> torch.Tensor:
    """Return the root of an fp32 number, rounded to nearest: of MKL's, which torch takes on a CPU, 1 in 100 is not."""
    return total.double().sqrt().float()


def norm_of(flat: torch.Tensor, *, ordered: bool = False) -> torch.Tensor:
    """Return the fp32 norm (0-dim) of 1-D values, on their device.

    On the CPU it is computed in pieces: torch would make an fp32 copy of the whole gradient and sum it sequentially,
    with an error of 1 % at 9e7 elements. `ordered` norms have the same bits on every device: the squares of each chunk
    of 2^20 elements, and then the chunks' sums, are added by halving, in fp32. Padding with zeros changes nothing.
    """
    if not ordered and flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32)
    pieces = Pieces.of(flat.numel(), ordered=ordered)
    return pieces.norm(pieces.measure(flat.contiguous()))


def clip_factor(norm: float, *, limit: float) -> float:
    """Return the factor that clips gradients to `limit` (0: none), computed in fp32 as in torch's clip_grad_norm_."""
    if not limit:
        return 1.0
    return float(torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0))
