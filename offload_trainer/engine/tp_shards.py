"""Split whole weights and the inputs of checkpointed blocks over tensor-parallel ranks, and join the shards again.

    forward   input ──copied──> this rank's piece (──> host memory)      the input itself is freed with the block
    backward  (host memory ──>) pieces of all ranks ──all-gather──> input, when the block is recomputed

All ranks compute the same blocks with the same inputs in the same order, so their all-gathers match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.plan.shape import ModelShape, Weight

_DIVIDED = {"column": 0, "row": -1}  # the dimension; nn.Linear's weights are [outputs, inputs], biases [outputs]


@dataclass(frozen=True)
class Parts:
    """This rank's shard of each weight: number `place` of `count` in the process group `group`."""

    weights: dict[str, Weight]
    count: int
    place: int
    group: Any

    def of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a whole weight, or of a tensor of the same shape."""
        dim = self._dim(name)
        return whole if dim is None else whole.chunk(self.count, dim)[self.place].contiguous()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole weight."""
        return self.weights[name].shape

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Join the shards of all ranks on every rank. All ranks of the group call it."""
        dim = self._dim(name)
        if dim is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.count)]
        torch.distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def partitioned(self, *, to_host: bool) -> PartitionedInputs:
        """Return the object that divides each checkpointed block input over the group's ranks."""
        return PartitionedInputs(place=self.place, count=self.count, group=self.group, to_host=to_host)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise TrainerError if DeepSpeed has split the weights differently from the plan."""
        wrong = [
            f"{name} {list(found)} for {list(expected)}"
            for name, found in shapes.items()
            if tuple(found) != (expected := self._expected(name))
        ]
        if wrong:
            raise TrainerError(f"{len(wrong)} weights were not split as planned: {', '.join(wrong[:3])}")

    def _expected(self, name: str) -> tuple[int, ...]:
        shape, dim = list(self.shape(name)), self._dim(name)
        if dim is not None:
            shape[dim] //= self.count
        return tuple(shape)

    def _dim(self, name: str) -> int | None:
        return _DIVIDED.get(self.weights[name].split) if self.count > 1 else None


def parts_of(shape: ModelShape, *, count: int) -> Parts:
    """Return this rank's shards, after DeepSpeed has created its groups of neighbouring ranks."""
    weights = {weight.name: weight for weight in shape.weights}
    if count == 1:
        return Parts(weights, 1, 0, None)
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    return Parts(weights, count, torch.distributed.get_rank(group), group)


@dataclass(frozen=True)
class _Piece:
    """A piece of an input of this shape; `saved` is the piece, or its handle in host memory."""

    saved: Any
    shape: torch.Size


class PartitionedInputs:
    """A store that keeps one piece of each input on each of `count` ranks; this rank is number `place` in `group`."""

    def __init__(self, *, place: int, count: int, group: Any, to_host: bool = False) -> None:
        """Prepare the partition; `to_host`: move pieces to pinned host memory, on the computing stream."""
        self._place, self._count, self._group = place, count, group
        self._host = torch.autograd.graph.save_on_cpu(pin_memory=True) if to_host else None

    def begin(self) -> None:
        """Do nothing, because a block needs no preparation."""

    def pack_input(self, tensor: torch.Tensor) -> Any:
        """Copy this rank's piece of a block input; return its handle."""
        piece = piece_of(tensor, self._place, count=self._count)
        return _Piece(self._host.pack_hook(piece) if self._host else piece, tensor.shape)

    def pack_other(self, tensor: torch.Tensor) -> Any:
        return tensor.detach()

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the whole tensor of a handle; an input is all-gathered, so all ranks of the group call it."""
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
