"""Make an offloaded model's parameters usable in user code: reads fetch the values, writes raise UserError.

A parameter stays the same object; its class becomes `OffloadedParameter`. A tensor that shares its memory (a view,
`detach()`, `.data`) becomes a `ParameterView`, which reads what its parameter holds now. torch calls
`__torch_function__` of both before each operation. Most writes are recognised by the operation's schema before it runs,
the others by the version counter, after which every use is refused. Memory that leaves torch cannot be tracked, so
NumPy gets read-only copies, and storages and DLPack are refused.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from offload_trainer.common.errors import UserError
from offload_trainer.offloading.autograd import not_compiled, refuse_recording, version_of

if TYPE_CHECKING:
    from offload_trainer.offloading.model import OffloadedModel

_is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]

# Operations that expose a tensor's memory outside torch.
_RAW_MEMORY = frozenset(
    ["storage", "_typed_storage", "__dlpack__", "__cuda_array_interface__", "_lazy_clone", "slice_inverse"]
)

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

# Attributes and methods that do not need a parameter's values.
FACTS = frozenset(
    [
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf",
        "grad_fn", "output_nr", "names", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps",
        "is_xpu", "retains_grad", "_version", "_backward_hooks", "_has_compatible_shallow_copy_type", "size",
        "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous",
        "is_floating_point", "is_complex", "get_device", "is_tensor", "is_inference", "is_same_size",
        "register_hook", "retain_grad", "register_post_accumulate_grad_hook", "__hash__", "__len__", "_is_view",
        "is_signed", "is_shared", "has_names",
    ]
)  # fmt: skip


def _refusing(name: str) -> Any:
    """Return a property whose setter raises, because torch does not call `__torch_function__` for these setters."""
    attribute = getattr(torch.Tensor, name)
    return property(attribute.__get__, lambda one, value: _refuse_setting(name, one, value))


# torch does not call `__torch_function__` for `set_`, `as_subclass` and `_use_count`, which only
# torch.utils.swap_tensors calls, at its start. `_METHODS` are those of both classes.


def _detached(one: Shared) -> Any:
    # torch's parametrizations make new parameters. nn.Parameter would accept a view, and refuse an offloaded parameter
    # with advice for authors of tensor subclasses.
    if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
        raise UserError(
            f"a new nn.Parameter would share the memory of {_parameter_of(one).weight}, which holds its values only "
            "for a moment: apply weight_norm and other parametrizations before the model is offloaded, or make the "
            "parameter of a copy, parameter.detach().clone()"
        )
    return torch.Tensor.detach(one)


def _refuse_swapping(one: Shared) -> NoReturn:
    raise UserError(
        f"{_parameter_of(one).weight} belongs to an offloaded model, and cannot be swapped with another tensor: change "
        "the model before it is offloaded"
    )


_METHODS: Any = (
    _detached,
    lambda one, *_, **__: refuse_write("set_", _parameter_of(one)),
    lambda one, _: _refuse_giving("as_subclass", _parameter_of(one)),
    _refuse_swapping,
)


class OffloadedParameter(nn.Parameter):
    """A parameter of an offloaded model; `offload_parameter` converts a parameter to this class."""

    weight: str  # name of the weight
    provider: OffloadedModel
    version: int  # expected version counter; a larger one means that the parameter was written to
    real, imag = _refusing("real"), _refusing("imag")
    __torch_function__: Any = classmethod(lambda _, func, types, args=(), kwargs=None: _run(func, args, kwargs or {}))
    detach, set_, as_subclass, _use_count = _METHODS

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UserError(f"{self.weight} belongs to an offloaded model, which cannot be copied: load another")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError(f"{self.weight} belongs to an offloaded model, which cannot be pickled: use session.save")


class ParameterView(torch.Tensor):
    """A tensor that shares a parameter's memory, also after the parameter's values have moved."""

    parameter: OffloadedParameter
    start: int  # byte offset from the start of the parameter
    real, imag = _refusing("real"), _refusing("imag")
    __torch_function__: Any = classmethod(lambda _, func, types, args=(), kwargs=None: _run(func, args, kwargs or {}))
    detach, set_, as_subclass, _use_count = _METHODS

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.clone(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, **words: Any) -> Any:  # type: ignore[override]
        return repr(self.clone())


Shared = OffloadedParameter | ParameterView
_SHARED = frozenset([OffloadedParameter, ParameterView])  # use `type(x) in`: isinstance calls a slow metaclass


def offload_parameter(parameter: nn.Parameter, name: str, provider: OffloadedModel) -> None:
    """Convert the parameter in place to an `OffloadedParameter`, whose values `provider` fetches."""
    version = parameter._version
    parameter.__class__ = OffloadedParameter
    parameter.weight, parameter.provider, parameter.version = name, provider, version  # type: ignore[attr-defined]


def refuse_written(parameters: Iterable[nn.Parameter]) -> None:
    """Raise UserError if one of the parameters was written to."""
    for parameter in parameters:
        if isinstance(parameter, OffloadedParameter) and version_of(parameter) != parameter.version:
            _raise_written(parameter)


def forget_writes(parameters: Iterable[nn.Parameter]) -> None:
    """Accept earlier writes, because all parameters have been loaded with new values."""
    for parameter in parameters:
        if isinstance(parameter, OffloadedParameter):
            parameter.version = version_of(parameter)


# -- operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    """The properties of an operation that are known before it runs."""

    name: str
    access: str  # "get" or "set" for a property, otherwise "call"
    # Arguments, by position and name: tensors or lists of them that it writes to, and `inplace` and `max_norm`, which
    # make it write to its weight.
    writes: Sequence[tuple[int, str]] = ()
    writes_if_set: Sequence[tuple[int, str]] = ()


_ACCESS = {"__get__": "get", "__set__": "set", "__delete__": "set"}
_WRITING_METHODS = re.compile(r"__i(add|sub|mul|matmul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
_KEYWORD_ONLY = -1  # position of a keyword-only argument


@cache
def _operation(func: Callable[..., Any]) -> _Operation:
    name = getattr(func, "__name__", repr(func))
    if name in _ACCESS:
        return _Operation(func.__self__.__name__, _ACCESS[name])  # type: ignore[attr-defined]
    schemas: Iterable[Any]  # schemas of all possible overloads
    if isinstance(func, torch._ops.OpOverload):
        schemas = [func._schema]
    elif isinstance(func, torch._ops.OpOverloadPacket):
        schemas = func._schemas.values()
    else:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    writes = [(_KEYWORD_ONLY, "out")]
    for schema in schemas:
        if schema.name not in ("aten::record_stream", "aten::retain_grad"):  # both declare a write but do not write
            writes += [
                (_KEYWORD_ONLY if argument.kwarg_only else at, argument.name)
                for at, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write and "Tensor" in str(argument.type)
            ]
    plain = name.partition(".")[0]
    if plain in ("__setitem__", "__setstate__", "set_data", "module_load") or _WRITING_METHODS.fullmatch(plain):
        writes.append((0, "self"))
    elif plain.endswith("_") and not plain.endswith("__"):
        writes += [(0, word) for word in ("self", "input", "tensor")]
    try:
        names = list(inspect.signature(func).parameters) if inspect.isfunction(func) else []
    except ValueError:  # Tensor.__ipow__ wraps a builtin that has no signature
        names = []
    writes_if_set = [(at, word) for at, word in enumerate(names) if word in ("inplace", "max_norm")]
    return _Operation(name, "call", list(dict.fromkeys(writes)), writes_if_set)


@not_compiled
def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operation = _operation(func)
    name, access = operation.name, operation.access
    if func is torch.autograd.grad:
        raise UserError("torch.autograd.grad of an offloaded model's parameters: call backward(), and read their .grad")
    if name == "__reduce_ex__":
        return type(args[0]).__reduce_ex__(*args)
    if access == "call" and name == "to" and isinstance(args[0], Shared) and not _changes(*args, **kwargs):
        return args[0]
    if access == "set":
        _refuse_setting(name, *args)
    elif access == "get" and name in ("grad", "_grad"):
        if isinstance(args[0], OffloadedParameter):
            return args[0].provider.gradient(args[0].weight)
    elif access == "get" and name == "data":
        return _run(torch.Tensor.detach, args, kwargs)  # `.data` has its own version counter, which would hide writes
    elif name == "requires_grad_":
        _refuse_setting("requires_grad", args[0], *(args[1:] or (kwargs.get("requires_grad", True),)))
    elif name not in FACTS:
        return _run_with_values(func, args, kwargs, operation)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _run_with_values(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operation: _Operation
) -> Any:
    """Run an operation that needs values: refuse writes, fetch the weights, and wrap results that share memory."""
    found: list[Shared] = []
    _collect((args, kwargs), found)
    parameters = list(dict.fromkeys(_parameter_of(one) for one in found))
    name, first = operation.name, parameters[0]
    if name.partition(".")[0] in _RAW_MEMORY:
        _refuse_giving(name, first)
    refuse_recording(first.weight)
    if isinstance(func, torch._ops.HigherOrderOperator):
        raise UserError(
            f"{first.weight} was given to torch's operator {name}, inside which weights cannot be fetched: use "
            "Python's own control flow, or give it parameter.clone()"
        )
    if _changes_nothing(operation, args, kwargs):
        return args[0]
    _refuse_writing(operation, args, kwargs)
    provider = first.provider
    if any(one.provider is not provider for one in parameters):  # each session fetches its own weights
        others = {id(one) for one in found if _parameter_of(one).provider is not provider}
        args, kwargs = tree_map(lambda one: one.clone() if id(one) in others else one, (args, kwargs))
        return _run_with_values(func, args, kwargs, operation)
    with torch._C.DisableTorchFunctionSubclass(), provider.borrow_weights([one.weight for one in parameters]):
        for one in found:
            if type(one) is ParameterView:
                _follow(one)
        result = func(*args, **kwargs)
        for parameter in parameters:
            if parameter._version != parameter.version:
                _raise_written(parameter)
            if parameter.grad_fn is not None:
                parameter.detach_().requires_grad_(True)
                raise UserError(
                    f"{name} makes {parameter.weight} itself a result, whose gradient would reach no "
                    "optimizer: use parameter.clone()"
                )
        return _guarded(result, parameters)


def _collect(values: Any, found: list[Shared]) -> None:
    """Append all offloaded parameters and views among (nested) arguments to `found`."""
    for value in values:
        if type(value) in _SHARED:
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def _parameter_of(one: Shared) -> OffloadedParameter:
    return one.parameter if type(one) is ParameterView else one  # type: ignore[return-value]


def _follow(view: ParameterView) -> None:
    """Point the view to its parameter's current memory."""
    parameter = view.parameter
    if _is_alias_of(view, parameter):
        return
    first = parameter.storage_offset() * parameter.itemsize + view.start
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(0, dtype=view.dtype, device=parameter.device)
        memory.set_(parameter.untyped_storage(), first // view.itemsize, view.size(), view.stride())
        memory = memory.conj() if view.is_conj() else memory
        view.data = torch._neg_view(memory) if view.is_neg() else memory


def _guarded(result: Any, parameters: Sequence[OffloadedParameter]) -> Any:
    """Return the result; tensors that share a parameter's memory become views, and arrays become read-only copies."""
    if type(result) is torch.Tensor:
        if result.layout in _SPARSE:  # its parts may share the memory
            _refuse_giving("a sparse tensor of it", parameters[0])
        for parameter in parameters:
            if _is_alias_of(result, parameter):
                first = parameter.storage_offset() * parameter.itemsize
                start = int(result.storage_offset() * result.itemsize - first)
                if 0 <= start <= parameter.nbytes:
                    view: Any = result
                    view.__class__ = ParameterView
                    view.parameter, view.start = parameter, start
                    break
    elif isinstance(result, list | tuple):
        for one in result:
            _guarded(one, parameters)
    elif type(result).__name__ == "ndarray":
        result = result.copy()
        result.setflags(write=False)
    return result


# -- refusals --------------------------------------------------------------------------------------------------------


def _changes(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether `tensor.to(...)` would return another tensor."""
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch._C.DisableTorchFunctionSubclass():  # the argument of `to(other)` may be an offloaded parameter
        return probe.to(*args, **kwargs) is not probe


def _refuse_setting(name: str, parameter: Shared, value: Any = None) -> None:
    """Raise UserError for setting an attribute, except `.grad = None` and other harmless values."""
    name = "grad" if name == "_grad" else name
    if isinstance(parameter, ParameterView):
        if name not in ("grad", "requires_grad"):
            refuse_write(f"setting .{name}", parameter.parameter)
        return
    if name == "grad" and value is None:
        parameter.provider.drop_gradient(parameter.weight)
    if name == "grad" and value is not None:
        raise UserError(f"{parameter.weight}: gradients come from backward(); they cannot be set")
    if name == "requires_grad" and value and parameter.weight not in parameter.provider.steps:
        raise UserError(f"{parameter.weight} was frozen when the model was offloaded, and has no optimizer state")
    if name == "data" and value is not parameter:
        raise UserError(
            f"{parameter.weight} keeps its device, its dtype and its values: an offloaded model can be neither moved "
            "nor converted. Name the dtype when it is loaded"
        )
    if name in ("real", "imag"):
        refuse_write(f"setting .{name}", parameter)


def _raise_written(parameter: OffloadedParameter) -> NoReturn:
    raise UserError(
        f"{parameter.weight} was written to in a way that could not be refused before (a view that was made before the "
        "model was offloaded, or an operation that does not declare what it writes), and its master has other values: "
        "change weights before the model is offloaded, or go on from a save with session.resume"
    )


def _refuse_giving(name: str, parameter: OffloadedParameter) -> NoReturn:
    raise UserError(
        f"{name} would give away the memory of {parameter.weight}, which holds its values only for a moment: take it "
        "of a copy, parameter.detach().clone()"
    )


def _changes_nothing(operation: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether it copies a weight to itself, or clamps it without effect, as Gemma 3n does in each forward."""
    if operation.name == "copy_" and len(args) > 1:
        return args[0] is args[1]
    if operation.name != "clamp_" or not isinstance(args[0], Shared):
        return False
    with torch.no_grad():
        return torch.equal(torch.clamp(*args, **kwargs), args[0])


def _refuse_writing(operation: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for at, name in operation.writes:
        target = args[at] if 0 <= at < len(args) else kwargs.get(name)
        for one in target if isinstance(target, list | tuple) else (target,):
            if type(one) in _SHARED:
                refuse_write(operation.name, _parameter_of(one))
    for at, name in operation.writes_if_set:
        value = args[at] if at < len(args) else kwargs.get(name)
        if value not in (None, False):
            found: list[Shared] = []
            _collect((args[:1] if name == "inplace" else args[:2], kwargs), found)
            for one in found:
                refuse_write(f"{operation.name}({name}={value})", _parameter_of(one))


def refuse_write(name: str, parameter: OffloadedParameter) -> NoReturn:
    before = "change weights before the model is offloaded, or go on from a save with session.resume"
    if name == "set_":  # torch's parametrizations call it for each weight that they are registered on
        before = f"register parametrizations and {before}"
    raise UserError(
        f"{name} would write to {parameter.weight}, whose master is elsewhere, and the next step would undo it: "
        f"{before}"
    )


# -- tensors that read their values while an operation runs -----------------------------------------------------------

_POINTERS = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
_SAME_FACTS = FACTS - {"stride", "is_contiguous"}  # strides and contiguity differ from those of the values


class LazyWeight(torch.Tensor):
    """A lazy tensor, created by `of`: a weight in a state_dict, or `.grad`, read only while an operation runs.

    Results of operations are lazy only if they share a writable one's memory.
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
            if name in _SAME_FACTS:
                return func(*args, **(kwargs or {}))
            run = partial(_run_on_read, func, args, kwargs or {})
            result, read = run()
            _write_back(read, name)
            if isinstance(result, list | tuple):
                return type(result)([_lazy(one, itemgetter(n), read, run, name) for n, one in enumerate(result)])
            return _lazy(result, lambda made: made, read, run, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


_Read = list[tuple[LazyWeight, torch.Tensor, int]]  # lazy tensors that an operation has read, values, version counters


def _run_on_read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Read]:
    """Run an operation on values, reading each lazy tensor once, including those in lists, tuples and dicts."""
    read: _Read = []

    def values_of(given: LazyWeight) -> torch.Tensor:
        if (values := next((values for stored, values, _ in read if stored is given), None)) is None:
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
