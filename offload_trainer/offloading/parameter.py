"""Parameters whose values may be away: whoever reads one gets its values, or an error with its name.

A parameter stays the object that it was and takes this class. Each operation of torch asks the class first
(`__torch_function__`):

    shape, dtype, device, ...          as they are, nothing is brought
    values, inside its module          there already: the module's hook has brought them
    values, anywhere else              brought for this operation, into memory that no other weight comes to
    writing, `.data =`, `.grad =`      refused: masters live elsewhere, and what is written here would be lost
    `.grad`, `.grad = None`            the sum that waits for the next step (`stored.py`), wherever it is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from offload_trainer.errors import UserError

# What is asked of a parameter without looking at its values.
FACTS = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "output_nr",
        "names",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_mps",
        "is_xpu",
        "retains_grad",
        "_version",
        "_backward_hooks",
        "_has_compatible_shallow_copy_type",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "is_tensor",
        "is_inference",
        "is_same_size",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__len__",
        "_is_view",
        "is_signed",
        "is_shared",
        "has_names",
    ]
)


class Lender(Protocol):
    """What an offloaded parameter asks."""

    def lend(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Inside, these weights have their values, and what autograd saves of them keeps its own."""
        ...

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return the sum that waits for the next step, or None."""
        ...

    def drop_gradient(self, name: str) -> None:
        """Forget that sum, as if no backward had made it."""
        ...

    def trains(self, name: str) -> bool:
        """Whether it has a state."""
        ...


class OffloadedParameter(nn.Parameter):
    """See above. Made of a parameter by `offload_parameter`."""

    weight: str  # its name
    lender: Lender

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        told = getattr(func, "__name__", "")
        name = func.__self__.__name__ if told in ("__get__", "__set__") else told  # type: ignore[attr-defined]
        found = list(dict.fromkeys(_offloaded((args, kwargs))))
        if told == "__set__":
            _refuse_setting(name, *args)
        elif told == "__get__" and name == "grad":
            return args[0].lender.gradient(args[0].weight)
        elif name == "to" and isinstance(args[0], OffloadedParameter) and not _changes(*args, **kwargs):
            return args[0]
        elif name == "requires_grad_":
            _refuse_setting("requires_grad", args[0], *(args[1:] or (kwargs.get("requires_grad", True),)))
        elif name not in FACTS:
            _refuse_writing(name, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass(), found[0].lender.lend([one.weight for one in found]):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UserError(f"{self.weight} belongs to an offloaded model, which cannot be copied: load another")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError(f"{self.weight} belongs to an offloaded model, which cannot be pickled: use session.save")


def offload_parameter(parameter: nn.Parameter, name: str, lender: Lender) -> None:
    """Make it one whose values `lender` brings."""
    parameter.__class__ = OffloadedParameter
    parameter.weight, parameter.lender = name, lender  # type: ignore[attr-defined]


def _offloaded(values: Any) -> Iterator[OffloadedParameter]:
    """Those among an operation's arguments, in lists too."""
    for value in values:
        if isinstance(value, OffloadedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _offloaded(value)
        elif isinstance(value, dict):
            yield from _offloaded(value.values())


def _changes(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether `tensor.to(...)` would be another tensor."""
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch._C.DisableTorchFunctionSubclass():  # it may be given another offloaded parameter, `to(other)`
        return probe.to(*args, **kwargs) is not probe


def _refuse_setting(name: str, parameter: OffloadedParameter, value: Any) -> None:
    if name == "grad" and value is None:
        parameter.lender.drop_gradient(parameter.weight)
    if name == "grad" and value is not None:
        raise UserError(f"{parameter.weight}: gradients come from backward(); they cannot be set")
    if name == "requires_grad" and value and not parameter.lender.trains(parameter.weight):
        raise UserError(f"{parameter.weight} was frozen when the model was offloaded, and has no optimizer state")
    if name == "data" and value is not parameter:
        raise UserError(
            f"{parameter.weight} keeps its device, its dtype and its values: an offloaded model can be neither moved "
            "nor converted. Name the dtype where it is loaded"
        )


def _refuse_writing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    for target in (args[:1] if changes else ()) + (kwargs.get("out"),):
        if isinstance(target, OffloadedParameter):
            raise UserError(
                f"{name} would write to {target.weight}, whose master is elsewhere, and the next step would undo it: "
                "change weights before the model is offloaded, or go on from a save with session.resume"
            )
