"""The optimizer update for state in GPU memory: launches of triton_adam.py's functions, which have the CPU's bits.

`choose_cuda_kernel` compares them on the GPU before training starts. If Triton cannot run there or differs, all
optimizer state stays in RAM and on NVMe. Triton compiles a function at its first launch with each combination of
dtypes, in seconds, and keeps the code for later processes (TRITON_CACHE_DIR, by default in this package's cache).
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from offload_trainer.common.errors import TrainerError
from offload_trainer.optim.kernel_api import PageUpdate
from offload_trainer.optim.kernel_cache import private_directory
from offload_trainer.optim.kernels import matches_bitwise
from offload_trainer.optim.moments import Bits
from offload_trainer.optim.norms import norm_of, square_root
from offload_trainer.optim.rules import AdamStep, step_constants
from offload_trainer.plan.communication import piece_width
from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import EXP_AVG, KINDS, MASTER, MOMENTS, scales_of
from offload_trainer.storage.tensorfile import DTYPES

_PARTS = 64  # parts of a launch, and one that marks the end; a power of two
_NEVER = 2**31 - 1  # the start and the end of parts that are not used
_ROWS = 32  # numbers that one thread of `add_gradient` adds; a power of two
_CURRENT = torch.device("cuda")


class _Part(ctypes.Structure):
    _fields_ = (("start", ctypes.c_int32), ("end", ctypes.c_int32), ("step", AdamStep))


_UNUSED = (_Part * _PARTS)(*[_Part(_NEVER, _NEVER)] * _PARTS)  # copied, since 64 new ones take 100 us


class _Table(ctypes.Structure):
    """The numbers of a launch, as triton_adam.py reads them."""

    _fields_ = (
        ("first", ctypes.c_uint64),  # index of the first page's first element in its unit
        ("apart", ctypes.c_int32),  # fp32 words from a page's state to the next page's
        ("elements", ctypes.c_int32),  # elements of each page
        ("begin", ctypes.c_int32),  # start of the first part
        ("keys", (ctypes.c_uint32 * 2) * 2),  # keys of random bits: for masters and second moments, for first moments
        ("part", _Part * _PARTS),  # ascending, counted in elements of all pages
    )


def constants(*, whole: bool, rows: int = 4) -> dict[str, int]:
    """Return the constants that triton_adam.py's function is compiled with."""
    return {"WHOLE": whole, "PARTS": _PARTS, "ROWS": rows, "COLUMNS": BLOCK_8BIT}


