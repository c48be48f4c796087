"""Probe of a model's blocks: may several micro-batches pass through each of them together (breadth_first.py)?

Names and architectures do not tell: some blocks feed all later ones. So a tiny model of the same kind is run
(tiny_model.py), with one micro-batch after the other, and block by block: the gradients must have the same bits.
"""

from collections import Counter
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.loader import checkpoint_blocks
from offload_trainer.model.loss import CausalLoss, adds_router_loss
from offload_trainer.model.probes.tiny_model import TrialFailed, random_ids, try_on_tiny_model

_ROW, _MICRO, _CHUNK = 24, 3, 16  # tokens of a row, micro-batches, and tokens of a piece of the loss


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
