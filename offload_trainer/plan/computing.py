"""Seconds that forward and backward compute: products, attention, what goes over each value, the loss.

Each is a count of one token (`ModelShape`) over a rate. Where the machine's products alone were timed, or said, the
rest is a share of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_trainer.plan.machine import MachineProfile, layer_key
from offload_trainer.plan.workload import Workload

_OF_MATMUL = 0.8  # of the products' speed, what a whole model reaches where the rest was not timed: a GPU's


@dataclass(frozen=True)
class Work:
    """Of one token: floating-point operations, values that go through layers, logits."""

    products: float
    attention: float
    values: float
    logits: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.values + other.values,
            self.logits + other.logits,
        )


def seconds_of_token(work: Workload, machine: MachineProfile) -> dict[str, float | None]:
    """Of forward and of backward, with what the backward computes again; None where products were not timed."""
    again, forward, backward = work_of_token(work)
    repeated, first, last = (
        _seconds(part, work.dtype, machine, phase=phase)
        for part, phase in ((again, "forward"), (forward, "forward"), (backward, "backward"))
    )
    return {"forward": first, "backward": None if repeated is None or last is None else repeated + last}


def work_of_token(work: Workload) -> tuple[Work, Work, Work]:
    """What the backward computes again (the blocks, the head of a loss in several chunks), a forward, a backward.

    With MLPs that run on pieces those too: of checkpointed blocks only where something that is kept comes behind them,
    since the recomputation stops short of them elsewhere, and their pieces' is theirs.
    """
    shape, seq_len = work.shape, work.seq_len
    blocks = Work(
        products=shape.block_flops(seq_len=0),
        attention=shape.block_flops(seq_len=seq_len) - shape.block_flops(seq_len=0),
        values=shape.widths,
        logits=0.0,
    )
    head = Work(products=shape.head_flops(), attention=0.0, values=0.0, logits=shape.vocabulary)
    forward, products = blocks + head, shape.backward_flops(seq_len=0)
    backward = Work(
        products=products,
        attention=shape.backward_flops(seq_len=seq_len) - products,
        values=shape.widths * min(1.0, products / max(1.0, 2 * forward.products)),  # fewer below what is frozen
        logits=shape.vocabulary,
    )
    again = Work(0.0, 0.0, 0.0, 0.0)
    if work.checkpointing:
        again += blocks
    if work.mlp_chunk:
        flops, widths = (count(checkpointing=work.checkpointing) for count in (shape.tiled_flops, shape.tiled_widths))
        again += Work(products=flops, attention=0.0, values=widths, logits=0.0)
    if work.micro_batch * work.length > work.loss_chunk:
        again += head
    return again, forward, backward


def _seconds(work: Work, dtype: str, machine: MachineProfile, *, phase: str) -> float | None:
    timed = stands_for(dtype, machine)
    if timed is None:
        return None
    rates, products = machine.rates.layers, machine.rates.matmul[timed].value
    seconds = work.products / products
    for part, count in (("attention", work.attention), ("values", work.values), ("loss", work.logits)):
        rate = rates.get(layer_key(timed, part, phase))
        if rate is None:
            return (work.products + work.attention) / (_OF_MATMUL * products)
        seconds += count / rate.value
    return seconds


def stands_for(dtype: str, machine: MachineProfile) -> str | None:
    """The timed dtype whose products take as long: itself; of a GPU's 16-bit ones the other, since both have the same
    units from sm_80 on; of a CPU fp32, in which it takes those that it has no units for. None: nothing is known.
    """
    others = {"bf16": "fp16", "fp16": "bf16"} if machine.gpu is not None else {"bf16": "fp32", "fp16": "fp32"}
    return next((name for name in (dtype, others.get(dtype)) if name in machine.rates.matmul), None)
