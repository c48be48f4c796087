"""Probe which modules of a model's blocks are position-wise, so that they can run on pieces of a row (tiled_mlp.py).

A module is position-wise if a token's output is the same alone, in a piece, and in a whole row. No list of names tells
which modules are: some MLPs use the previous token (RWKV), experts may have a capacity limit, a router's logits may be
used elsewhere. So this tries a tiny model of the same kind (tiny_model.py):

    candidates   modules in a block with at least two matrices that map one tensor to one of the same shape
    alone        outputs and all gradients, on a row and on pieces down to single tokens; also on a row that repeats one
                 token, which sends everything to the same experts
    together     the model's loss and all gradients, with all modules that passed in pieces and without

A module qualifies if it passes in all blocks of its kind. If qualifying modules are nested, the outermost is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offload_trainer.model.activations import count_activations
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
from offload_trainer.model.tiled_mlp import tile
from offload_trainer.storage.tensorfile import DTYPES

_EQUAL = 1e-4  # limit for equality in fp32, relative to the largest element
_ROW, _ALIKE = 2 * 23, 2 * 160  # tokens of the row with different tokens, and of the row that repeats one
_Named = tuple[Kind, str]  # kind and name of a module


def with_tiles(source: ModelSource) -> ModelSource:
    """Return the model with its tiles and their memory filled in, or unchanged if no module qualifies."""
    shape, model = source.shape, meta_model(source.config, trust_remote_code=source.section.trust_remote_code)
    names, again = tileable(model)
    if not names:
        return source
    trained = {weight.name for weight in shape.weights if weight.trainable}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    how: dict[str, Any] = {"whole_logits": shape.whole_logits, "packed": shape.packed, "tiles": names}
    on_gpu = on_cpu = None
    if shape.on_gpu is not None:
        with suppress(Exception):  # an architecture's code may raise anything
            dtype = DTYPES[source.section.dtype]
            counted = count_activations(model, block_names(model), dtype=dtype, **how)
            on_gpu, on_cpu = counted.on_gpu, counted.on_cpu
    found = replace(shape, tiles=tuple(names), tiles_again=tuple(again), tiled_on_gpu=on_gpu, tiled_on_cpu=on_cpu)
    return replace(source, shape=found)


def tileable(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of modules that can run on pieces of a row, and of those that a recomputation runs again.

    Both are empty if a tiny model of the kind does not run.
    """

    def trial(tiny: PreTrainedModel) -> tuple[list[_Named], list[_Named]]:
        tiny.train()
        for module in tiny.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        proven = _proven(tiny)
        return proven, _recomputed(tiny, proven)

    try:
        passed = try_on_tiny_model(model, trial, all_classes=False)
    except TrialFailed:
        return [], []
    proven, again = ({kind for kind, _ in found} for found in passed)
    inside = [(kind, name) for kind, name, _ in modules_in_blocks(model)]
    return [name for kind, name in inside if kind in proven], [name for kind, name in inside if kind in again]


