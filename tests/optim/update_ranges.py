"""Build update ranges of pages for tests of the optimizer kernels."""

from dataclasses import replace

import torch

from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.rules import AdamW, Hyper
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS

ADAMW = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
MARK = 61440.0  # larger than any weight, and exact in 16 bits
NOISE, UNIT, FIRST = Noise(1, 2), 3, 4096  # the page begins at element 4096 of its unit
FORMATS = {format.name: format for format in ADAMW_FORMATS}  # of fp32 masters by the values of optim.moment_dtype
form = FORMATS.__getitem__


def part(start: int, end: int, decay: float, step: int, *, hyper: Hyper = ADAMW) -> ParamRange:
    """Return a range of elements [start, end) that uses `hyper` with another decay."""
    return ParamRange(start, end, replace(hyper, decay=decay), step)


def updated(
    kernel: Kernel,
    page: tuple[dict[str, torch.Tensor], torch.Tensor],
    parts: list[ParamRange],
    *,
    states: str,
    first: int = FIRST,
    given: torch.dtype = torch.bfloat16,
    wanted: torch.dtype | None = torch.bfloat16,
    scale: float = 0.37,
    place: str | torch.device = "cpu",
) -> list[torch.Tensor]:
    """Update copies of a page's fields with its gradient, which stays as it is; return them and the new weights."""
    fields, grad = page
    here = {name: tensor.to(place, copy=True) for name, tensor in fields.items()}
    out = torch.full_like(grad, MARK, dtype=wanted or torch.bfloat16, device=place)
    noise, new = NOISE if form(states).stochastic else None, None if wanted is None else out
    there = grad.to(given, copy=True).to(place)
    before = there.clone()
    kernel.update_page(PageUpdate(here, there, new, parts, form(states), scale, noise, UNIT, first))
    assert torch.equal(there.view(torch.uint8), before.view(torch.uint8))
    return [tensor.cpu() for tensor in (*here.values(), out)]
