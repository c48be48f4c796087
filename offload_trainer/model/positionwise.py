"""Which parts of a model's blocks compute each token by itself: found by trying, whatever the architecture.

A part that gives of one token the same alone, in a piece and in a whole row can be run on pieces of the row (tiles.py).
No list of names says which can: MLPs of some architectures look at the token before (RWKV), experts may have room for
so many tokens, a router's logits may go elsewhere too. So in a tiny model of the same kind (twins.py)

    candidates   modules of a block that are given one tensor and give one of its shape, with two matrices at least
    each alone   on a row, and on pieces of it, down to single tokens: outputs and all gradients; on a row of one token
                 again and again too, which all go to the same experts
    together     the model's loss and all gradients, with those that passed in pieces and without

and a part is what passed, in all blocks of that kind; the outermost where one holds another.
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

from offload_trainer.model.activations import count_activations
from offload_trainer.model.initial import meta_model
from offload_trainer.model.source import ModelSource, block_names, checkpoint_blocks
from offload_trainer.model.tiles import tile
from offload_trainer.model.twins import twin_of
from offload_trainer.storage.dtypes import DTYPES

_EQUAL = 1e-4  # of the largest element: at most so far apart in fp32
_ROW, _ALIKE = 2 * 23, 2 * 160  # tokens: of single ones and odd pieces; of the same one
_Kind = tuple[type, str, type]  # of a block, the name in it, of the module


@dataclass
class _Calls:
    """How a module was called in one forward."""

    count: int = 0
    shape: torch.Size | None = None  # of the one tensor that it was given, and gave


def with_tiles(source: ModelSource) -> ModelSource:
    """The same model with what can run in pieces looked for, and counted so; as it is where nothing can."""
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
        with suppress(Exception):  # of an architecture's own code, which may do anything
            dtype = DTYPES[source.section.dtype]
            counted = count_activations(model, block_names(model), dtype=dtype, **how)
            on_gpu, on_cpu = counted.on_gpu, counted.on_cpu
    found = replace(shape, tiles=tuple(names), tiles_again=tuple(again), tiled_on_gpu=on_gpu, tiled_on_cpu=on_cpu)
    return replace(source, shape=found)


def tileable(model: PreTrainedModel, blocks: Callable[[nn.Module], Sequence[str]], **built: Any) -> list[str]:
    """Names of `model`'s modules that can be run on pieces of a row; none where a tiny model of its kind does not run.

    `blocks`: names of a model's blocks; `built`: words for transformers' `from_config`.
    """
    return _found(model, blocks, **built)[0]


def _found(
    model: PreTrainedModel, blocks: Callable[[nn.Module], Sequence[str]], **built: Any
) -> tuple[list[str], list[str]]:
    """As `tileable`; and those of them that a checkpointed block's recomputation runs too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            twin = _twin(model, **built)
            proven = _proven(twin, blocks(twin))
            again = _recomputed(twin, proven)
        except Exception:  # of transformers' code, for a configuration that it did not expect
            return [], []
    inside = _inside(model, blocks(model))
    proven_kinds, again_kinds = ({kind for kind, _ in ones} for ones in (proven, again))
    return [name for kind, name in inside if kind in proven_kinds], [n for kind, n in inside if kind in again_kinds]


def _twin(model: PreTrainedModel, **built: Any) -> PreTrainedModel:
    """In fp32, with weights so large that what crosses from token to token shows, and nothing left to chance."""
    config = twin_of(model.config)
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
    """Each module inside a block, the outer before the inner: its kind, and its name in the model."""
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
    """Whether rows in pieces give what they give as a whole, forward and backward. `shape`: of what it is given."""
    try:
        return _alike_in_pieces(module, shape)
    except Exception:  # of a module that wants rows of a certain length
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
    """Whether the model's loss, the routers' too where it has one, is the same with all of them in pieces."""
    weights = _trained(twin)

    def found() -> list[torch.Tensor]:
        return _gradients(twin(input_ids=ids, labels=ids, use_cache=False).loss, weights)

    whole = found()
    with _in_pieces([twin.get_submodule(name) for name in names], 7):
        return _same(whole, found())


def _recomputed(twin: PreTrainedModel, parts: Sequence[tuple[_Kind, str]]) -> list[tuple[_Kind, str]]:
    """Those of these parts that have something behind them in their block that is kept: none may end a recomputation.

    Others run once in the forward and once in the backward.
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
    """The value, and its gradients; of what it does not depend on, zeros."""
    found = torch.autograd.grad(value, weights, allow_unused=True)
    return [value.detach(), *(torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True))]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """What is small beside all else is held against a hundredth of that. A NaN is not the same."""
    largest = max(float(values.abs().max()) for values in one if values.numel())
    bounds = [_EQUAL * max(float(v.abs().max()) if v.numel() else 0.0, largest / 100) for v in one]
    return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in zip(one, other, bounds, strict=True))
