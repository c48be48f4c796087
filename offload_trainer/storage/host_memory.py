"""Host memory of exact size: aligned for direct I/O, in huge pages, and known to CUDA where there is a device.

torch's pinned allocator rounds every block up to a power of two, which for tens of gigabytes is tens of gigabytes
more; here it is one mapping of just the bytes that are needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.units import format_bytes

PAGE = 4096  # bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's mallopt(3)


def return_what_is_freed(*, above: int) -> None:
    """From now on, and for the whole process, blocks of so many bytes go back to the system when they are freed.

    glibc only; what lies at the heap's end goes back from 32 MiB on.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, 32 << 20)
        library.mallopt(_MMAP_THRESHOLD, above)


def return_now() -> None:
    """Give the system what was freed so far and is still kept (glibc only)."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def host_buffer(size: int, *, pinned: bool = False) -> torch.Tensor:
    """A zeroed uint8 tensor of `size` bytes, its start aligned to a memory page, resident as it is touched.

    `pinned` registers it with CUDA, so that copies to and from the device are fast and asynchronous. TrainerError
    where the system has no such memory left.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Private, since most systems give huge pages to private memory only.
        mapping = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TrainerError(f"{format_bytes(size)} of host memory cannot be had: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: the same memory, a little slower
    return _tensor(mapping, size, pinned=pinned)


def memory_file(size: int) -> int:
    """Descriptor of `size` bytes of zeros that several processes map, and that are gone with the last of them.

    It has no name and no filesystem, whose size (/dev/shm: 64 MB in a container) would bound it; the others open
    /proc/PID/fd/DESCRIPTOR. TrainerError where the system has no such memory left.
    """
    try:
        descriptor = os.memfd_create("offload-trainer")
        os.fchmod(descriptor, 0o600)  # the kernel gives it to everybody
        os.ftruncate(descriptor, -(-size // PAGE) * PAGE)
    except OSError as error:
        raise TrainerError(f"{format_bytes(size)} of shared memory cannot be had: {error.strerror}") from error
    return descriptor


def mapped(descriptor: int, size: int, *, pinned: bool = False) -> torch.Tensor:
    """The uint8 bytes of a `memory_file`, resident as they are touched; `pinned` as above."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = mmap.mmap(descriptor, -(-size // PAGE) * PAGE, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise TrainerError(f"{format_bytes(size)} of shared memory cannot be mapped: {error.strerror}") from error
    return _tensor(mapping, size, pinned=pinned)


def _tensor(mapping: mmap.mmap, size: int, *, pinned: bool) -> torch.Tensor:
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)[:size]
    if pinned:
        pin(buffer)
    return buffer


def pin(buffer: torch.Tensor) -> None:
    """Register memory with CUDA for as long as its storage lives. TrainerError where CUDA cannot."""
    address, size = buffer.data_ptr(), buffer.numel()
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, size, 0))
    if code:
        raise TrainerError(
            f"CUDA cannot pin {format_bytes(size)} of host memory (error {code}): too little is free, or the driver "
            "allows no more, as under WSL2; keep less in RAM (--ram-fraction, --params nvme)"
        )
    # The mapping lives as long as the tensor's storage; CUDA must let go of it before.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)
