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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.loader import ModelSource, checkpoint_blocks
from offload_trainer.model.probes.tiny_model import (
    Kind,
    TrialFailed,
    modules_in_blocks,
    random_ids,
    try_on_tiny_model,
)
from offload_trainer.model.shape import block_names
from offload_trainer.offloading.recompute_hooks import keep_weights
from offload_trainer.plan.shape import Needs
from offload_trainer.plan.tiered.layout import divided

_BlockKind = tuple[str, type, frozenset[str]]
_Order = tuple[tuple[str, ...], tuple[str, ...]]  # names of weights in the order of use by forward and backward
_ROW = 24  # tokens


def with_divided_blocks(source: ModelSource) -> ModelSource:
    """Return the model with its blocks divided into submodules, or unchanged if no block can be divided."""
    names, needs = divisible_modules(meta_model(source.config, trust_remote_code=source.section.trust_remote_code))
    return replace(source, shape=divided(replace(source.shape, divisible=tuple(names), needs=tuple(needs))))


def divisible_modules(model: PreTrainedModel) -> tuple[list[str], list[Needs]]:
    """Return the names of blocks and of modules inside them whose children can be fetched separately, and their order.

    The result is empty if a tiny model of the same kind does not run.
    """

    def trial(tiny: PreTrainedModel) -> tuple[set[Kind], dict[_BlockKind, _Order]]:
        proven = _proven(tiny)
        return proven, _orders(tiny, proven) if proven else {}

    try:
        proven, orders = try_on_tiny_model(model, trial)
    except TrialFailed:
        return [], []
    needs = []
    for block in block_names(model):
        shown = orders.get(_block_kind(model, block))
        if shown is not None:  # the order is empty for a tower that text does not pass through
            needs.append(Needs(block, *(tuple(f"{block}.{inner}" for inner in order) for order in shown)))
    return [name for kind, name, _ in _with_children(model) if kind in proven], needs


def _with_children(model: PreTrainedModel) -> list[tuple[Kind, str, nn.Module]]:
    """Return (kind, name, module) of blocks and of modules inside blocks that have children with weights."""
    return [found for found in modules_in_blocks(model) if _children(found[2])]


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


@torch.no_grad()
def _proven(tiny: PreTrainedModel) -> set[Kind]:
    """Return the kinds of modules whose children can be present one at a time, alone and together."""
    ids = random_ids(tiny, 2, _ROW)

    def logits() -> Any:
        return tiny(input_ids=ids, use_cache=False).logits

    whole, every = logits(), _with_children(tiny)
    if not bool(whole.isfinite().all()):
        return set()

    def passes(parts: Sequence[nn.Module]) -> bool:
        with _one_at_a_time(parts):
            return torch.equal(logits(), whole)

    proven = set[Kind]()
    for kind in dict.fromkeys(kind for kind, _, _ in every):
        if passes([child for its, _, module in every if its == kind for child in _children(module)]):
            proven.add(kind)
    divisible = {module for kind, _, module in every if kind in proven}

    def finest(module: nn.Module) -> list[nn.Module]:
        if module not in divisible:
            return [module]
        return [part for child in _children(module) for part in finest(child)]

    together = [part for name in block_names(tiny) for part in finest(tiny.get_submodule(name))]
    return proven if passes(together) else set()


@dataclass(frozen=True)
class _Saved:
    """A weight that autograd has saved for the backward."""

    name: str
    values: torch.Tensor


class _Needed:
    """Record the names of weights inside blocks in the order in which they are used."""

    def __init__(self, tiny: PreTrainedModel, divisible: set[nn.Module]) -> None:
        below = tuple(f"{block}." for block in block_names(tiny))
        self._names = {weight.data_ptr(): name for name, weight in tiny.named_parameters() if name.startswith(below)}
        self._divisible = divisible
        self.names: list[str] = []
        for module in {module: None for _, _, module in modules_in_blocks(tiny)}:
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


def _orders(tiny: PreTrainedModel, proven: set[Kind]) -> dict[_BlockKind, _Order]:
    """Return, for each kind of block, the order in which its weights are used.

    The backward includes the recomputation of blocks that are checkpointed.
    """
    tiny.train()
    needed = _Needed(tiny, {module for kind, _, module in _with_children(tiny) if kind in proven})
    if tiny.supports_gradient_checkpointing:
        checkpoint_blocks(tiny, reentrant=False)
        keep_weights(tiny, needed)
    ids = random_ids(tiny, 2, _ROW)
    with saved_tensors_hooks(needed.pack, needed.unpack):
        loss = tiny(input_ids=ids, use_cache=False).logits.sum()
    forward, needed.names = needed.names, []
    loss.backward()
    return {
        _block_kind(tiny, block): (_inside(block, forward), _inside(block, needed.names)) for block in block_names(tiny)
    }


def _inside(block: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix(f"{block}.") for name in names if name.startswith(f"{block}."))


def _block_kind(model: nn.Module, block: str) -> _BlockKind:
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

    def unload(part: nn.Module) -> None:
        for weight, values in held[part]:
            weight.data = values.new_full((1,), torch.nan).expand(values.shape)

    def load(part: nn.Module) -> None:
        if there == [part]:
            return
        for other in there:
            unload(other)
        there[:] = [part]
        for weight, values in held[part]:
            weight.data = values

    hooks = [
        module.register_forward_pre_hook(lambda *_, part=part: load(part))
        for part in parts
        for module in part.modules()
    ]
    try:
        for part in parts:
            unload(part)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weights in held.values():
            for weight, values in weights:
                weight.data = values
