"""Norms of gradients, for clipping and the record.

    one gradient                    `norm_of`, on the device that made it
    a sum over micro-batches        on the CPU `norm_of` too; for a GPU's `ordered_norm`, wherever the sum lies

The homes must not change a bit, and a sum may lie on the GPU, in host memory or on a drive. A library's own norm adds
up in another order on each, so there it is made of single additions whose order is written down here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload_trainer.plan.tiered.norm_shards import piece_width

_CHUNKS_ON_GPU = 8  # at a time; 32 MiB of squares


def clip_factor(norm: float, *, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it is at most `limit`; 0: no limit, 1.

    In fp32 and operation by operation as torch.nn.utils.clip_grad_norm_ takes it, for the same bits.
    """
    if not limit:
        return 1.0
    return float(torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0))


def norm_of(flat: torch.Tensor) -> torch.Tensor:
    """fp32 norm of one 1-D gradient, on its device.

    On the CPU a piece at a time: torch makes an fp32 copy first, and adds up without a tree, 1 % off for 9e7 elements.
    Copy and results have memory of their own: small blocks between freed copies would leave a heap of holes.
    """
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32)
    width = piece_width(flat.numel(), ordered=False)
    pieces = flat.split(width)
    return torch.linalg.vector_norm(_norms_of(pieces, count=len(pieces), largest=min(width, flat.numel())))


def _norms_of(pieces: Iterable[torch.Tensor], *, count: int, largest: int) -> torch.Tensor:
    norms, copy = torch.empty(count), torch.empty(largest)
    for index, piece in enumerate(pieces):
        torch.linalg.vector_norm(copy[: piece.numel()].copy_(piece), out=norms[index])
    return norms


def ordered_norm(flat: torch.Tensor, *, chunks: int | None = None) -> torch.Tensor:
    """fp32 norm of 1-D values, the same bits wherever they lie.

    Squares of 2^20 elements at a time are added up by halves, element i to element i + half, and what the chunks give
    in the same way. Each step is one fp32 operation an element, rounded once, which every device does alike; filling
    up with zeros changes none of them. `chunks` are taken at a time: one in the CPU's cache, several on a GPU.
    """
    width = piece_width(flat.numel(), ordered=True)
    at_a_time = chunks or (1 if flat.device.type == "cpu" else _CHUNKS_ON_GPU)
    sums = torch.cat([_sums_of_squares(part, width) for part in flat.split(width * at_a_time)])
    return _root_of_sum(sums)


def _root_of_sum(sums: torch.Tensor) -> torch.Tensor:
    filled = sums.new_zeros(1, _power_of_two(sums.numel()))
    filled[0, : sums.numel()].copy_(sums)
    return _by_halves(filled)[0].sqrt()


class PiecewiseNorm:
    """The norm of one weight's sum that lies in parts on several ranks: the bits of `norm_of` or `ordered_norm`.

    Either is put together from what each `width` elements give, counted from the weight's start.
    """

    def __init__(self, numel: int, *, ordered: bool) -> None:
        """`ordered`: as `ordered_norm`, else as `norm_of` on the CPU."""
        self._ordered = ordered
        self.width = piece_width(numel, ordered=ordered)
        self.pieces, self._largest = -(-numel // self.width), min(numel, self.width)

    def of(self, pieces: Iterable[torch.Tensor], *, count: int) -> torch.Tensor:
        """fp32, one number for each of `count` pieces on the CPU: `width` elements, the weight's last perhaps fewer."""
        if not self._ordered:
            return _norms_of(pieces, count=count, largest=self._largest)
        numbers = torch.empty(count)
        for index, piece in enumerate(pieces):
            numbers[index : index + 1] = _sums_of_squares(piece, self.width)
        return numbers

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """The norm (fp32, 0-dim) from the numbers of all pieces."""
        return _root_of_sum(numbers) if self._ordered else torch.linalg.vector_norm(numbers)


def _sums_of_squares(part: torch.Tensor, width: int) -> torch.Tensor:
    """One number for each `width` elements."""
    rows = -(-part.numel() // width)
    squares = torch.zeros(rows * width, dtype=torch.float32, device=part.device)
    values = squares[: part.numel()].copy_(part)
    values.mul_(values)
    return _by_halves(squares.view(rows, width))


def _by_halves(rows: torch.Tensor) -> torch.Tensor:
    """Each row's sum, in place; their length is a power of two."""
    length = rows.shape[1]
    while length > 1:
        length //= 2
        rows[:, :length].add_(rows[:, length : 2 * length])
    return rows[:, 0]


def _power_of_two(count: int) -> int:
    """The least that is not below."""
    return 1 << max(0, count - 1).bit_length()
