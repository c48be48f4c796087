"""The CPU update kernel in C++ (native/): one call reads gradients, updates the state and writes new 16-bit weights.

AdamW moves 28 bytes per element through memory with fp32 moments, 20 with bf16 and 16 with 8-bit ones. The results
equal those of `TorchKernel` bit for bit. The library also computes the checksums of state on NVMe.
"""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from offload_trainer import numa
from offload_trainer.errors import TrainerError
from offload_trainer.optim.kernel_api import Kernel, PageUpdate
from offload_trainer.optim.kernel_cache import built, prebuilt
from offload_trainer.optim.moments import Bits, cells, dynamic_map, lower_table, nearest_table
from offload_trainer.optim.prebuilt_kernels import FLAGS, SOURCE
from offload_trainer.optim.rules import TYPES, AdamStep, step_constants
from offload_trainer.plan.tiered.state_formats import MOMENTS


def openmp_parallel() -> int | None:
    """Return the address of `GOMP_parallel` in the libgomp whose threads torch computes with; None if none is found.

    Of several in this process it is the one in torch's own directory.
    """
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libgomp" in line}
        own = {path for path in mapped if Path(path).is_relative_to(Path(torch.__file__).parent)}
        (path,) = own or mapped
        return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, ValueError, AttributeError):  # not readable, not exactly one, or another runtime of that name
        return None


class NativeLibrary:
    """The compiled functions of native/. They run on a persistent thread pool.

    `parallel` is OpenMP's function that runs another on torch's threads, or None.

    `level` is the x86-64 level of a prebuilt library, and empty if it was compiled for this CPU; `misfit` then says why
    no prebuilt one was used, if the package has any.
    """

    def __init__(self, *, use_prebuilt: bool = True) -> None:
        """Load the prebuilt library if one fits, otherwise compile it for this CPU.

        Raises:
            TrainerError: the library cannot be built; the message has the compiler's output.
        """
        self.level = self.misfit = ""
        found = None
        try:
            if use_prebuilt and (path := prebuilt(SOURCE, flags=FLAGS)):
                found, self.level = _load(path), path.stem.partition(".")[2]
        except TrainerError as error:
            self.misfit = str(error)
        try:
            self.functions = found or _load(built(SOURCE, flags=FLAGS))
        except TrainerError as error:
            raise TrainerError(f"{error}; {self.misfit}" if self.misfit else str(error)) from error
        self._started = (0, 0)
        self.parallel = openmp_parallel()

    def threads(self) -> int:
        """Return the number of threads, torch's count including the caller, and start them if necessary.

        On several NUMA nodes threads are distributed by the nodes' CPUs. A thread is bound to its node and not to one
        CPU, because other processes may use that CPU.
        """
        threads = torch.get_num_threads()
        wanted = os.getpid(), threads  # a forked child has no threads yet
        if self._started != wanted:
            self._started = wanted
            nodes = numa.nodes()
            if len(nodes) > 1:
                self._start_threads(threads, nodes)
        return threads

    def _start_threads(self, threads: int, nodes: Sequence[frozenset[int]]) -> None:
        before = os.sched_getaffinity(0)
        try:
            for helpers, node in enumerate(numa.spread_threads(threads, nodes)[1:], 1):
                os.sched_setaffinity(0, node)  # a new thread inherits the affinity of its creator
                self.functions.hire_threads(ctypes.c_int32(helpers))
        finally:
            os.sched_setaffinity(0, before)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))  # ctypes releases the GIL during calls
    except OSError as error:
        raise TrainerError(
            f"{path}: cannot be loaded: {error}. Where the cache's filesystem is mounted noexec, name another "
            "directory with OFFLOAD_TRAINER_CACHE"
        ) from error


