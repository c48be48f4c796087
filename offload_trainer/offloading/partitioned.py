"""What gradient checkpointing keeps, divided over ranks that have the same: of each block's input a piece on each.

    forward   input ──copied──> this rank's piece (──> host memory)      the input itself goes with the block
    backward  (host memory ──>) pieces of all ranks ──all-gather──> input, once the block is computed again

All ranks compute the same blocks in the same order, so their gathers meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Piece:
    """Of an input that has this shape; `saved` is the piece, or what stands for it in host memory."""

    saved: Any
    shape: torch.Size


class Partitioned:
    """Keeps of each input a piece on each of `count` ranks, of which this one has number `place` of their `group`."""

    def __init__(self, *, place: int, count: int, group: Any, away: bool = False) -> None:
        """`away`: pieces go to pinned host memory, on the stream that computes."""
        self._place, self._count, self._group = place, count, group
        self._host = torch.autograd.graph.save_on_cpu(pin_memory=True) if away else None

    def begin(self) -> None:
        """Nothing is needed of a block before its input."""

    def keep(self, tensor: torch.Tensor) -> Any:
        piece = piece_of(tensor, self._place, count=self._count)
        return _Piece(self._host.pack_hook(piece) if self._host else piece, tensor.shape)

    def leave(self, tensor: torch.Tensor) -> Any:
        return tensor.detach()

    def give(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Piece):
            left: torch.Tensor = kept
            return left
        piece = self._host.unpack_hook(kept.saved) if self._host else kept.saved
        whole = piece.new_empty(self._count * piece.numel())
        torch.distributed.all_gather_into_tensor(whole, piece, group=self._group)
        return whole[: kept.shape.numel()].view(kept.shape)


def piece_of(tensor: torch.Tensor, place: int, *, count: int) -> torch.Tensor:
    """A copy of one of `count` alike stretches of a contiguous tensor's elements; the last ones end with zeros."""
    flat = tensor.detach().view(-1)
    size = -(-flat.numel() // count)
    piece, own = flat.new_zeros(size), flat[place * size : (place + 1) * size]
    piece[: own.numel()] = own
    return piece
