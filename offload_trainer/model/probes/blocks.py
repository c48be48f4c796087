"""Probes of a model's blocks, made once before the plan: what can run in pieces or in another order.

Names and architectures do not tell: some MLPs use the previous token, some blocks feed all later ones. So a tiny model
of the same kind is run (tiny_model.py):

    with_tiles     position-wise modules (tiled_mlp.py): loss and gradients are the same with the module run on pieces
                   of the row. The model is returned with them, and with their memory, in its shape. A kind of module
                   qualifies if it passes alone and together with all others that passed.
    why_no_chain   blocks through which several micro-batches may pass together (`tiered.micro_batch_order`,
                   breadth_first.py): gradients have the same bits. Returns the reason if not.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.activations import count_activations
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.loader import ModelSource, checkpoint_blocks
from offload_trainer.model.loss import CausalLoss, adds_router_loss
from offload_trainer.model.probes.tiny_model import Kind, TrialFailed, modules_in_blocks, random_ids, try_on_tiny_model
from offload_trainer.model.shape import block_names
from offload_trainer.model.tiled_mlp import Tiled
from offload_trainer.offloading.autograd import in_backward
from offload_trainer.storage.tensorfile import DTYPES

_EQUAL = 1e-4  # limit for equality in fp32, relative to the largest element
_ROW, _ODD = 24, 23  # tokens of a row, and of one that pieces do not divide
_MICRO, _CHUNK = 3, 16  # micro-batches, and tokens of a piece of the loss


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
    found = replace(shape, tiles=tuple(names), tiles_again=tuple(again))
    section, blocks = source.section, block_names(model)
    count = partial(count_activations, model, blocks, dtype=DTYPES[section.dtype], chunk=section.loss_chunk)
    if shape.on_gpu and (counted := count(whole_logits=shape.whole_logits, packed=shape.packed, tiles=names)):
        found = replace(found, tiled_on_gpu=counted.on_gpu, tiled_on_cpu=counted.on_cpu)
    return replace(source, shape=found)


def tileable(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of modules that can run on pieces of a row, and of those that a recomputation runs again.

    Both are empty if a tiny model of the kind does not run.
    """
    try:
        again = try_on_tiny_model(model, _positionwise, all_classes=False)
    except TrialFailed:
        return [], []
    inside = [(kind, name) for kind, name, _ in modules_in_blocks(model) if kind in again]
    return [name for _, name in inside], [name for kind, name in inside if again[kind]]


def _positionwise(tiny: PreTrainedModel) -> dict[Kind, bool]:
    """Return the kinds of position-wise modules, and whether the recomputation of a block runs each a third time.

    Loss, including the routers', and gradients must be the same with the modules of a kind in pieces, and with all that
    passed. Candidates have at least two matrices and are called once. If those that pass are nested, the outermost is
    returned. A recomputation stops before a module whose output nothing in the block saves.
    """
    tiny.train()
    for module in tiny.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if tiny.supports_gradient_checkpointing:
        checkpoint_blocks(tiny, reentrant=False)
    # Rows that repeat one token send everything to the same experts, which may have a capacity.
    different, alike = random_ids(tiny, 2, _ODD), random_ids(tiny, 1, 1).repeat(14, _ODD)
    trials = [(ids, chunk, _gradients(tiny, ids)) for ids, chunk in ((different, 7), (different, 1), (alike, 64))]
    inside = list(modules_in_blocks(tiny))

    def runs(kinds: Sequence[Kind]) -> dict[Kind, bool]:
        """Return the kinds, and whether each runs a third time, or {} if the results are not those of whole rows."""
        parts = {module: kind for kind, _, module in inside if kind in kinds}
        again, calls, tokens = dict[Kind, bool](), Counter[nn.Module](), Counter[nn.Module]()
        for ids, chunk, whole in trials:
            calls.clear()  # in the forward
            tokens.clear()  # of all pieces

            def note(module: nn.Module, _: Any, output: torch.Tensor, chunk: int = chunk) -> None:
                if (count := output.shape[:-1].numel()) <= chunk:
                    tokens[module] += count
                elif not in_backward():
                    calls[module] += 1

            with ExitStack() as stack:
                for module in parts:
                    stack.callback(module.register_forward_hook(note).remove)
                    stack.enter_context(patch.object(module, "forward", Tiled(module, chunk)))
                try:
                    same = _same(whole, _gradients(tiny, ids))
                except Exception:  # the module has several inputs, or requires a certain row length
                    return {}
            if not same or max(calls.values(), default=0) != 1:
                return {}
            again = {parts[module]: False for module in calls}
            again |= {parts[module]: True for module in calls if tokens[module] > 2 * ids.numel()}
        return again

    passed: list[Kind] = []
    for kind, module in {kind: module for kind, _, module in inside if kind[1]}.items():
        within = {part for kind, _, outer in inside if kind in passed for part in outer.modules()}
        if module not in within and sum(weight.dim() > 1 for weight in module.parameters()) > 1 and runs([kind]):
            passed.append(kind)
    return runs(passed)


