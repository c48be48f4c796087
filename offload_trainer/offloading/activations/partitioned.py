"""Partition the inputs of checkpointed blocks over tensor-parallel ranks, which all have the same inputs.

    forward   input ──copied──> this rank's piece (──> host memory)      the input itself is freed with the block
    backward  (host memory ──>) pieces of all ranks ──all-gather──> input, when the block is recomputed

All ranks compute the same blocks in the same order, so their all-gathers match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Piece:
    """A piece of an input of this shape; `saved` is the piece, or its handle in host memory."""

    saved: Any
    shape: torch.Size


class Partitioned:
    """Stores one piece of each input on each of `count` ranks; this rank is number `place` in `group`."""

    def __init__(self, *, place: int, count: int, group: Any, away: bool = False) -> None:
        """Prepare the partition; `away`: move pieces to pinned host memory, on the computing stream."""
        self._place, self._count, self._group = place, count, group
        self._host = torch.autograd.graph.save_on_cpu(pin_memory=True) if away else None

    def begin(self) -> None:
        """Do nothing: a block needs no preparation."""

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
    """Return a copy of piece `place` of `count` equal pieces of a contiguous tensor, padded with zeros."""
    flat = tensor.detach().view(-1)
    size = -(-flat.numel() // count)
    piece, own = flat.new_zeros(size), flat[place * size : (place + 1) * size]
    piece[: own.numel()] = own
    return piece
