"""Probe whether micro-batches may pass through a model block by block (`tiered.micro_batch_order`, breadth_first.py).

That needs a chain of checkpointed blocks, each of which gets what the previous one returned. Blocks that share weights,
feed all later blocks, or are chosen at random are no chain. No list of architectures says which are, so a tiny model of
the same kind (tiny_model.py) runs three micro-batches both ways: each gradient of each micro-batch must be equal to the
last bit, and come in the order of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.loader import checkpoint_blocks
from offload_trainer.model.loss import CausalLoss
from offload_trainer.model.probes.tiny_model import TrialFailed, random_ids, try_on_tiny_model

_MICRO, _ROW, _CHUNK = 3, 24, 16
_Arrived = list[tuple[int, str, torch.Tensor]]  # micro-batch, weight, gradient


def why_no_chain(model: PreTrainedModel, *, trust_remote_code: bool) -> str:
    """Return why micro-batches cannot pass through models like `model` block by block, or "" if they can."""
    name, text = type(model).__name__, model.config.get_text_config()
    skipped = [key for key, value in vars(text).items() if "layerdrop" in key and value]
    if skipped:
        return f"{name} skips blocks at random ({', '.join(skipped)})"
    try:
        equal = try_on_tiny_model(model, _equal_both_ways, trust_remote_code=trust_remote_code)
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

    def depth_first(turn: Callable[[int], None]) -> None:
        for number, batch in enumerate(batches):
            turn(number)
            loss(*batch).backward()

    def breadth_first(turn: Callable[[int], None]) -> None:
        model = BreadthFirst(loss)
        with model.step(batches):
            model.forward()
            for number in range(_MICRO):
                turn(number)
                model.loss(number).backward()
            model.backward(turn)

    expected, found = (_arrivals(tiny, way) for way in (depth_first, breadth_first))
    uses = Counter(id(parameter) for _, parameter in tiny.named_parameters(remove_duplicate=False))
    tied = {name for name, parameter in tiny.named_parameters() if uses[id(parameter)] > 1}
    whole, seen = dict[tuple[int, str], torch.Tensor](), dict[str, int]()
    for number, name, gradient in found:
        if (number, name) in whole and name not in tied:
            return False
        whole[number, name] = whole[number, name] + gradient if (number, name) in whole else gradient
        if name not in tied and seen.get(name, -1) > number:
            return False
        seen[name] = number
    right = {(number, name): gradient for number, name, gradient in expected}
    return whole.keys() == right.keys() and all(torch.equal(whole[key], gradient) for key, gradient in right.items())


def _arrivals(tiny: PreTrainedModel, run: Callable[[Callable[[int], None]], None]) -> _Arrived:
    """Return the gradients that `run` produces in the order of arrival; it calls its argument at each turn."""
    arrived, now = _Arrived(), [0]

    def take(name: str) -> Callable[[Any], None]:
        def hook(parameter: Any) -> None:
            arrived.append((now[0], name, parameter.grad))
            parameter.grad = None

        return hook

    hooks = [p.register_post_accumulate_grad_hook(take(n)) for n, p in tiny.named_parameters() if p.requires_grad]
    try:
        run(lambda number: now.__setitem__(0, number))
    finally:
        for hook in hooks:
            hook.remove()
    if not arrived:
        raise UserError("no gradient arrived")
    return arrived