def _gradients(tiny: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss and its gradients; zeros for weights that it does not depend on."""
    weights = [weight for weight in tiny.parameters() if weight.requires_grad]
    loss = tiny(input_ids=ids, labels=ids, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Compare tensors relative to their largest element, at least 1 % of the largest of all. NaN is never equal."""
    largest = max(float(values.abs().max()) for values in one if values.numel())
    bounds = [_EQUAL * max(float(v.abs().max()) if v.numel() else 0.0, largest / 100) for v in one]
    return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in zip(one, other, bounds, strict=True))


# -- a chain of blocks -------------------------------------------------------------------------------------------------


def why_no_chain(model: PreTrainedModel, *, pipeline: bool = False) -> str:
    """Return why micro-batches cannot pass through models like `model` block by block, or "" if they can.

    `pipeline`: different ranks compute the blocks, which must share nothing but hidden states.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    skipped = [key for key, value in vars(text).items() if "layerdrop" in key and value]
    if skipped:
        return f"{name} skips blocks at random ({', '.join(skipped)})"
    if pipeline and adds_router_loss(model):
        return f"the loss of {name} has a part of the routers of all blocks (output_router_logits)"
    try:
        equal, only_hidden = try_on_tiny_model(model, _equal_both_ways)
    except TrialFailed as error:
        return f"in a trial, a tiny {name} did not run so ({error})"
    if equal and (only_hidden or not pipeline):
        return ""
    how = "its blocks share more than hidden states" if equal else "its gradients differ"
    return f"{name} is no chain of blocks, as a trial with a tiny one shows: {how}"


def _equal_both_ways(tiny: PreTrainedModel) -> tuple[bool, bool]:
    """Return whether micro-batches give the same gradients, to the last bit and in the same order, block by block.

    Return also whether blocks share only hidden states.
    """
    checkpoint_blocks(tiny, reentrant=False)
    loss = CausalLoss(tiny.train(), chunk=_CHUNK)
    rows = [random_ids(tiny, 1, _ROW + 1) for _ in range(_MICRO)]
    batches = [(ids[:, :-1], ids[:, 1:], number, _ROW, None) for number, ids in enumerate(rows)]
    uses = Counter(id(parameter) for _, parameter in tiny.named_parameters(remove_duplicate=False))
    sums, now, once = dict[tuple[str, int], torch.Tensor](), 0, True

    def turn(number: int) -> None:
        nonlocal now
        now = number

    def take(name: str, parameter: Any) -> None:
        nonlocal once
        gradient, parameter.grad = parameter.grad, None
        if (name, now) in sums:
            once &= uses[id(parameter)] > 1  # a tied weight gets gradients of a micro-batch at several times
            gradient = sums[name, now] + gradient
        sums[name, now] = gradient

    for name, parameter in tiny.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(take, name))
    for number, batch in enumerate(batches):
        turn(number)
        loss(*batch).backward()
    if not sums:
        raise UserError("no gradient arrived")
    expected, sums, once = sums, {}, True
    model = BreadthFirst(loss)
    with model.step(batches):
        model.forward()
        model.backward(turn, [1.0] * _MICRO)
    # A stable sort by weight shows the order in which each weight's micro-batches came.
    in_order = once and sorted(sums, key=itemgetter(0)) == sorted(sums)
    equal = in_order and sums.keys() == expected.keys() and all(torch.equal(sums[key], expected[key]) for key in sums)
    return equal, model.only_hidden
