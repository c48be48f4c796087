"""Split whole weights into tensor-parallel shards and join the shards again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.activations.partitioned import Partitioned
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

    def partitioned(self, *, away: bool) -> Partitioned:
        """Return the object that divides each checkpointed block input over the group's ranks."""
        return Partitioned(place=self.place, count=self.count, group=self.group, away=away)

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
