"""Fit how memory grows with rows and tokens from three meta-tensor passes of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from offload_trainer.model.meta.allocation_trace import AllocationTrace
from offload_trainer.plan.shape import Growth

ROWS = 2  # rows of the smallest pass; with a single row, sums and repetitions over rows would not show
_NUMBERS = 64  # bytes; smaller tensors are single numbers and do not count


def levels_of(passes: Sequence[AllocationTrace], length: int) -> tuple[list[Growth], list[tuple[str, int, int]]]:
    """Return the memory after each allocation or release, and the marks.

    `passes` have rows x length, twice the rows, and twice the length. If the number of operations depends on the length
    (a chunked recurrence), only memory at marks and the maxima between them are returned.
    """
    first = passes[0]
    if len({tuple(mark[:2] for mark in one.marks) for one in passes}) > 1:
        raise ValueError("blocks run in another order for other rows")
    if len({len(one.events) for one in passes}) == 1:
        sizes = zip(*(one.events for one in passes), strict=True)
        return list(accumulate((_growth(*size, length=length) for size in sizes), initial=Growth())), first.marks
    sampled = zip(*(one.at_marks() for one in passes), strict=True)
    marks = [(what, number, 2 * place + 1) for place, (what, number, _) in enumerate(first.marks)]
    return [_fitted(*size, length=length) for size in sampled], marks


def _growth(base: int, rows: int, longer: int, *, length: int) -> Growth:
    """Return the growth of one tensor from its bytes for ROWS x length, twice the rows, and twice the length."""
    if abs(base) < _NUMBERS:
        return Growth()
    each = rows == 2 * base
    if not each and rows != base:  # it grows with rows, but not in proportion
        return _fitted(base, rows, longer, length=length)
    size = base / (ROWS if each else 1)
    if longer == base:
        return Growth(row=size) if each else Growth(fixed=size)
    if longer == 4 * base:
        return Growth(pair=size / length**2) if each else Growth(square=size / length**2)
    slope = (longer - base) / (ROWS if each else 1) / length
    rest = size - slope * length
    return Growth(row=rest, token=slope) if each else Growth(fixed=rest, position=slope)


def _fitted(base: int, rows: int, longer: int, *, length: int) -> Growth:
    """Return the growth of many tensors together: a fixed part, a part per token, and a part per pair of tokens.

    Memory that less than doubles with the length has a part per row, such as a recurrent state.
    """
    pair = (longer - rows) / (2 * ROWS * length**2)
    if pair < 0:
        token = (longer - base) / (ROWS * length)
        return Growth(fixed=2 * base - rows, row=(rows - base) / ROWS - token * length, token=token)
    token = (rows - base) / (ROWS * length) - pair * length
    return Growth(fixed=2 * base - rows, token=token, pair=pair)
