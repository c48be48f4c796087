"""The update over pages of optimizer state: what every kernel promises, on whatever device a page lies.

    grad (16 bit) -> x scale -> exp_avg, exp_avg_sq, master (in place, as stored) -> out (16 bit)

A page is a stretch of one unit. Its kernels: torch's (`torch_adam.py`), adam.cpp (`native_adam.py`), and adam.cu for a
GPU's memory (`cuda_adam.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from offload_trainer.optim.moments import Bits, Noise
from offload_trainer.optim.rules import Hyper
from offload_trainer.plan.formats import StateFormat


@dataclass(frozen=True)
class Stretch:
    """Elements [start, end) of a unit or a page that are updated alike, in the step of this number."""

    start: int
    end: int
    hyper: Hyper
    step: int


@dataclass(frozen=True)
class PageNoise:
    """The random bits of one page in one step: those of its unit's elements from `first` on."""

    noise: Noise
    unit: int
    first: int

    def bits(self, field: str, start: int = 0) -> Bits:
        """For the elements of `field` from the page's element `start` on."""
        return self.noise.bits(field, self.unit, self.first + start)


class Kernel(Protocol):
    """One step of a rule (`rules.py`), on one page a call."""

    name: str

    def update_page(
        self,
        fields: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor | None,
        parts: Sequence[Stretch],
        *,
        format: StateFormat,
        scale: float,
        noise: PageNoise | None,
    ) -> None:
        """Update the page's `fields` in place with `grad` x `scale`, and write the new masters to `out`.

        All tensors are 1-D, contiguous, on one device, and `n` elements long, but for the scales. `fields` by `format`
        (plan/formats.py): master fp32; exp_avg and exp_avg_sq fp32, bf16 or uint8, the last with exp_avg_scales
        and exp_avg_sq_scales, fp32[ceil(n / 256)]; of Lion no exp_avg_sq. Each part's rule is the format's. `grad`
        (bf16, fp16, fp32) is only read. `out` (bf16, fp16, fp32, or None) receives the masters rounded to nearest even.
        Where the format has remainders there is no master but remainder int16[n] and ties int16[ceil(n / 256)]
        (`remainders.py`), and `out`, in bf16, holds the weights of the masters as they are before.

        `parts` ascend, do not overlap and start at multiples of 256; each ends at one too, or at the page's end.
        Outside them not a bit changes, of codes, scales and `out` either. `step` of a part counts from 1. A page may
        have no parts.

        For each element, each operation rounded to fp32 by itself but for those that are `fused` in adam.cpp (its
        `adam` and `lion` are the lists, `step_constants` in constants.py the constants): the moments as fp32
        (`moments.py`, decode_*); the rule; the new moments as stored: bf16 with noise.bits("exp_avg") and
        noise.bits("exp_avg_sq"); in 8 bits exp_avg to the nearest code, exp_avg_sq with noise.bits("exp_avg_sq")
        (`moments.py`, encode_*). `noise` is None for fp32 moments. An element depends on itself alone and in 8 bits on
        the 256 of its scale, so the bits do not depend on how a unit is cut into pages, nor on the device;
        `TorchKernel` is the reference and `kernels.matches_torch` compares. Subnormal numbers count as they are; what
        is not finite is carried on, a NaN as any NaN.

        On the CPU the page is done on return. A kernel of a device may return once the work is in the device's current
        stream, and must keep nothing that it was given. One call at a time.
        """
        ...


def within(stretches: Sequence[Stretch], start: int, end: int) -> list[Stretch]:
    """The parts of `stretches` inside [start, end), counted from `start`."""
    return [
        replace(part, start=max(part.start, start) - start, end=min(part.end, end) - start)
        for part in stretches
        if part.start < end and part.end > start
    ]
