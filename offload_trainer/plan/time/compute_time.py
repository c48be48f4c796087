"""Predict the computation time of forward and backward: matrix products, attention, elementwise layers, the loss.

Each is a count per token (`ModelShape`) divided by a measured rate. If only the rate of matrix products is known, the
rest is estimated as a fixed share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_trainer.plan.machine import MachineProfile, layer_key
from offload_trainer.plan.workload import Workload

_OF_MATMUL = 0.8  # share of the matrix product rate that a whole model reaches on a GPU, if nothing else was measured


@dataclass(frozen=True)
class Work:
    """Counts of one token: floating-point operations, values that elementwise layers process, and logits."""

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
    """Return the seconds per token of forward and of backward with its recomputation; None without a measured rate."""
    again, forward, backward = work_of_token(work)
    repeated, first, last = (
        _seconds(part, work.dtype, machine, phase=phase)
        for part, phase in ((again, "forward"), (forward, "forward"), (backward, "backward"))
    )
    return {"forward": first, "backward": None if repeated is None or last is None else repeated + last}


def work_of_token(work: Workload) -> tuple[Work, Work, Work]:
    """Return the work of the backward's recomputation, of the forward, and of the backward itself.

    The recomputation covers checkpointed blocks, the head if the loss has several chunks, and MLPs that run in pieces.
    MLPs in pieces at the end of a checkpointed block recompute only once, because the block's own recomputation stops
    before them.
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
        values=shape.widths * min(1.0, products / max(1.0, 2 * forward.products)),  # frozen layers need less
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
    """Return the measured dtype whose matrix products are as fast as those of `dtype`, or None.

    On a GPU, bf16 and fp16 share their units from sm_80 on. A CPU without 16-bit units computes in fp32.
    """
    others = {"bf16": "fp16", "fp16": "bf16"} if machine.gpu is not None else {"bf16": "fp32", "fp16": "fp32"}
    return next((name for name in (dtype, others.get(dtype)) if name in machine.rates.matmul), None)
