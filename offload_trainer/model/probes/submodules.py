"""Probe which modules of a model's blocks can be fetched one child at a time (`tiered.fetch_granularity=module`).

If attention and MLP of a block use only their own weights, only one of the two needs its weights on the device at any
time. No list of names tells which modules qualify, because some code reads a child's weight without calling the child
(the convolution of a Mamba mixer, an output projection inside attention). So this runs a tiny model of the same kind
(tiny_model.py) with one child's weights present at a time and NaN in all others:

    alone      each module inside a block that has children with weights, in all blocks of the same kind
    together   all modules that passed, divided as finely as possible

A module qualifies if the logits equal those of the whole model to the last bit. A forward and a backward with
checkpointed blocks then record the order in which weights are used, from which the plan counts fetches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.loader import ModelSource, block_names, checkpoint_blocks
from offload_trainer.model.probes.tiny_model import twin_model
from offload_trainer.offloading.recompute_hooks import keep_weights
from offload_trainer.plan.shape import Needs
from offload_trainer.plan.tiered.layout import divided

_Kind = tuple[type, str, type]  # class of the block, name of the module in it, class of the module
_Made = tuple[str, type, frozenset[str]]
_ROW = 24  # tokens


def in_parts(source: ModelSource) -> ModelSource:
    """Return the model with its blocks divided into submodules, or unchanged if no block can be divided."""
    trusted = source.section.trust_remote_code
    model = meta_model(source.config, trust_remote_code=trusted)
    names, needs = apart(model, block_names, trust_remote_code=trusted)
    return replace(source, shape=divided(replace(source.shape, apart=tuple(names), needs=tuple(needs))))


def apart(
    model: PreTrainedModel, blocks: Callable[[nn.Module], Sequence[str]], *, trust_remote_code: bool
) -> tuple[list[str], list[Needs]]:
    """Return the names of blocks and of modules inside them whose children can be fetched separately, and their order.

    The result is empty if a tiny model of the same kind does not run. `blocks` returns the names of a model's blocks.
    """
    try:
        with twin_model(model, trust_remote_code=trust_remote_code) as twin:
            proven = _proven(twin, blocks(twin))
            orders = _orders(twin, blocks(twin), proven) if proven else {}
    except Exception:  # transformers' code may raise anything for an unusual configuration
        return [], []
    names = [name for kind, name in _with_children(model, blocks(model)) if kind in proven]
    needs = []
    for block in blocks(model):
        shown = orders.get(_made(model, block))
        if shown is not None:  # the order is empty for a tower that text does not pass through
            needs.append(Needs(block, *(tuple(f"{block}.{inner}" for inner in order) for order in shown)))
    return names, needs


def _with_children(model: nn.Module, blocks: Sequence[str]) -> list[tuple[_Kind, str]]:
    """Return the kind and name of each block, and of each module inside a block, that has children with weights."""
    found = []
    for name in blocks:
        block = model.get_submodule(name)
        for inner, module in block.named_modules():
            if _children(module):
                found.append(((type(block), inner, type(module)), f"{name}.{inner}" if inner else name))
    return found


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


@torch.no_grad()
def _proven(twin: PreTrainedModel, blocks: Sequence[str]) -> set[_Kind]:
    ids = torch.randint(5, twin.config.get_text_config().vocab_size - 5, (2, _ROW))

    def logits() -> Any:
        return twin(input_ids=ids, use_cache=False).logits

    whole, every = logits(), _with_children(twin, blocks)
    if not bool(whole.isfinite().all()):
        return set()

    def passes(parts: Sequence[nn.Module]) -> bool:
        with _one_at_a_time(parts):
            return torch.equal(logits(), whole)

    proven = set[_Kind]()
    for kind in dict.fromkeys(kind for kind, _ in every):
        alike = [twin.get_submodule(name) for its, name in every if its == kind]
        if passes([child for module in alike for child in _children(module)]):
            proven.add(kind)
    divisible = _divisible(twin, blocks, proven)
    finest = [part for name in blocks for part in _finest(twin.get_submodule(name), divisible)]
    return proven if passes(finest) else set()


def _divisible(twin: PreTrainedModel, blocks: Sequence[str], proven: set[_Kind]) -> set[nn.Module]:
    return {twin.get_submodule(name) for kind, name in _with_children(twin, blocks) if kind in proven}


def _finest(module: nn.Module, divisible: set[nn.Module]) -> list[nn.Module]:
    if module not in divisible:
        return [module]
    return [part for child in _children(module) for part in _finest(child, divisible)]


@dataclass(frozen=True)
class _Saved:
    """A weight that autograd has saved for the backward."""

    name: str
    values: torch.Tensor


class _Needed:
    """Record the names of weights inside blocks in the order in which they are used."""

    def __init__(self, twin: PreTrainedModel, blocks: Sequence[str], divisible: set[nn.Module]) -> None:
        below = tuple(f"{block}." for block in blocks)
        self._names = {weight.data_ptr(): name for name, weight in twin.named_parameters() if name.startswith(below)}
        self._divisible = divisible
        self.names: list[str] = []
        for module in {module: None for block in blocks for module in twin.get_submodule(block).modules()}:
            module.register_forward_pre_hook(self.run)

    def run(self, module: nn.Module, _: Any) -> None:
        """Record a module's own weights, and all weights below it if it cannot be divided."""
        found = (self._names.get(weight.data_ptr()) for weight in module.parameters(module not in self._divisible))
        self.names.extend(name for name in found if name)

    def reference_of(self, tensor: torch.Tensor) -> _Saved | None:
        name = self._names.get(tensor.untyped_storage().data_ptr())
        return _Saved(name, tensor.detach()) if name else None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        return self.reference_of(tensor) or tensor.detach()

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        self.names.append(saved.name)
        return saved.values