class CudaKernel:
    """The update in Triton. It launches on torch's current stream, once per 63 parts, and does not synchronise.

    It also updates several pages of equal size that follow each other in their unit. Their `fields` are 2-D: row i is
    the field of page i, all rows are equally far apart, and `grad`, `out` and `parts` cover all pages.
    """

    name = "cuda"
    adds_gradients = False  # True if `add_gradient` matches torch bit for bit on this device

    def __init__(self, device: torch.device, *, rows: int = 4) -> None:
        """Prepare for the GPU `device`, with `rows` (a power of two) blocks of 256 a program. Raises TrainerError."""
        with suppress(TrainerError):  # then Triton's code is kept where Triton says
            os.environ.setdefault("TRITON_CACHE_DIR", str(private_directory("triton")))
        try:
            import triton

            from offload_trainer.optim import triton_adam
        except ImportError as error:
            raise TrainerError(
                f"Triton, which comes with torch's wheels for CUDA, cannot be imported: {error}"
            ) from error
        self.device, self.version, self._rows = device, triton.__version__, rows
        self._function, self._add, self._lanes = triton_adam.adamw, triton_adam.add_gradient, 64 * rows

    def update_page(self, page: PageUpdate) -> None:
        self._check(page)
        fields, parts, scale = page.fields, page.parts, page.scale
        assert page.noise is not None or not page.format.stochastic
        master = fields["master"]
        table = _Table(apart=_apart(master) // 4, elements=master.shape[-1])
        for keys, kind in zip(table.keys, (MASTER, EXP_AVG), strict=True):
            bits = page.bits(kind) or Bits()
            table.first, keys[:] = bits.first, bits.keys
        names = [*KINDS, *(scales_of(moment) for moment in MOMENTS)]
        tensors = [*(fields.get(name) for name in names), page.grad, page.out]
        given = [_without_bf16(tensor) for tensor in tensors]
        for start in range(0, len(parts), _PARTS - 1):
            some = parts[start : start + _PARTS - 1]
            table.begin = some[0].start
            table.part = _UNUSED
            for number, p in enumerate(some):
                table.part[number] = _Part(p.start, p.end, step_constants(p.hyper, scale=scale, step=p.step))
            self._launch(table, given, blocks=-(-(some[-1].end - some[0].start) // BLOCK_8BIT), end=some[-1].end)

    def _launch(self, table: _Table, given: Sequence[torch.Tensor | None], *, blocks: int, end: int) -> None:
        numbers = torch.frombuffer(bytearray(table), dtype=torch.int32)
        if self.device.type == "cuda":  # pinned memory lets the copy run asynchronously
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        with torch.cuda.device_of(numbers):
            sizes = constants(whole=end % BLOCK_8BIT == 0, rows=self._rows)
            launch = self._function[(-(-blocks // self._rows),)]
            launch(numbers, *given, **sizes, num_warps=4, enable_fp_fusion=False)

    def add_gradient(self, sums: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Add `values` to `sums` (fp32), both 1-D on the device, and return the new sums' ordered norm (0-dim)."""
        parts, piece = sums, piece_width(sums.numel(), ordered=True)
        with torch.cuda.device_of(sums):
            while parts is sums or parts.numel() > 1:
                width = 1
                while width * _ROWS < piece:  # shorter pieces are padded with zeros, which changes nothing
                    width *= _ROWS
                out = sums.new_empty(-(-parts.numel() // (width * _ROWS)) * width)
                given = _without_bf16(values) if parts is sums else None
                sizes = {"SQUARES": parts is sums, "ROWS": _ROWS, "LANES": self._lanes}
                launch = self._add[(-(-out.numel() // self._lanes),)]
                launch(parts, given, out, parts.numel(), width, **sizes, num_warps=4, enable_fp_fusion=False)
                parts, piece = out, width if width > 1 else out.numel()  # at last the pieces' sums
        return square_root(parts[0])

    def _check(self, page: PageUpdate) -> None:
        """Assert the sizes, dtypes and alignment that the function relies on; nothing else checks the addresses."""
        fields, master = page.fields, page.fields["master"]
        n, each = master.numel(), master.shape[-1]
        assert n < 2**31
        assert master.dim() == 1 or each % BLOCK_8BIT == 0
        for name, field in page.format.fields.items():
            assert fields[name].shape[-1] >= field.entries(each), name
            assert fields[name].shape[:-1] == master.shape[:-1], name
            assert fields[name].stride(-1) == 1, name
            assert _apart(fields[name]) == _apart(master), name
            assert fields[name].dtype is DTYPES[field.dtype], name
        flat = [page.grad, *([] if page.out is None else [page.out])]
        assert all(tensor.is_contiguous() and tensor.numel() >= n for tensor in flat)
        assert all(tensor.device == self.device for tensor in (*fields.values(), *flat))
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (*fields.values(), *flat))
        assert _apart(master) % 16 == 0
        assert _apart(master) // 4 < 2**31
        end = 0
        for part in page.parts:
            assert end <= part.start < part.end <= n
            assert part.start % BLOCK_8BIT == 0
            assert part.end % BLOCK_8BIT == 0 or part.end == n
            end = part.end


def _apart(field: torch.Tensor) -> int:
    """Return the bytes from a page's field to the next page's; 0 if there is only one page."""
    return field.stride(0) * field.element_size() if field.dim() == 2 else 0


def _without_bf16(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.view(torch.int16) if tensor is not None and tensor.dtype is torch.bfloat16 else tensor


def choose_cuda_kernel(device: torch.device) -> tuple[CudaKernel | None, str]:
    """Return the kernel for pages on the GPU `device` with a sentence for the log, or None and the reason in one line.

    It never raises. The kernel is None if it cannot be compiled or is not bit-identical to the CPU's: results must not
    depend on the placement of the state. The reason has the error's type if it is a driver's or a library's.
    """
    try:
        kernel = _checked_kernel(torch.device("cuda", torch.cuda.current_device()) if device == _CURRENT else device)
    except Exception as error:
        words = " ".join(str(error).split())
        return None, words if isinstance(error, TrainerError) else f"{type(error).__name__}: {words}"[:500]
    words = f"The update on {kernel.device}: compiled by Triton {kernel.version}, checked to give the CPU's bits."
    if not kernel.adds_gradients:
        words += " Gradients there are added by torch's slower operations."
    return kernel, words


@functools.cache  # a plan asks before its run
def _checked_kernel(device: torch.device) -> CudaKernel:
    """Return the kernel for `device` after a comparison with torch's on the CPU, which each CPU kernel has passed."""
    if torch.version.hip:
        raise TrainerError("the kernel was tried on NVIDIA's GPUs only, and this torch was built for ROCm")
    kernel = CudaKernel(device)
    if not matches_bitwise(kernel, gpu=device):  # a CPU without FMA differs, for example
        raise TrainerError("its results differ from those of the CPU's torch kernel in their last bits")
    with suppress(Exception):  # Triton's
        kernel.adds_gradients = _adds_like_torch(kernel)
    return kernel


def _adds_like_torch(kernel: CudaKernel) -> bool:
    """Return whether the kernel adds and measures gradients with the bits of torch's operations on the CPU."""
    random = torch.Generator().manual_seed(3)
    for count, dtype in ((70_001, torch.bfloat16), (1003, torch.float16), (33, torch.float32)):
        size = torch.empty(count).uniform_(-10, 5, generator=random).exp_()
        expected, more = torch.randn(2, count, generator=random) * size
        sums, given = expected.to(kernel.device, copy=True), more.to(dtype)
        found = kernel.add_gradient(sums, given.to(kernel.device))
        norm = norm_of(expected.add_(given), ordered=True)
        if not (torch.equal(found.cpu(), norm) and torch.equal(sums.cpu(), expected)):
            return False
    return True
