"""Build update ranges of pages for tests of the optimizer kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange
from offload_trainer.optim.rules import AdamW, Hyper
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, StateFormat

ADAMW = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
FORMATS = {found.moments.name: found for found in ADAMW_FORMATS}


def form(states: str) -> StateFormat:
    """Return AdamW's state format with moments as in optim.moment_dtype."""
    return FORMATS[states]


def part(start: int, end: int, decay: float, step: int, *, hyper: Hyper = ADAMW) -> ParamRange:
    """Return a range of elements [start, end) that uses `hyper` with another decay."""
    return ParamRange(start, end, replace(hyper, decay=decay), step)


def update_stretch(
    kernel: Kernel,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
    *,
    scale: float,
    hyper: AdamW,
    step: int,
) -> None:
    """Call `update_page` on a page that is one range, with fp32 moments."""
    fields = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    parts = [ParamRange(0, master.numel(), hyper, step)]
    kernel.update_page(PageUpdate(fields, grad, out, parts, form("fp32"), scale, noise=None))
