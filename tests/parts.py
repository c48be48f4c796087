"""Parts of pages for tests of the kernels."""

from __future__ import annotations

from dataclasses import replace

from offload_trainer.optim.protocol import Stretch
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.formats import StateFormat, state_format

ADAMW = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)


def form(states: str) -> StateFormat:
    """AdamW's, with moments as optim.states has them."""
    return state_format("adamw", states)


def part(start: int, end: int, decay: float, step: int, *, hyper: AdamW = ADAMW) -> Stretch:
    """Elements [start, end) by `hyper` with another decay."""
    return Stretch(start, end, replace(hyper, decay=decay), step)
