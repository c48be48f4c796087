"""The interface of update kernels, and the reference: one optimizer step on a page of optimizer state, on any device.

A page is a range of elements of one unit (a flat buffer of weights). There are three kernels: torch's operations
(`TorchKernel`, for all formats of state), adam.cpp (`native_kernel.py`), and Triton's for GPU memory (`cuda_adam.py`).
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from offload_trainer.optim.moments import Bits, Noise, stored_field
from offload_trainer.optim.norms import Pieces
from offload_trainer.optim.rules import Hyper, Muon
from offload_trainer.plan.tiered.state_formats import KINDS, StateFormat


@dataclass(frozen=True)
class ParamRange:
    """Elements [start, end) of a unit or a page that share hyperparameters and step number."""

    start: int
    end: int
    hyper: Hyper
    step: int


@dataclass(frozen=True)
class PageUpdate:
    """One step on one page of `n` elements. All tensors are 1-D, contiguous and on one device.

    Args:
        fields: the page's state in `format` (plan/tiered/state_formats.py), `n` elements each. master is fp32 or bf16.
            exp_avg and exp_avg_sq are fp32, bf16 or uint8; uint8 comes with exp_avg_scales and exp_avg_sq_scales,
            fp32[ceil(n / 256)].
        grad: bf16, fp16 or fp32 [n]; not modified.
        out: bf16, fp16 or fp32 [n], or None; receives the masters, as stored, rounded to nearest even.
        parts: ascending, disjoint ranges that start at multiples of 256 and end at one or at the page's end; perhaps
            none. Nothing outside them changes, neither codes and scales nor `out`. A part's `step` counts from 1.
        format: storage format of the fields.
        scale: factor on the gradient.
        noise: random bits for fields that are rounded stochastically; None if all are fp32.
        unit, first: the page's unit, and its first element there; the random bits depend on them.
        shadow: uint8 memory laid out as the page's state, masters first. The native kernel copies the old state of the
            updated elements there, in the same pass; others require None.
    """

    fields: Mapping[str, torch.Tensor]
    grad: torch.Tensor
    out: torch.Tensor | None
    parts: Sequence[ParamRange]
    format: StateFormat
    scale: float
    noise: Noise | None
    unit: int = 0
    first: int = 0
    shadow: torch.Tensor | None = None

    def bits(self, field: str, start: int = 0) -> Bits | None:
        """Return the random bits for `field`, starting at element `start` of the page."""
        return None if self.noise is None else self.noise.bits(field, self.unit, self.first + start)


class Kernel(Protocol):
    """One step of an update rule (`rules.py`) on one page per call; calls do not overlap. `TorchKernel` has the bits.

    For each element a kernel decodes master and moments to fp32 (`moments.py`), applies the rule, and encodes the new
    ones. bf16 fields and 8-bit exp_avg_sq are rounded stochastically, 8-bit exp_avg to the nearest code. Each operation
    is rounded to fp32 separately, except those that use `fused` in adam.cpp, whose function `adam` lists them. An
    element's result depends only on that element and, in 8 bits, on the 256 elements that share its scale, so neither
    on where pages are cut nor on the device. Subnormal numbers are not flushed. Infinities and NaN propagate; the bits
    of a NaN may differ between kernels.
    """

    name: str

    def update_page(self, page: PageUpdate) -> None:
        """Update the page's `fields` in place with `grad` x `scale`, and write the new masters to `out`.

        A CPU kernel has updated the page when it returns. A GPU kernel may return once the work is queued on the
        current stream, and must not keep references to its arguments.
        """


def clip_ranges(ranges: Sequence[ParamRange], start: int, end: int) -> list[ParamRange]:
    """Clip the ranges to [start, end) and return them relative to `start`."""
    inside = (part for part in ranges if part.start < end and part.end > start)
    return [replace(part, start=max(part.start, start) - start, end=min(part.end, end) - start) for part in inside]


# CRC-32 with zlib's polynomial, without the inversions before and after, so that bytes that are all zero have the
# checksum 0. The compiled function is several times as fast as zlib.
Sum = Callable[[torch.Tensor], int]  # takes a contiguous uint8 tensor in host memory


def zlib_sum(data: torch.Tensor) -> int:
    return zlib.crc32(data.numpy().data, 0xFFFFFFFF) ^ 0xFFFFFFFF


# Elements that are converted, updated and copied out at a time; a multiple of 256. At 28 bytes each they fit the
# last-level cache; 2^19 was the fastest size of 2^13 to 2^21 (EPYC, 32 MB L3).
CHUNK = 2**19


class TorchKernel:
    """A kernel of torch operations in fp32, one chunk at a time: torch.optim.AdamW(fused=True), except for padding."""

    name = "torch"

    def __init__(self) -> None:
        self._scratch = torch.empty(CHUNK)
        self.checksum: Sum = zlib_sum

    @torch.no_grad()
    def update_page(self, page: PageUpdate) -> None:
        fields, size = page.fields, self._scratch.numel()
        # Cut the parts at multiples of the chunk, so that elements outside the parts are not even converted.
        parts = [
            replace(part, start=start + part.start, end=start + part.end)
            for start in range(0, page.grad.numel(), size)
            for part in clip_ranges(page.parts, start, start + size)
        ]
        for part in parts:
            here = slice(part.start, part.end)
            stored = [stored_field(kind, fields, here) for kind in KINDS]
            master, *moments = wide = [field.read() for field in stored]
            scaled = self._scratch[: part.end - part.start].copy_(page.grad[here])
            if page.scale != 1.0:
                scaled.mul_(page.scale)
            assert not isinstance(part.hyper, Muon), "`MatrixKernel` updates matrices"
            part.hyper.update(master, moments, scaled, step=part.step)
            for kind, field, values in zip(KINDS, stored, wide, strict=True):
                field.write(values, noise=page.bits(kind, here.start))
            if page.out is not None:
                page.out[here].copy_(fields["master"][here])

    def copy(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy between tensors in host memory, on the threads that update pages: torch's would spin and slow those."""
        into.copy_(values)

    def add(
        self,
        sums: torch.Tensor,
        values: torch.Tensor | None,
        *,
        first: bool = False,
        pieces: Pieces | None = None,
    ) -> torch.Tensor:
        """Add gradients to sums, and return the partial results of the new sums. All are 1-D and contiguous.

        Args:
            sums: the sums in host memory (fp32, bf16 or fp16), changed in place with the bits of `Tensor.add_`.
            values: as many gradients; None: the sums are only measured.
            first: the gradients replace the sums.
            pieces: how the sums are measured, with one result (fp32) a piece; None: not at all, and it is empty.
        """
        if values is not None:
            sums.copy_(values) if first else sums.add_(values)
        return torch.empty(0) if pieces is None else pieces.measure(sums)
