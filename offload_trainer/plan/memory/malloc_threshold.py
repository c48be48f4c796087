"""Choose glibc's mmap threshold for runs that compute on the CPU. `storage/host_memory.py` applies it; plans use it.

glibc maps allocations of `mapped_from` bytes and more separately and returns them to the system when they are freed.
By default it raises that threshold up to 32 MiB as such blocks are freed, and smaller blocks leave a fragmented heap.
Autograd's tensors are in that range. Below the threshold their memory is reused, because fresh pages cost more time
than the arithmetic on them. For long rows the arithmetic (attention alone) outweighs fresh pages from 1 MiB on.
"""

from __future__ import annotations

LONG = 8192  # tokens in a row from which on the lower threshold applies
_LARGE, _LARGE_OF_LONG_ROWS = 10 << 20, 1 << 20


def mapped_from(row: int) -> int:
    """Return the mmap threshold in bytes for rows of `row` tokens."""
    return _LARGE_OF_LONG_ROWS if row >= LONG else _LARGE
