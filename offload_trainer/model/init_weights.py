"""Draw random initial weights one block at a time, bit for bit as transformers does on a CPU.

transformers draws every weight twice: in the constructors, and in `init_weights`, which each inner model calls at the
end of its constructor. This module builds the model on the meta device and records the random operations. Then it
repeats them phase by phase: the constructors' numbers are drawn and discarded, and each unit (a block, or a module
outside the blocks) gets memory, is initialised by the model's own code, is yielded, and is freed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from offload_trainer.common.errors import TrainerError
from offload_trainer.model.images import auto_class

NamedTensor = tuple[str, torch.Tensor]
Unit = tuple[dict[str, torch.Tensor], Callable[[], None]]
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class _NoteRandomOperations(TorchDispatchMode):
    """Record random operations on meta tensors, in phases that calls of `init_weights` end."""

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
    """Refuse writes to meta tensors, because such an initialisation would be lost silently."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta":
            raise TrainerError(
                "this architecture initialises a weight outside its own block; random weights cannot be made "
                "unit by unit for it. Save a randomly initialised model with transformers and pass its directory."
            )
        return func(*args, **(kwargs or {}))


def _with_memory(value: Any) -> Any:
    """Return a CPU tensor to draw into in place of a meta tensor, and any other value unchanged."""
    return torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value


def meta_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model on the meta device in fp32, with tied weights tied."""
    own = copy.deepcopy(config)
    with torch.device("meta"):
        return auto_class(config).from_config(own, dtype=torch.float32, trust_remote_code=trust_remote_code)


def tied_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of parameters that are tied to another name."""
    ties, get = model.all_tied_weights_keys, model.get_parameter
    return frozenset(target for target, source in ties.items() if get(target) is get(source))


def first_names(model: PreTrainedModel) -> dict[str, str]:
    """Map every parameter name to the first registered name of the same parameter, which may be the tied one."""
    firsts = {parameter: name for name, parameter in model.named_parameters()}
    return {name: firsts[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def initial_weights(config: Any, *, seed: int, trust_remote_code: bool = False) -> Iterator[NamedTensor]:
    """Yield each parameter's name and initial value (fp32, on the CPU); tied parameters once.

    Raises TrainerError if the architecture leaves weights to constructors, or initialises weights outside their block.
    """
    state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def own_generator() -> Iterator[None]:
        """Draw from the generator of this initialisation, which is separate from the program's."""
        nonlocal state
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield
            state = torch.get_rng_state()

    noted = _NoteRandomOperations()
    with noted, patch.object(PreTrainedModel, "init_weights", lambda model: noted.end_phase(model)):
        twin = meta_model(config, trust_remote_code=trust_remote_code)
    names = {module: name for name, module in twin.named_modules()}
    skip, firsts = tied_names(twin), first_names(twin)
    initialised: set[nn.Module] = set()
    for constructors, model in noted.phases:
        with own_generator():
            for draw in constructors:
                draw()
        for unit, initialise in _units(model, prefix=names[model], skip=initialised):
            with own_generator(), torch.no_grad(), guard_torch_init_functions(), _RefuseWritesToMeta():
                initialise()
            for name, value in unit.items():
                if name in skip:
                    continue
                if value.isnan().any():
                    raise TrainerError(f"transformers gives {name} no initial value of its own; train it from weights")
                yield firsts[name], value
        initialised.add(model)


def _units(model: PreTrainedModel, *, prefix: str, skip: set[nn.Module]) -> Iterator[Unit]:
    """Yield units but those in `skip` in transformers' order (children first); each has memory while it is yielded."""
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
        tensors: dict[str, torch.Tensor] = {}
        for name, module in modules.items():
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                parameter.detach().fill_(torch.nan)  # marks unset values
            if isinstance(module, _NORMS):  # some models do not overwrite the ones and zeros of their constructors
                module.reset_parameters()
            own = module.named_parameters(name, recurse=False, remove_duplicate=False)
            tensors |= {key: parameter.detach() for key, parameter in own}
        yield tensors, initialise
        for module, parameters in without.items():
            module._parameters.update(parameters)

    yield from walk(model, prefix, model)


def _initialise_tree(module: nn.Module, owner: PreTrainedModel) -> None:
    for child in module.children():
        _initialise_tree(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._initialize_weights(module)


def parameters_without_memory() -> AbstractContextManager[object]:
    """Create parameters on the meta device and everything else as usual inside the context."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    return patch.object(nn.Module, "register_parameter", without_memory)


def without_values(
    model: nn.Module, *, dtype: torch.dtype, device: torch.device, separate: bool = False
) -> dict[str, list[nn.Parameter]]:
    """Replace the model's parameters by NaN that takes no memory, and return them by weight name.

    A tied weight stays one parameter, or is `separate` in each module, so that its gradients arrive one by one.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    made: dict[str, list[nn.Parameter]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is None:
                continue
            uses = made[names[old]]
            if separate or not uses:
                empty = torch.full((), torch.nan, dtype=dtype, device=device).expand(old.shape)
                uses.append(nn.Parameter(empty, requires_grad=old.requires_grad))
            module._parameters[key] = uses[-1]
    return made


def set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
    """Replace registered buffers of the model by `values`, moved to `device`."""
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        assert leaf in buffers, name
        buffers[leaf] = value.to(device)