class NativeKernel:
    """The compiled CPU kernel of native/. Raises TrainerError if it cannot be built."""

    name = "native"

    def __init__(self, *, use_prebuilt: bool = True) -> None:
        self.library = NativeLibrary(use_prebuilt=use_prebuilt)
        self._update = self.library.functions.update_page
        self._sum = self.library.functions.page_sum
        self._sum.restype = ctypes.c_int64

    def update_page(self, page: PageUpdate) -> None:
        fields, grad, out, n = page.fields, page.grad, page.out, page.grad.numel()
        sizes = {name: field.entries(n) for name, field in page.format.fields.items()}
        for name, tensor in (*fields.items(), ("grad", grad), *([] if out is None else [("out", out)])):
            assert tensor.is_contiguous(), name
            assert tensor.numel() == sizes.get(name, n), name
        given = _Page(
            **{name: tensor.data_ptr() for name, tensor in fields.items()},
            grad=grad.data_ptr(),
            out=None if out is None else out.data_ptr(),
            moments=TYPES[fields["exp_avg"].dtype],
            grad_type=TYPES[grad.dtype],
            out_type=TYPES[None if out is None else out.dtype],
        )
        for moment in MOMENTS:
            setattr(given, f"{moment}_noise", page.bits(moment) or Bits())
        if page.format.moments.block:
            given.tables = ctypes.pointer(tables()[0])
        found = [
            _Part(part.start, part.end, step_constants(part.hyper, scale=page.scale, step=part.step))
            for part in page.parts
            if part.end > part.start
        ]
        threads = ctypes.c_int32(self.library.threads())
        self._update(ctypes.byref(given), (_Part * len(found))(*found), ctypes.c_int64(len(found)), threads)

    def page_sum(self, data: torch.Tensor) -> int:
        """Return the same as `zlib_sum`, or -1 if this CPU has no carry-less multiplication."""
        return int(self._sum(ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.numel() * data.itemsize)))


# -- checksums -------------------------------------------------------------------------------------------------------

# CRC-32 with zlib's polynomial, without the inversions before and after, so that bytes that are all zero have the
# checksum 0. The compiled function is several times as fast as zlib.
Sum = Callable[[torch.Tensor], int]  # takes a contiguous uint8 tensor in host memory


def sum_with(kernel: Kernel) -> Sum:
    """Return the native kernel's checksum function if it agrees with zlib's on this CPU, otherwise `zlib_sum`."""
    if isinstance(kernel, NativeKernel):
        tried = torch.arange(1000, dtype=torch.int16).view(torch.uint8)
        if all(kernel.page_sum(tried[:size]) == zlib_sum(tried[:size]) for size in (1, 128, 2000)):
            return kernel.page_sum
    return zlib_sum


def zlib_sum(data: torch.Tensor) -> int:
    return zlib.crc32(data.numpy().data, 0xFFFFFFFF) ^ 0xFFFFFFFF


# -- structures of adam.cpp ------------------------------------------------------------------------------------------


class _Part(ctypes.Structure):
    """adam.cpp's Part."""

    _fields_ = (("start", ctypes.c_int64), ("end", ctypes.c_int64), ("step", AdamStep))


class Tables(ctypes.Structure):
    """adam.cpp's Tables."""

    _fields_ = (
        ("values", ctypes.c_void_p * 2),
        ("planes", ctypes.c_void_p * 2),
        ("nearest", ctypes.c_void_p),
        ("lower", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
    )


class _Page(ctypes.Structure):
    """adam.cpp's Page."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("exp_avg_scales", ctypes.c_void_p),
        ("exp_avg_sq_scales", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tables", ctypes.POINTER(Tables)),
        ("exp_avg_noise", Bits),
        ("exp_avg_sq_noise", Bits),
        ("moments", ctypes.c_int32),
        ("grad_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )


@functools.cache
def tables() -> tuple[Tables, tuple[torch.Tensor, ...]]:
    """Return the tables of the 8-bit format, and the tensors that own their memory."""
    steps = cells() * torch.tensor([1.0, 2.0**-17])
    steps[0, 1] = 0.0
    nearest = torch.zeros(2, 2**15, dtype=torch.int32)  # indexed by the upper 16 bits, which include the sign
    nearest[:, :0x3F81] = nearest_table(True)
    values = [dynamic_map(False), dynamic_map(True)]
    planes = [table.view(torch.uint8).view(256, 4).T.contiguous() for table in values]
    kept = (*values, *planes, nearest, lower_table(), steps)
    at = [tensor.data_ptr() for tensor in kept]
    pair = ctypes.c_void_p * 2
    return Tables(pair(*at[:2]), pair(*at[2:4]), *at[4:]), kept
