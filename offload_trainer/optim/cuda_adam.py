"""The optimizer update for state in GPU memory: adam.cu, compiled at run time for the GPU that is present.

Its results equal those of the CPU kernel bit for bit. `choose_cuda_kernel` checks this on the GPU before training
starts. If the check or the compilation fails, all optimizer state stays in RAM and on NVMe; there is no slower GPU
fallback. Keep the ctypes structures below in step with the structs of adam.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.optim.kernel_api import Kernel, ParamRange, RoundingNoise
from offload_trainer.optim.kernels import matches_bitwise
from offload_trainer.optim.moments import Bits, cells, dynamic_map, lower_table, nearest_table
from offload_trainer.optim.nvrtc import Gpu, gpu_of
from offload_trainer.optim.rules import TYPES, AdamStep, step_constants
from offload_trainer.optim.torch_adam import TorchKernel
from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, MOMENTS, StateFormat, scales_of
from offload_trainer.storage.tensorfile import DTYPES

SOURCE = Path(__file__).with_name("adam.cu")
_WARPS, _LANES, _PARTS = 8, 32, 64  # must equal WARPS, LANES and PARTS in adam.cu


_FIT = set[torch.device]()  # devices on which the kernel has passed the comparison in this process


def choose_cuda_kernel(place: torch.device, beside: Kernel) -> tuple[CudaKernel | None, str]:
    """Return the kernel for pages on the GPU `place`, or None, together with a sentence for the log.

    The kernel is None, and the sentence gives the reason, if no build of it matches `beside` bit for bit. `beside` is
    the CPU kernel that updates the other pages: results must not depend on the placement of the state.
    """
    try:
        kernel = _checked_kernel(place, beside)
    except Exception as error:
        return None, f"The update on {place}: not used, so that no state can live there: {_reason(error)}"
    gpu = kernel.gpu
    return kernel, f"The update on {gpu.place}: compiled for sm_{gpu.capability}, checked to give the CPU's bits."


def why_no_cuda_kernel(place: torch.device) -> str | None:
    """Return why no optimizer state can be placed on the GPU `place`, or None if its kernel matches the CPU's results.

    It never raises: a command that finds the GPU unusable for state places all of it in RAM and on NVMe.
    """
    if place in _FIT:
        return None
    try:
        _checked_kernel(place, TorchKernel())  # all CPU kernels give the same bits as this one
    except Exception as error:
        return _reason(error)
    _FIT.add(place)
    return None


def _checked_kernel(place: torch.device, beside: Kernel) -> CudaKernel:
    """Compile the kernel for `place` and compare it with `beside` there. Errors of torch and the driver propagate."""
    gpu = gpu_of(place)
    for fuses in (True, False):  # the CPU kernel uses FMA or not, depending on the CPU (FUSES in native/numbers.h)
        kernel = CudaKernel(gpu, fuses=fuses)
        if matches_bitwise(beside, kernel, device=gpu.place, several_pages=True):
            return kernel
    raise TrainerError(f"its results differ from those of the CPU's {beside.name} kernel in their last bits")


def _reason(error: Exception) -> str:
    """Return an error in one line, with its type if it comes from a driver, a library or torch."""
    words = " ".join(str(error).split())
    return words if isinstance(error, TrainerError) else f"{type(error).__name__}: {words}"[:500]


class _Part(ctypes.Structure):
    """adam.cu's Part."""

    _fields_ = (("start", ctypes.c_uint32), ("end", ctypes.c_uint32), ("step", AdamStep))


class _Moment(ctypes.Structure):
    """adam.cu's Moment."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("keys", ctypes.c_uint32 * 2),
    )


class _Page(ctypes.Structure):
    """adam.cu's Page."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("moments", _Moment * 2),
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("nearest", ctypes.c_void_p),
        ("lower", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
        ("first", ctypes.c_uint64),
        ("grad_type", ctypes.c_uint32),
        ("out_type", ctypes.c_uint32),
    )


