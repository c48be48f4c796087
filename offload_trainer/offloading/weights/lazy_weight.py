"""Define lazy tensors: they have a shape and a dtype, and read their values only while a torch operation runs.

    a weight in a state_dict      each operation reads it from its tier; in-place operations are refused
    `.grad` between backward and  each operation reads the gradient sum; in-place operations, such as `mul_`, write it
    step                          back

Code that iterates over a state_dict or over all gradients therefore has one tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.parameter import FACTS

_POINTERS = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
_FACTS = FACTS - {"stride", "is_contiguous"}  # strides and contiguity differ from those of the values


class LazyWeight(torch.Tensor):
    """A lazy tensor, created by `of`. Torch operations run on its values and return plain tensors.

    Only results that share memory with a writable lazy tensor are lazy as well.
    """

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

        `read` returns the values, on `device`. `write` receives them after an in-place operation; without it such an
        operation raises UserError. `keeps`: keep the values in memory once their address is requested; otherwise that
        raises UserError.
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
            operation = _Operation(func, name, args, kwargs or {})
            return operation.returned(operation.done())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


class _Operation:
    """One torch operation on lazy tensors, which can be repeated."""

    def __init__(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._name, self._args, self._kwargs = func, name, args, kwargs
        self._read: list[tuple[LazyWeight, torch.Tensor, int]] = []  # lazy tensor, values, version counter

    def done(self) -> Any:
        """Run the operation on the values, reading each lazy tensor once; return the result."""
        self._read = []
        with torch._C.DisableTorchFunctionSubclass():
            return self._func(*self._values(self._args), **self._values(self._kwargs))

    def returned(self, result: Any) -> Any:
        """Write back values that changed in place, and replace results that share their memory by lazy tensors."""
        self._write_back()
        if isinstance(result, list | tuple):
            return type(result)([self._stand_in(one, itemgetter(n)) for n, one in enumerate(result)])
        return self._stand_in(result, lambda made: made)

    def _values(self, given: Any) -> Any:
        """Replace lazy tensors in arguments by their values, including those in lists, tuples and dicts."""
        if isinstance(given, LazyWeight):
            return self._value(given)
        if isinstance(given, dict):
            return {key: self._values(value) for key, value in given.items()}
        return type(given)(map(self._values, given)) if type(given) in (list, tuple) else given

    def _value(self, stored: LazyWeight) -> torch.Tensor:
        for one, values, _ in self._read:
            if one is stored:
                return values
        with torch.inference_mode(False):  # inference tensors have no version counter, which detects in-place writes
            values = stored.read()
        self._read.append((stored, values, values._version))
        return values

    def _write_back(self) -> None:
        for stored, values, version in self._read:
            if values._version == version:
                continue
            if stored.write is None:
                raise UserError(
                    f"{self._name} would write to an offloaded model's weight, whose master is elsewhere: change "
                    "weights before the model is offloaded; clone() gives values to work with"
                )
            stored.write(values)

    def _stand_in(self, result: Any, part: Callable[[Any], torch.Tensor]) -> Any:
        """Return `result`, a `part` of the operation's result, or a lazy tensor if writes must be written back."""
        for stored, values, _ in self._read:
            if stored.write is not None and result is values:
                return stored
            if stored.write is None or not isinstance(result, torch.Tensor):
                continue
            if result.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
                return LazyWeight.of(
                    result,
                    lambda: part(self.done()),
                    write=lambda new: self._write_part(part, new),
                    device=result.device,
                )
        return result

    @torch.no_grad()
    def _write_part(self, part: Callable[[Any], torch.Tensor], new: torch.Tensor) -> None:
        part(self.done()).copy_(new)
        self._write_back()