def _orders(
    twin: PreTrainedModel, blocks: Sequence[str], proven: set[_Kind]
) -> dict[_Made, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return, for each kind of block, the names of its weights in the order of use by a forward and by a backward.

    The backward includes the recomputation of blocks that are checkpointed.
    """
    twin.train()
    needed = _Needed(twin, blocks, _divisible(twin, blocks, proven))
    if twin.supports_gradient_checkpointing:
        checkpoint_blocks(twin, reentrant=False)
        keep_weights(twin, needed)
    ids = torch.randint(5, twin.config.get_text_config().vocab_size - 5, (2, _ROW))
    with saved_tensors_hooks(needed.pack, needed.unpack):
        loss = twin(input_ids=ids, use_cache=False).logits.sum()
    forward, needed.names = needed.names, []
    loss.backward()
    return {_made(twin, block): (_inside(block, forward), _inside(block, needed.names)) for block in blocks}


def _inside(block: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix(f"{block}.") for name in names if name.startswith(f"{block}."))


def _made(model: nn.Module, block: str) -> _Made:
    """Return a key that blocks of one kind share: the module list, the class, and the names of the weights.

    The list matters because two lists of the same class may run differently: one of Blt's runs without gradients.
    """
    module = model.get_submodule(block)
    return re.sub(r"\.\d+", "", block), type(module), frozenset(name for name, _ in module.named_parameters())


@contextmanager
def _one_at_a_time(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Keep the weights of only one of `parts` at a time: of the one that runs, or ran last."""
    held = {part: [(weight, weight.data) for weight in part.parameters()] for part in parts}
    there: list[nn.Module] = []

    def bring(part: nn.Module) -> None:
        if there == [part]:
            return
        for other in there:
            _send_away(held[other])
        there[:] = [part]
        for weight, values in held[part]:
            weight.data = values

    hooks = [
        module.register_forward_pre_hook(lambda *_, part=part: bring(part))
        for part in parts
        for module in part.modules()
    ]
    try:
        for part in parts:
            _send_away(held[part])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weights in held.values():
            for weight, values in weights:
                weight.data = values


def _send_away(weights: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for weight, values in weights:
        weight.data = values.new_full((1,), torch.nan).expand(values.shape)
