"""Probes of a model's blocks: what can run on pieces of a row, be fetched by the child, or take micro-batches together.

No list of names or architectures tells; some code reads a child's weight without calling the child, some MLPs use the
previous token, some blocks feed all later ones. So each probe tries a tiny model of the same kind (tiny_model.py):

    tiles      position-wise modules (tiled_mlp.py): a token's output is the same alone, in a piece, and in a whole row
    children   modules whose children can be present one at a time (`tiered.fetch_granularity=module`)
    chain      blocks through which micro-batches may pass together (`tiered.micro_batch_order`, breadth_first.py)

A module qualifies if it passes in all blocks of its kind, alone and together with all others that passed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.activations import count_activations
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.loader import ModelSource, checkpoint_blocks
from offload_trainer.model.loss import CausalLoss
from offload_trainer.model.probes.tiny_model import (
    Kind,
    TrialFailed,
    modules_in_blocks,
    random_ids,
    try_on_tiny_model,
)
from offload_trainer.model.shape import block_names
from offload_trainer.model.tiled_mlp import tile
from offload_trainer.offloading.autograd import keep_weights
from offload_trainer.plan.shape import Needs
from offload_trainer.plan.tiered.layout import divided
from offload_trainer.storage.tensorfile import DTYPES

_EQUAL = 1e-4  # limit for equality in fp32, relative to the largest element
_TILED, _ALIKE = 2 * 23, 2 * 160  # tokens of the tiled row with different tokens, and of the row that repeats one
_ROW = 24  # tokens of a row of the other probes
_MICRO, _CHUNK = 3, 16  # micro-batches, and tokens of a piece of the loss
_Named = tuple[Kind, str]  # kind and name of a module
_BlockKind = tuple[str, type, frozenset[str]]
_Order = tuple[tuple[str, ...], tuple[str, ...]]  # names of weights in the order of use by forward and backward


# -- tiles -------------------------------------------------------------------------------------------------------------


def with_tiles(source: ModelSource) -> ModelSource:
    """Return the model with its tiles and their memory filled in, or unchanged if no module qualifies."""
    shape, model = source.shape, source.meta()
    names, again = tileable(model)
    if not names:
        return source
    trained = {weight.name for weight in shape.weights if weight.trainable}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    on_gpu = on_cpu = None
    if shape.on_gpu is not None:
        with suppress(Exception):  # an architecture's code may raise anything
            counted = count_activations(
                model,
                block_names(model),
                dtype=DTYPES[source.section.dtype],
                whole_logits=shape.whole_logits,
                packed=shape.packed,
                tiles=names,
                chunk=source.section.loss_chunk,
            )
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
        passed = _positionwise(tiny)
        return passed, _recomputed(tiny, passed)

    try:
        passed = try_on_tiny_model(model, trial, all_classes=False)
    except TrialFailed:
        return [], []
    proven, again = ({kind for kind, _ in found} for found in passed)
    inside = [(kind, name) for kind, name, _ in modules_in_blocks(model)]
    return [name for kind, name in inside if kind in proven], [name for kind, name in inside if kind in again]


def _positionwise(tiny: PreTrainedModel) -> list[_Named]:
    """Return the position-wise modules in blocks that pass alone, in all blocks of a kind, and together.

    Candidates have at least two matrices and map one tensor to one of the same shape. If those that pass are nested,
    the outermost is returned.
    """
    ids = random_ids(tiny, 2, _TILED // 2)
    every = [(kind, name, module) for kind, name, module in modules_in_blocks(tiny) if kind[1]]
    with torch.no_grad(), _noted_calls(tiny, [name for _, name, _ in every]) as called:
        tiny(input_ids=ids, use_cache=False)
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


@contextmanager
def _noted_calls(tiny: PreTrainedModel, names: Sequence[str]) -> Iterator[dict[str, list[torch.Size | None]]]:
    """Record the calls of these modules: the shape that the single input and the output share, or None."""
    calls: dict[str, list[torch.Size | None]] = {name: [] for name in names}

    def note(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = (*args, *kwargs.values())
        tensors = len(given) == 1 and isinstance(given[0], torch.Tensor) and isinstance(output, torch.Tensor)
        same = tensors and given[0].is_floating_point() and given[0].shape == output.shape
        calls[name].append(output.shape if same and output.dim() in (2, 3) else None)

    hooks = [tiny.get_submodule(name).register_forward_hook(partial(note, name), with_kwargs=True) for name in names]
    yield calls
    for hook in hooks:
        hook.remove()


def _alone(module: nn.Module, shape: torch.Size) -> bool:
    """Return whether pieces of rows give the results of whole rows, forward and backward; `shape` is the input's.

    Pieces go down to single tokens. A row that repeats one token sends everything to the same experts, which may have a
    capacity.
    """
    different = torch.randn(2, _TILED // 2, shape[-1])
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
    ids, names = random_ids(tiny, 1, _TILED), [name for _, name in parts]
    with _noted_calls(tiny, names) as calls, _in_pieces([tiny.get_submodule(name) for name in names], 7):
        tiny(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    sizes = {name: [shape[:-1].numel() for shape in calls[name] if shape is not None] for name in names}
    return [part for part in parts if sum(size for size in sizes[part[1]] if size < _TILED) > 2 * _TILED]


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


# -- children ----------------------------------------------------------------------------------------------------------


def with_divided_blocks(source: ModelSource) -> ModelSource:
    """Return the model with its blocks divided into submodules, or unchanged if no block can be divided."""
    names, needs = divisible_modules(source.meta())
    return replace(source, shape=divided(replace(source.shape, divisible=tuple(names), needs=tuple(needs))))


def divisible_modules(model: PreTrainedModel) -> tuple[list[str], list[Needs]]:
    """Return the names of blocks and of modules inside them whose children can be fetched separately, and their order.

    The result is empty if a tiny model of the same kind does not run.
    """

    def trial(tiny: PreTrainedModel) -> tuple[set[Kind], dict[_BlockKind, _Order]]:
        proven = _separable(tiny)
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
def _separable(tiny: PreTrainedModel) -> set[Kind]:
    """Return the kinds of modules whose children can be present one at a time, alone and together.

    Absent weights are NaN; the logits must equal those of the whole model to the last bit.
    """
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

    The backward includes the recomputation of blocks that are checkpointed. The plan counts fetches by this order.
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


# -- a chain of blocks -------------------------------------------------------------------------------------------------


def why_no_chain(model: PreTrainedModel) -> str:
    """Return why micro-batches cannot pass through models like `model` block by block, or "" if they can."""
    name, text = type(model).__name__, model.config.get_text_config()
    skipped = [key for key, value in vars(text).items() if "layerdrop" in key and value]
    if skipped:
        return f"{name} skips blocks at random ({', '.join(skipped)})"
    try:
        equal = try_on_tiny_model(model, _equal_both_ways)
    except TrialFailed as error:
        return f"in a trial, a tiny {name} did not run so ({error})"
    return "" if equal else f"{name} is no chain of blocks, as a trial with a tiny one shows: its gradients differ"


def _equal_both_ways(tiny: PreTrainedModel) -> bool:
    """Return whether micro-batches give the same gradients, to the last bit and in the same order, block by block."""
    checkpoint_blocks(tiny, reentrant=False)
    loss = CausalLoss(tiny.train(), chunk=_CHUNK)
    batches = []
    for number in range(_MICRO):
        ids = random_ids(tiny, 1, _ROW + 1)
        batches.append((ids[:, :-1], ids[:, 1:], number, _ROW, None))
    uses = Counter(id(parameter) for _, parameter in tiny.named_parameters(remove_duplicate=False))
    arrived, sums, now = list[tuple[str, int]](), dict[tuple[str, int], torch.Tensor](), 0

    def turn(number: int) -> None:
        nonlocal now
        now = number

    def take(name: str, parameter: Any) -> None:
        gradient, parameter.grad = parameter.grad, None
        if uses[id(parameter)] == 1:  # a tied weight gets gradients of a micro-batch at several times
            arrived.append((name, now))
        sums[name, now] = sums[name, now] + gradient if (name, now) in sums else gradient

    for name, parameter in tiny.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(take, name))
    for number, batch in enumerate(batches):
        turn(number)
        loss(*batch).backward()
    if not sums:
        raise UserError("no gradient arrived")
    expected, sums = sums, {}
    arrived.clear()
    model = BreadthFirst(loss)
    with model.step(batches):
        model.forward()
        for number in range(_MICRO):
            turn(number)
            model.loss(number).backward()
        model.backward(turn)
    # A stable sort by weight shows the order of each weight's micro-batches, of which each must come once.
    by_weight = sorted(arrived, key=itemgetter(0))
    in_order = by_weight == sorted(set(arrived))
    return in_order and sums.keys() == expected.keys() and all(torch.equal(sums[key], expected[key]) for key in sums)
