"""Host memory: buffers of exact size, page-aligned for direct I/O, in huge pages and pinned, and the heap of malloc.

torch's pinned allocator rounds every block up to a power of two, which wastes up to half of the memory.
"""

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from offload_trainer.common.errors import TrainerError
from offload_trainer.common.units import format_bytes
from offload_trainer.plan.memory import LONG, mapped_from

PAGE = 4096  # bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's mallopt(3)
_NEVER, _MAPPINGS = (1 << 31) - 1, 65536  # the largest threshold, and glibc's default limit of mappings


def set_malloc_threshold(engine: str, *, row: int = 0) -> None:
    """Make this process return freed blocks to the system immediately from a size on; call it before building `engine`.

    The size is the plan's `mapped_from` for rows of `row` tokens (0: unknown). The tiered engine always uses it, unless
    it keeps freed memory (`Heap`). Other engines keep glibc's default, because short rows would take longer otherwise,
    except for long rows on a CPU. Works with glibc only. Free memory at the end of the heap is returned from 32 MiB on.
    """
    if engine == "tiered" or (row >= LONG and not torch.cuda.is_available()):
        _glibc("mallopt", _TRIM_THRESHOLD, 32 << 20)
        _glibc("mallopt", _MMAP_THRESHOLD, mapped_from(row))
        _glibc("mallopt", _MMAP_MAX, _MAPPINGS)


def return_now() -> None:
    """Return memory that was freed but is still cached by the allocator to the system (glibc only)."""
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    with suppress(AttributeError):
        getattr(ctypes.CDLL(None), function)(*arguments)


class Heap:
    """The heap of malloc during training: freed memory is returned to the system, or kept for reuse up to a limit.

    The system zeroes each page that it hands out again: 1.2 of the 8 core-seconds of a step of GPT-2 small with 1,024
    tokens on two cores. A heap that keeps memory has holes, which the plan counts.
    """

    def __init__(self) -> None:
        self._limit = 0

    def keep(self, limit: int) -> None:
        """Keep freed memory (glibc only) up to `limit` bytes of private memory, until `set_malloc_threshold`."""
        self._limit = limit
        _glibc("mallopt", _TRIM_THRESHOLD, _NEVER)
        _glibc("mallopt", _MMAP_MAX, 0)  # large blocks come from the heap, too, instead of from mappings

    def trim(self) -> None:
        """Return freed memory to the system, unless it is kept. Private is what is resident without files' pages."""
        if self._limit:
            resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
            if (resident - shared) * PAGE <= self._limit:
                return
        return_now()


def host_buffer(size: int, *, pinned: bool = False, descriptor: int = -1) -> torch.Tensor:
    """Return a zeroed uint8 tensor of `size` bytes, aligned to a memory page. Its pages become resident when touched.

    `pinned` registers it with CUDA, so that copies to and from the device are fast and asynchronous. `descriptor`: map
    this `memory_file` instead. Raises TrainerError if the system has too little memory.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    private = descriptor < 0  # Most systems give huge pages to private memory only.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if private else mmap.MAP_SHARED
    try:
        mapping = mmap.mmap(descriptor, -(-size // PAGE) * PAGE, flags=flags)
    except OSError as error:
        raise TrainerError(f"{format_bytes(size)} of host memory cannot be had: {error.strerror}") from error
    if private:
        with suppress(OSError):  # a kernel without huge pages: the memory works the same, slightly slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)[:size]
    if pinned:
        pin(buffer)
    return buffer


def memory_file(size: int) -> int:
    """Return a descriptor of `size` zero bytes that several processes can map and that vanish with the last of them.

    It is a memfd: it has no name and is in no filesystem whose size (/dev/shm: 64 MB in a container) would limit it.
    Other processes open /proc/PID/fd/DESCRIPTOR. Raises TrainerError if the system has too little memory.
    """
    try:
        descriptor = os.memfd_create("offload-trainer")
        os.fchmod(descriptor, 0o600)  # memfd_create makes the file accessible to all users
        os.ftruncate(descriptor, -(-size // PAGE) * PAGE)
    except OSError as error:
        raise TrainerError(f"{format_bytes(size)} of shared memory cannot be had: {error.strerror}") from error
    return descriptor


def pin(buffer: torch.Tensor) -> None:
    """Register a buffer with CUDA as pinned memory while its storage lives. Raises TrainerError if CUDA refuses."""
    address, size = buffer.data_ptr(), buffer.numel()
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(address, size, 0)):
        raise TrainerError(
            f"CUDA cannot pin {format_bytes(size)} of host memory (error {code}): too little is free, or the driver "
            "allows no more, as under WSL2; keep less in RAM (--ram-fraction, --params nvme)"
        )
    # The mapping lives as long as the tensor's storage, and CUDA must unregister it before it is unmapped.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)
