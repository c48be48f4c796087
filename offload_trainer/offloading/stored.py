"""A weight in a state_dict: its shape and dtype, and its values when something is done with them, each time anew.

Lists of them hold nothing, so that whoever goes through a state_dict has one weight in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.offloading.parameter import FACTS

_POINTERS = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
_FACTS = FACTS - {"stride", "is_contiguous"}  # those of what stands for the values


class StoredWeight(torch.Tensor):
    """Made by `of`. Every operation of torch is done with the values, which are on the CPU, and gives plain tensors."""

    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, like: torch.Tensor, read: Callable[[], torch.Tensor]) -> StoredWeight:
        """With the shape and dtype of `like`; `read` gives the values."""
        made = torch.full((1,), torch.nan, dtype=like.dtype).expand(like.shape).as_subclass(cls)
        made.read = read
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        told = getattr(func, "__name__", "")
        name = func.__self__.__name__ if told in ("__get__", "__set__") else told  # type: ignore[attr-defined]
        if name in _POINTERS:
            raise UserError(f"{name} of an offloaded weight: its values are read anew each time; clone() keeps them")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _FACTS:
                return func(*args, **(kwargs or {}))
            return func(*_values(args), **_values(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


def _values(given: Any) -> Any:
    """Arguments with values for each weight, in lists and mappings too."""
    if isinstance(given, StoredWeight):
        return given.read()
    if isinstance(given, dict):
        return {key: _values(value) for key, value in given.items()}
    return type(given)(map(_values, given)) if type(given) in (list, tuple) else given
