"""From what passes of three sizes hold to how it grows with rows and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from offload_trainer.model.held import Held
from offload_trainer.plan.activations import Growth

ROWS = 2  # of the smallest pass; one row alone is summed and repeated nowhere
_NUMBERS = 64  # bytes: below it single numbers are, which nobody plans


def levels_of(passes: Sequence[Held], length: int) -> tuple[list[Growth], list[tuple[str, int, int]]]:
    """What is held after each event, and the marks. Passes: rows x length, twice the rows, twice the length.

    Where another length makes other operations (a recurrence in pieces), only at marks and at the most between them.
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
    """Of one tensor, from its bytes for ROWS x length, for twice the rows and for twice the length."""
    if abs(base) < _NUMBERS:
        return Growth()
    each = rows == 2 * base
    if not each and rows != base:  # some of it grows with rows
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
    """The same of many tensors together: what is fixed, grows with tokens, and with pairs of them.

    What less than doubles in rows twice as long has a share that each row has, whatever its length: a state.
    """
    pair = (longer - rows) / (2 * ROWS * length**2)
    if pair < 0:
        token = (longer - base) / (ROWS * length)
        return Growth(fixed=2 * base - rows, row=(rows - base) / ROWS - token * length, token=token)
    token = (rows - base) / (ROWS * length) - pair * length
    return Growth(fixed=2 * base - rows, token=token, pair=pair)
