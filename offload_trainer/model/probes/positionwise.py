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

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.loader import ModelSource, block_names, checkpoint_blocks
from offload_trainer.model.meta.activations import count_activations
from offload_trainer.model.probes.tiny_model import tiny_config_of
from offload_trainer.model.tiled_mlp import tile
from offload_trainer.storage.tensorfile import DTYPES

_EQUAL = 1e-4  # limit for equality in fp32, relative to the largest element
_ROW, _ALIKE = 2 * 23, 2 * 160  # tokens of the row with different tokens, and of the row that repeats one
_Kind = tuple[type, str, type]  # class of the block, name of the module in it, class of the module


@dataclass
class _Calls:
    """The calls of a module in one forward."""

    count: int = 0
    shape: torch.Size | None = None  # shape of its single input and output


def with_tiles(source: ModelSource) -> ModelSource:
    """Return the model with its tiles and their memory filled in, or unchanged if no module qualifies."""
    words = {"trust_remote_code": source.section.trust_remote_code}
    model, shape = meta_model(source.config, **words), source.shape
    names, again = _found(model, block_names, **words)
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


def tileable(model: PreTrainedModel, blocks: Callable[[nn.Module], Sequence[str]], **built: Any) -> list[str]:
    """Return the names of modules that can run on pieces of a row; empty if a tiny model of the kind does not run.

    `blocks` returns the names of a model's blocks. `built` holds keyword arguments for transformers' `from_config`.
    """
    return _found(model, blocks, **built)[0]


def _found(
    model: PreTrainedModel, blocks: Callable[[nn.Module], Sequence[str]], **built: Any
) -> tuple[list[str], list[str]]:
    """Return `tileable` modules, and those of them that the recomputation of a checkpointed block also runs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            twin = _twin(model, **built)
            proven = _proven(twin, blocks(twin))
            again = _recomputed(twin, proven)
        except Exception:  # transformers' code may raise anything for an unusual configuration
            return [], []
    inside = _inside(model, blocks(model))
    proven_kinds, again_kinds = ({kind for kind, _ in ones} for ones in (proven, again))
    return [name for kind, name in inside if kind in proven_kinds], [n for kind, n in inside if kind in again_kinds]


def _twin(model: PreTrainedModel, **built: Any) -> PreTrainedModel:
    """Build a tiny fp32 model without dropout, with weights large enough that interactions between tokens show."""
    config = tiny_config_of(model.config)
    config._attn_implementation = model.config._attn_implementation
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **built).train()
    for parameter in twin.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.2)
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return twin


def _inside(model: nn.Module, blocks: Sequence[str]) -> list[tuple[_Kind, str]]:
    """Return the kind and the name of each module inside a block, outer modules first."""
    found = []
    for name in blocks:
        block = model.get_submodule(name)
        for inner, module in block.named_modules():
            if inner:
                found.append(((type(block), inner, type(module)), f"{name}.{inner}"))
    return found


def _proven(twin: PreTrainedModel, blocks: Sequence[str]) -> list[tuple[_Kind, str]]:
    ids = torch.randint(5, twin.config.get_text_config().vocab_size - 5, (2, _ROW // 2))
    every = _inside(twin, blocks)
    called = _called(twin, [name for _, name in every], ids)
    failed, passed = set[_Kind](), list[tuple[_Kind, str]]()
    for kind, name in every:
        module, calls = twin.get_submodule(name), called[name]
        within = any(name.startswith(f"{outer}.") for _, outer in passed)
        if within or calls.count == 0 or sum(weight.dim() > 1 for weight in module.parameters()) < 2:
            continue
        if calls.count == 1 and calls.shape and _alone(module, calls.shape):
            passed.append((kind, name))
        else:
            failed.add(kind)
    passed = [(kind, name) for kind, name in passed if kind not in failed]
    return passed if passed and _together(twin, [name for _, name in passed], ids) else []


def _called(twin: PreTrainedModel, names: Sequence[str], ids: torch.Tensor) -> dict[str, _Calls]:
    calls = {name: _Calls() for name in names}

    def noted(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name].count += 1
            given = (*args, *kwargs.values())
            tensors = len(given) == 1 and isinstance(given[0], torch.Tensor) and isinstance(output, torch.Tensor)
            if tensors and given[0].is_floating_point() and given[0].shape == output.shape and output.dim() in (2, 3):
                calls[name].shape = output.shape

        return hook

    hooks = [twin.get_submodule(name).register_forward_hook(noted(name), with_kwargs=True) for name in names]
    with torch.no_grad():
        twin(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _alone(module: nn.Module, shape: torch.Size) -> bool:
    """Return whether pieces of rows give the results of whole rows, forward and backward; `shape` is the input's."""
    try:
        return _alike_in_pieces(module, shape)
    except Exception:  # the module may require a certain row length
        return False


def _alike_in_pieces(module: nn.Module, shape: torch.Size) -> bool:
    different = torch.randn(2, _ROW // 2, shape[-1])
    alike = torch.randn(shape[-1]).expand(2, _ALIKE // 2, -1).contiguous()
    for x, chunk in ((different, 1), (different, 7), (alike, 64)):
        x = (x.flatten(0, 1) if len(shape) == 2 else x).requires_grad_()
        weight, weights = torch.randn_like(x), [x, *_trained(module)]
        whole = _gradients((module(x) * weight).sum(), weights)
        with _in_pieces([module], chunk):
            if not _same(whole, _gradients((module(x) * weight).sum(), weights)):
                return False
    return True


def _together(twin: PreTrainedModel, names: Sequence[str], ids: torch.Tensor) -> bool:
    """Return whether the model's loss, including the routers', and all gradients are the same with all in pieces."""
    weights = _trained(twin)

    def found() -> list[torch.Tensor]:
        return _gradients(twin(input_ids=ids, labels=ids, use_cache=False).loss, weights)

    whole = found()
    with _in_pieces([twin.get_submodule(name) for name in names], 7):
        return _same(whole, found())


def _recomputed(twin: PreTrainedModel, parts: Sequence[tuple[_Kind, str]]) -> list[tuple[_Kind, str]]:
    """Return the modules that run again in the recomputation of a checkpointed block.

    The recomputation stops before a module whose output nothing in the block saves. Such modules run once in the
    forward and once in the backward.
    """
    if not parts or not twin.supports_gradient_checkpointing:
        return []
    checkpoint_blocks(twin, reentrant=False)
    ids, tokens = torch.randint(5, twin.config.get_text_config().vocab_size - 5, (1, _ROW)), dict.fromkeys(parts, 0)

    def counted(part: tuple[_Kind, str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            if (count := output.shape[:-1].numel()) < _ROW:
                tokens[part] += count

        return hook

    hooks = [twin.get_submodule(part[1]).register_forward_hook(counted(part), with_kwargs=True) for part in parts]
    with _in_pieces([twin.get_submodule(name) for _, name in parts], 7):
        twin(input_ids=ids, labels=ids, use_cache=False).loss.backward()
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
