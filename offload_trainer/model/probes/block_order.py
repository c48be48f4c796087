"""Probe whether micro-batches may pass through a model block by block (`tiered.micro_batch_order`, breadth_first.py).

That needs a chain of checkpointed blocks, each of which gets what the previous one returned. Blocks that share weights,
feed all later blocks, or are chosen at random are no chain. No list of architectures says which are, so a tiny model of
the same kind (tiny_model.py) runs three micro-batches both ways: each gradient of each micro-batch must be equal to the
last bit, and come in the order of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.loader import checkpoint_blocks
from offload_trainer.model.loss import CausalLoss
from offload_trainer.model.probes.tiny_model import TrialFailed, random_ids, try_on_tiny_model

_MICRO, _ROW, _CHUNK = 3, 24, 16


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
