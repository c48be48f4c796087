"""Define lazy tensors, whose values are read only while a torch operation runs: weights in a state_dict, and `.grad`.

Code that iterates over a state_dict or over all gradients therefore has one tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.parameter import FACTS

_POINTERS = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
_FACTS = FACTS - {"stride", "is_contiguous"}  # strides and contiguity differ from those of the values


class LazyWeight(torch.Tensor):
    """A lazy tensor, created by `of`. Results of operations are lazy only if they share a writable one's memory."""

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None] | None
    keeps: bool

    @classmethod
    def of(
        cls,
        like: torch.Tensor,
        read: Callable[[], torch.Tensor],
        *,
        write: Callable[[torch.Tensor], None] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        keeps: bool = False,
    ) -> LazyWeight:
        """Return a lazy tensor with the shape of `like`, and its dtype unless `dtype` is given.

        `read` returns the values, on `device`. `write` receives them after an in-place operation, which otherwise
        raises UserError. So does a request for their address unless it `keeps` them in memory from then on.
        """
        nothing = torch.full((), torch.nan, dtype=dtype or like.dtype, device=device)
        made = nothing.expand(like.shape).as_subclass(cls)
        made.read, made.write, made.keeps = read, write, keeps
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own_name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if own_name in ("__get__", "__set__") else own_name  # type: ignore[attr-defined]
        if name in _POINTERS and not args[0].keeps:
            raise UserError(f"{name} of an offloaded tensor: each operation reads its values; clone() keeps them")
        if name in _POINTERS:
            values = args[0].read()
            args[0].read = lambda: values
        if name == "data" and own_name == "__set__":
            raise UserError("an offloaded tensor's .data cannot be set: copy_() writes to a gradient")
        if name in ("data", "detach") and args[0].write is not None:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _FACTS:
                return func(*args, **(kwargs or {}))
            run = partial(_run, func, args, kwargs or {})
            result, read = run()
            _write_back(read, name)
            if isinstance(result, list | tuple):
                return type(result)([_lazy(one, itemgetter(n), read, run, name) for n, one in enumerate(result)])
            return _lazy(result, lambda made: made, read, run, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


_Read = list[tuple[LazyWeight, torch.Tensor, int]]  # lazy tensors that an operation has read, values, version counters


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Read]:
    """Run an operation on values, reading each lazy tensor once, including those in lists, tuples and dicts."""
    read: _Read = []

    def values_of(given: LazyWeight) -> torch.Tensor:
        values = next((values for stored, values, _ in read if stored is given), None)
        if values is None:
            with torch.inference_mode(False):  # only other tensors have a version counter, which detects writes
                values = given.read()
            read.append((given, values, values._version))
        return values

    with torch._C.DisableTorchFunctionSubclass():
        args, kwargs = tree_map_only(LazyWeight, values_of, (args, kwargs))
        return func(*args, **kwargs), read


def _write_back(read: _Read, name: str) -> None:
    """Write values back that the operation `name` has changed in place."""
    for stored, values, version in read:
        if values._version == version:
            continue
        if stored.write is None:
            raise UserError(
                f"{name} would write to an offloaded model's weight, whose master is elsewhere: change weights before "
                "the model is offloaded; clone() gives values to work with"
            )
        stored.write(values)


def _lazy(
    result: Any, part: Callable[[Any], torch.Tensor], read: _Read, run: Callable[[], tuple[Any, _Read]], name: str
) -> Any:
    """Return `result`, a `part` of what `run` gives, or a lazy tensor if writes to it must be written back."""
    for stored, values, _ in read:
        if stored.write is not None and result is values:
            return stored
        if stored.write is None or not isinstance(result, torch.Tensor):
            continue
        if result.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():

            @torch.no_grad()
            def write(new: torch.Tensor) -> None:
                made, read = run()
                part(made).copy_(new)
                _write_back(read, name)

            return LazyWeight.of(result, lambda: part(run()[0]), write=write, device=result.device)
    return result
