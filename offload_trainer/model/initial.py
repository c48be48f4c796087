"""Random initial weights, one block at a time, bit for bit those of transformers.

    torch.manual_seed(seed); AutoModelForCausalLM.from_config(config, dtype=torch.float32)

on a CPU draws every weight twice: in the constructors, then in `init_weights`, which each transformers model inside
calls at the end of its own constructor. A twin on the meta device takes the same path and notes the random
operations on the way. Then, phase by phase, the constructors' numbers are drawn and thrown away, and one unit after
the other (a block, or a module outside the blocks) gets memory, is initialised by the model's own code, is handed
over and loses its memory. So no model is ever whole in host memory, and the weights do not depend on where they
are going to live.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from offload_trainer.errors import TrainerError

NamedTensor = tuple[str, torch.Tensor]
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class _NoteRandomOperations(TorchDispatchMode):
    """Collects the random operations on meta tensors, cut into phases by calls of `init_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], object]] = []
        self.phases: list[tuple[list[Callable[[], object]], PreTrainedModel]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor):
            on_cpu = dict(kwargs, device=torch.device("cpu")) if "device" in kwargs else kwargs
            self.operations.append(lambda: func(*tree_map(_with_memory, args), **tree_map(_with_memory, on_cpu)))
        return result

    def end_phase(self, model: PreTrainedModel) -> None:
        self.phases.append((self.operations, model))
        self.operations = []
        model.tie_weights(recompute_mapping=False)


class _RefuseWritesToMeta(TorchDispatchMode):
    """Initialisation that reaches a tensor without memory would be lost without a word."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and _is_meta(args[0]):
            raise TrainerError(
                "this architecture initialises a weight outside its own block; random weights cannot be made "
                "unit by unit for it. Save a randomly initialised model with transformers and pass its directory."
            )
        return func(*args, **(kwargs or {}))


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _with_memory(value: Any) -> Any:
    """A tensor of its own to draw into; `torch.normal` makes one with memory whatever the device is."""
    return torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value


@dataclass
class _Generator:
    """The CPU's random state of this initialisation, apart from the program's own."""

    state: torch.Tensor

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)


def meta_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without memory, fp32, its ties in place."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def tied_names(model: PreTrainedModel) -> frozenset[str]:
    """Names that stand for a parameter which another name already stands for."""
    ties = model.all_tied_weights_keys
    return frozenset(
        target for target, source in ties.items() if model.get_parameter(target) is model.get_parameter(source)
    )


def first_names(model: PreTrainedModel) -> dict[str, str]:
    """Every name of every parameter -> the first of that parameter's names, which is the one that stands for it.

    It may be the one that transformers counts as tied: a head that comes before its body.
    """
    firsts = {parameter: name for name, parameter in model.named_parameters()}
    return {name: firsts[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def initial_weights(config: Any, *, seed: int, trust_remote_code: bool = False) -> Iterator[NamedTensor]:
    """Yield each parameter's name and its initial value (fp32, on the CPU), tied ones once.

    Raises TrainerError for an architecture that leaves weights to its constructors or initialises across blocks.
    """
    generator = _Generator(torch.Generator().manual_seed(seed).get_state())
    with _NoteRandomOperations() as noted, _calling(noted.end_phase):
        twin = meta_model(config, trust_remote_code=trust_remote_code)
    names = {module: name for name, module in twin.named_modules()}
    skip, firsts = tied_names(twin), first_names(twin)
    initialised: set[nn.Module] = set()
    for constructors, model in noted.phases:
        with generator.active():
            for draw in constructors:
                draw()
        for unit, initialise in _units(model, prefix=names[model], skip=initialised):
            with generator.active(), torch.no_grad(), guard_torch_init_functions(), _RefuseWritesToMeta():
                initialise()
            for name, value in unit.items():
                if name in skip:
                    continue
                if value.isnan().any():
                    raise TrainerError(f"transformers gives {name} no initial value of its own; train it from weights")
                yield firsts[name], value
        initialised.add(model)


@contextmanager
def _calling(replacement: Callable[[PreTrainedModel], None]) -> Iterator[None]:
    """`init_weights` of every model does this instead."""
    original = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = lambda model: replacement(model)
    try:
        yield
    finally:
        PreTrainedModel.init_weights = original


Unit = tuple[dict[str, torch.Tensor], Callable[[], None]]


def _units(model: PreTrainedModel, *, prefix: str, skip: set[nn.Module]) -> Iterator[Unit]:
    """Units in the order that transformers initialises in (children first), each with memory while it is out.

    `skip` holds models inside this one that have been initialised already.
    """
    blocks = tuple(model._no_split_modules or ())

    def walk(module: nn.Module, name: str, owner: PreTrainedModel) -> Iterator[Unit]:
        if module in skip:
            return
        if type(module).__name__ in blocks:
            yield from out(dict(module.named_modules(prefix=name)), lambda: _initialise_tree(module, owner))
            return
        for child_name, child in module.named_children():
            inner = child if isinstance(child, PreTrainedModel) else owner
            yield from walk(child, f"{name}.{child_name}" if name else child_name, inner)
        yield from out({name: module}, lambda: owner._initialize_weights(module))

    def out(modules: dict[str, nn.Module], initialise: Callable[[], None]) -> Iterator[Unit]:
        without = {module: dict(module._parameters) for module in modules.values()}
        tensors = {}
        for name, module in modules.items():
            tensors.update(_give_memory(module, prefix=f"{name}." if name else ""))
        yield tensors, initialise
        for module, parameters in without.items():
            module._parameters.update(parameters)

    yield from walk(model, prefix, model)


def _give_memory(module: nn.Module, *, prefix: str) -> dict[str, torch.Tensor]:
    """Memory for a module's own parameters and buffers. NaN marks what nobody has set.

    torch's norms begin with what their constructors give them, ones and zeros, which some models leave as it is.
    """
    given: dict[str, torch.Tensor] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            filled = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
            module._parameters[name] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
            given[prefix + name] = filled
    if isinstance(module, _NORMS):
        module.reset_parameters()
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    return given


def _initialise_tree(module: nn.Module, owner: PreTrainedModel) -> None:
    for child in module.children():
        _initialise_tree(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._initialize_weights(module)


class parameters_without_memory:
    """Parameters made inside go to the meta device, everything else where it belongs."""

    def __enter__(self) -> None:
        self._register = torch.nn.Module.register_parameter

        def without_memory(module: torch.nn.Module, name: str, parameter: Any) -> None:
            if parameter is not None:
                parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            self._register(module, name, parameter)

        torch.nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        torch.nn.Module.register_parameter = self._register  # type: ignore[method-assign]
