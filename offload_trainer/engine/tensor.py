"""Weights of which each rank of a group has a part: the part of a whole weight, and the whole of the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.partitioned import Partitioned
from offload_trainer.plan.shape import ModelShape, Weight

_DIVIDED = {"column": 0, "row": -1}  # the dimension; nn.Linear's weights are [outputs, inputs], biases [outputs]


@dataclass(frozen=True)
class Parts:
    """Of `count` ranks this one has part `place`; `group` is theirs, in that order. One rank has all."""

    weights: dict[str, Weight]
    count: int
    place: int
    group: Any

    def of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole weight, or of what has its shape."""
        dim = self._dim(name)
        return whole if dim is None else whole.chunk(self.count, dim)[self.place].contiguous()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole weight."""
        return self.weights[name].shape

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts as one, on all of them; every rank of the group calls."""
        dim = self._dim(name)
        if dim is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.count)]
        torch.distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def partitioned(self, *, away: bool) -> Partitioned:
        """Keeps of each checkpointed block's input a part on each rank of the group."""
        return Partitioned(place=self.place, count=self.count, group=self.group, away=away)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """TrainerError where the library that divided the weights did it otherwise."""
        wrong = [
            f"{name} {list(found)} for {list(expected)}"
            for name, found in shapes.items()
            if tuple(found) != (expected := self._expected(name))
        ]
        if wrong:
            raise TrainerError(f"{len(wrong)} weights were divided otherwise than planned: {', '.join(wrong[:3])}")

    def _expected(self, name: str) -> tuple[int, ...]:
        shape, dim = list(self.shape(name)), self._dim(name)
        if dim is not None:
            shape[dim] //= self.count
        return tuple(shape)

    def _dim(self, name: str) -> int | None:
        return _DIVIDED.get(self.weights[name].split) if self.count > 1 else None


def parts_of(shape: ModelShape, *, count: int) -> Parts:
    """Once DeepSpeed has its groups: neighbours share a model."""
    weights = {weight.name: weight for weight in shape.weights}
    if count == 1:
        return Parts(weights, 1, 0, None)
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    return Parts(weights, count, torch.distributed.get_rank(group), group)