class _Pages(ctypes.Structure):
    """adam.cu's Pages."""

    _fields_ = (
        ("page", _Page),
        ("apart", ctypes.c_uint64),
        ("elements", ctypes.c_uint32),
        ("begin", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("part", _Part * _PARTS),
    )


def defines(*, fuses: bool) -> dict[str, int]:
    """Return the macros that adam.cu is compiled with; `fuses` selects FMA, as the CPU kernel uses it or not."""
    return {"FUSES": int(fuses), "PAGES_BYTES": ctypes.sizeof(_Pages)}


class CudaKernel:
    """The kernel adam.cu. It launches on torch's current stream, once per 64 parts, and does not synchronise.

    It also updates several pages of equal size that follow each other in their unit. Their `fields` are 2-D: row i is
    the field of page i, all rows are equally far apart, and `grad`, `out` and `parts` cover all pages.

    Raises:
        TrainerError: adam.cu cannot be compiled or loaded.
    """

    name = "cuda"

    def __init__(self, gpu: Gpu, *, fuses: bool) -> None:
        self.gpu = gpu
        self._kernels = gpu.load(SOURCE, list(map(str, ADAMW_FORMATS)), defines=defines(fuses=fuses))
        self._maps = [dynamic_map(signed).to(gpu.place) for signed in (True, False)]
        self._tables = [table.to(gpu.place) for table in (nearest_table(True), lower_table(), cells())]

    def update_page(
        self,
        fields: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor | None,
        parts: Sequence[ParamRange],
        *,
        format: StateFormat,
        scale: float,
        noise: RoundingNoise | None,
    ) -> None:
        self._check(fields, grad, out, parts, format=format)
        assert noise is not None or not format.moments.stochastic
        master = fields["master"]
        pages = _Pages(apart=_apart(master), elements=master.shape[-1])
        page = pages.page
        page.grad, page.grad_type = grad.data_ptr(), TYPES[grad.dtype]
        page.master = master.data_ptr()
        if out is not None:
            page.out, page.out_type = out.data_ptr(), TYPES[out.dtype]
        page.nearest, page.lower, page.cells = (table.data_ptr() for table in self._tables)
        for place, table, moment in zip(page.moments, self._maps, MOMENTS, strict=True):
            place.values, place.map = fields[moment].data_ptr(), table.data_ptr()
            if format.moments.block:
                place.scales = fields[scales_of(moment)].data_ptr()
            bits = Bits() if noise is None else noise.bits(moment)
            page.first, place.keys = bits.first, bits.keys
        for start in range(0, len(parts), _PARTS):
            some = parts[start : start + _PARTS]
            pages.begin, pages.parts = some[0].start, len(some)
            for slot, part in zip(pages.part, some, strict=False):
                slot.start, slot.end = part.start, part.end
                slot.step = step_constants(part.hyper, scale=scale, step=part.step)
            blocks = -(-(some[-1].end - some[0].start) // (BLOCK_8BIT * _WARPS))
            self.gpu.launch(self._kernels[str(format)], pages, blocks=blocks, threads=_WARPS * _LANES)

    def _check(
        self,
        fields: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor | None,
        parts: Sequence[ParamRange],
        *,
        format: StateFormat,
    ) -> None:
        """Assert the sizes, dtypes and alignment that adam.cu relies on; nothing else checks the addresses."""
        master = fields["master"]
        n, each = master.numel(), master.shape[-1]
        assert n < 2**31
        assert master.dim() == 1 or each % BLOCK_8BIT == 0
        for name, field in format.fields.items():
            assert fields[name].shape[-1] >= field.entries(each), name
            assert fields[name].shape[:-1] == master.shape[:-1], name
            assert fields[name].stride(-1) == 1, name
            assert _apart(fields[name]) == _apart(master), name
            assert fields[name].dtype is DTYPES[field.dtype], name
        flat = [grad, *([] if out is None else [out])]
        assert all(tensor.is_contiguous() and tensor.numel() >= n for tensor in flat)
        assert all(tensor.device == self.gpu.place for tensor in (*fields.values(), *flat))
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (*fields.values(), *flat))
        assert _apart(master) % 16 == 0
        end = 0
        for part in parts:
            assert end <= part.start < part.end <= n
            assert part.start % BLOCK_8BIT == 0
            assert part.end % BLOCK_8BIT == 0 or part.end == n
            end = part.end


def _apart(field: torch.Tensor) -> int:
    """Return the bytes from a page's field to the next page's; 0 if there is only one page."""
    return field.stride(0) * field.element_size() if field.dim() == 2 else 0