def _proven(tiny: PreTrainedModel) -> list[_Named]:
    """Return the position-wise modules in blocks that pass alone, in all blocks of a kind, and together."""
    ids = random_ids(tiny, 2, _ROW // 2)
    every = [(kind, name, module) for kind, name, module in modules_in_blocks(tiny) if kind[1]]
    called = _called(tiny, [name for _, name, _ in every], ids)
    failed, passed = set[Kind](), list[_Named]()
    for kind, name, module in every:
        calls = called[name]
        within = any(name.startswith(f"{outer}.") for _, outer in passed)
        if within or not calls or sum(weight.dim() > 1 for weight in module.parameters()) < 2:
            continue
        if len(calls) == 1 and calls[0] and _alone(module, calls[0]):
            passed.append((kind, name))
        else:
            failed.add(kind)
    passed = [(kind, name) for kind, name in passed if kind not in failed]
    return passed if passed and _together(tiny, [name for _, name in passed], ids) else []


def _called(tiny: PreTrainedModel, names: Sequence[str], ids: torch.Tensor) -> dict[str, list[torch.Size | None]]:
    """Return each module's calls in a forward: the shape that its single input and output share, or None."""
    calls: dict[str, list[torch.Size | None]] = {name: [] for name in names}

    def noted(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = (*args, *kwargs.values())
            tensors = len(given) == 1 and isinstance(given[0], torch.Tensor) and isinstance(output, torch.Tensor)
            same = tensors and given[0].is_floating_point() and given[0].shape == output.shape
            calls[name].append(output.shape if same and output.dim() in (2, 3) else None)

        return hook

    hooks = [tiny.get_submodule(name).register_forward_hook(noted(name), with_kwargs=True) for name in names]
    with torch.no_grad():
        tiny(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _alone(module: nn.Module, shape: torch.Size) -> bool:
    """Return whether pieces of rows give the results of whole rows, forward and backward; `shape` is the input's."""
    different = torch.randn(2, _ROW // 2, shape[-1])
    alike = torch.randn(shape[-1]).expand(2, _ALIKE // 2, -1).contiguous()
    with suppress(Exception):  # the module may require a certain row length
        for x, chunk in ((different, 1), (different, 7), (alike, 64)):
            x = (x.flatten(0, 1) if len(shape) == 2 else x).requires_grad_()
            weight, weights = torch.randn_like(x), [x, *_trained(module)]
            whole = _gradients((module(x) * weight).sum(), weights)
            with _in_pieces([module], chunk):
                if not _same(whole, _gradients((module(x) * weight).sum(), weights)):
                    return False
        return True
    return False


def _together(tiny: PreTrainedModel, names: Sequence[str], ids: torch.Tensor) -> bool:
    """Return whether the model's loss, including the routers', and all gradients are the same with all in pieces."""
    weights = _trained(tiny)

    def found() -> list[torch.Tensor]:
        return _gradients(tiny(input_ids=ids, labels=ids, use_cache=False).loss, weights)

    whole = found()
    with _in_pieces([tiny.get_submodule(name) for name in names], 7):
        return _same(whole, found())


def _recomputed(tiny: PreTrainedModel, parts: Sequence[_Named]) -> list[_Named]:
    """Return the modules that run again in the recomputation of a checkpointed block.

    The recomputation stops before a module whose output nothing in the block saves. Such modules run once in the
    forward and once in the backward.
    """
    if not parts or not tiny.supports_gradient_checkpointing:
        return []
    checkpoint_blocks(tiny, reentrant=False)
    ids, tokens = random_ids(tiny, 1, _ROW), dict.fromkeys(parts, 0)

    def counted(part: _Named) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            if (count := output.shape[:-1].numel()) < _ROW:
                tokens[part] += count

        return hook

    hooks = [tiny.get_submodule(part[1]).register_forward_hook(counted(part), with_kwargs=True) for part in parts]
    with _in_pieces([tiny.get_submodule(name) for _, name in parts], 7):
        tiny(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for hook in hooks:
        hook.remove()
    return [part for part in parts if tokens[part] > 2 * _ROW]


@contextmanager
def _in_pieces(modules: Sequence[nn.Module], chunk: int) -> Iterator[None]:
    for module in modules:
        tile(module, chunk=chunk)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _trained(module: nn.Module) -> list[torch.Tensor]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _gradients(value: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the value and its gradients; zeros for weights that it does not depend on."""
    found = torch.autograd.grad(value, weights, allow_unused=True)
    return [value.detach(), *(torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True))]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Compare tensors relative to their largest element, at least 1 % of the largest of all. NaN is never equal."""
    largest = max(float(values.abs().max()) for values in one if values.numel())
    bounds = [_EQUAL * max(float(v.abs().max()) if v.numel() else 0.0, largest / 100) for v in one]
    return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in zip(one, other, bounds, strict=True))
