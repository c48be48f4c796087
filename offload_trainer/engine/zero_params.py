"""Read and write weights that ZeRO-3 may have partitioned. No other module uses GatheredParameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload_trainer.errors import TrainerError


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO-3 manages the parameter."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole weight, gathered or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def gathered(parameter: nn.Parameter, *, modify: bool = False) -> Iterator[torch.Tensor]:
    """Gather the whole weight on every rank. With `modify`, all ranks keep what rank 0 writes inside the context."""
    if not is_partitioned(parameter):
        yield parameter.data
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modify else None):
        yield parameter.data


def write_weight(name: str, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set a weight on all ranks, and read it back to check it.

    `value` has the whole shape and the weight's dtype, and is the same on every rank.

    Raises:
        TrainerError: the weight reads back differently; the message has the number of elements.
    """
    assert tuple(value.shape) == full_shape(parameter), f"{name}: {tuple(value.shape)} for {full_shape(parameter)}"
    with gathered(parameter, modify=True) as whole:
        whole.copy_(value)
    with gathered(parameter) as whole:
        if not torch.equal(whole.to(value.device), value):
            wrong = int((whole.to(value.device) != value).sum())
            raise TrainerError(
                f"{name}: {wrong} of {value.numel()} elements read back differently after they were written"
            )
