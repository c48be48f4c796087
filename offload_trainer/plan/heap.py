"""How the heap of a CPU that computes is kept: the rule, which `engine/cpu_heap.py` carries out and plans count with.

glibc takes blocks of `mapped_from` bytes and more from the system by themselves, and gives them back when they are
freed. Left alone it raises that bound up to 32 MiB as blocks are freed, and keeps what is below in a heap of holes.
What autograd makes and frees is between: below the bound it is used again, since fresh pages cost more than the
arithmetic in them. A long row's values cost so much arithmetic, in attention alone, that fresh pages are little from
1 MiB on.
"""

from __future__ import annotations

LONG = 8192  # tokens of a row
_LARGE, _LARGE_OF_LONG_ROWS = 10 << 20, 1 << 20


def mapped_from(row: int) -> int:
    """Bytes from which a block is mapped by itself, where rows have `row` tokens."""
    return _LARGE_OF_LONG_ROWS if row >= LONG else _LARGE
