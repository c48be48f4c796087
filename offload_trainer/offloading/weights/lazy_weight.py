"""Stand-ins for tensors that are elsewhere: shape and dtype, and the values only while an operation of torch runs.

    a weight in a state_dict      read from its home for each operation; an operation in place is refused
    `.grad` between backward and  the sum is read for each operation; one in place, such as `mul_`, writes it back
    step

A list of them holds no values, so code that goes through a state_dict or through all gradients has one tensor in memory
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.parameter import FACTS

_POINTERS = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
_FACTS = FACTS - {"stride", "is_contiguous"}  # a stand-in's strides and contiguity are not those of the values


class LazyWeight(torch.Tensor):
    """Made by `of`. Every operation of torch is done with the values and returns plain tensors."""

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
        """Return a stand-in with the shape of `like`, and its dtype unless another is given.

        `read` returns the values, on `device`. `write` takes what an operation in place has made of them; without it
        such an operation raises UserError. With `keeps` the stand-in holds the values once somebody asks for their
        address; without it that raises UserError.
        """
        nothing = torch.full((1,), torch.nan, dtype=dtype or like.dtype, device=device)
        made = nothing.expand(like.shape).as_subclass(cls)
        made.read, made.write, made.keeps = read, write, keeps
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        told = getattr(func, "__name__", "")
        name = func.__self__.__name__ if told in ("__get__", "__set__") else told  # type: ignore[attr-defined]
        if name in _POINTERS and not args[0].keeps:
            raise UserError(f"{name} of an offloaded tensor: each operation reads its values; clone() keeps them")
        if name in _POINTERS:
            args[0]._keep()
        if name == "data" and told == "__set__":
            raise UserError("an offloaded tensor's .data cannot be set: copy_() writes to a gradient")
        if name in ("data", "detach") and args[0].write is not None:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _FACTS:
                return func(*args, **(kwargs or {}))
            operation = _Operation(func, name, args, kwargs or {})
            return operation.returned(operation.done())

    def _keep(self) -> None:
        values = self.read()
        self.read = lambda: values

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


class _Operation:
    """One operation of torch on stand-ins, which can be done again."""

    def __init__(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._name, self._args, self._kwargs = func, name, args, kwargs
        self._read: list[tuple[LazyWeight, torch.Tensor, int]] = []  # with the values' version when they were read

    def done(self) -> Any:
        """Return what the operation makes of the values, each stand-in's read once."""
        self._read = []
        with torch._C.DisableTorchFunctionSubclass():
            return self._func(*self._values(self._args), **self._values(self._kwargs))

    def returned(self, result: Any) -> Any:
        """Write back what was changed in place; in a result put stand-ins for values and views that can be written."""
        self._write_back()
        if isinstance(result, list | tuple):
            return type(result)([self._stand_in(one, itemgetter(n)) for n, one in enumerate(result)])
        return self._stand_in(result, lambda made: made)

    def _values(self, given: Any) -> Any:
        """Arguments with values in place of stand-ins, in lists and mappings too."""
        if isinstance(given, LazyWeight):
            return self._value(given)
        if isinstance(given, dict):
            return {key: self._values(value) for key, value in given.items()}
        return type(given)(map(self._values, given)) if type(given) in (list, tuple) else given

    def _value(self, stored: LazyWeight) -> torch.Tensor:
        for one, values, _ in self._read:
            if one is stored:
                return values
        with torch.inference_mode(False):  # or the values would have no version to recognise an operation in place by
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
        """Return `result`, a `part` of what the operation makes, or a stand-in for it where writes must not be lost."""
        for stored, values, _ in self._read:
            if stored.write is not None and result is values:
                return stored
            if stored.write is not None and isinstance(result, torch.Tensor) and _share_memory(result, values):
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


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
