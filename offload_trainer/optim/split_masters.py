"""Split fp32 master weights into bf16 weights and 16-bit remainders, and join them again bit for bit.

The bf16 weights are needed for the forward in any case, so a master then costs 2 bytes instead of 4.

    master (fp32) ──split──> weight (bf16, to nearest even), remainder (lower half), tie count (per 256 elements)
    weight, remainder, tie count ──join──> the same master, bit for bit

A weight is the upper half of its master, plus one if the lower half is above the midpoint, or at the midpoint with an
odd upper half. The lower half tells whether the weight was rounded up, except at the midpoint, where the weight is even
in both cases. A master at the midpoint that was rounded down is called a tie here: one in 131072 for random lower
halves. Each block of 256 has a count of its ties. If it is not 0, the block's first remainders hold the positions of
the ties, and the remainders that were there before are stored in the places of later ties, in the same order. A tie's
own remainder is known, so nothing is lost.

The weight of a NaN is the upper half made quiet, as the kernels round it. Arithmetic only produces quiet NaNs, which
are restored bit for bit. The functions here are the reference; native/remainders.h and adam.cu compute the same bits
faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import StateFormat

BLOCK = BLOCK_8BIT  # elements that share a tie count
_PIECE = 2**16  # elements that are processed at a time, so that they stay in the cache; a multiple of BLOCK
_MIDDLE, _INFINITY, _MAGNITUDE = 0x8000, 0x7F800000, 0x7FFFFFFF


def split(master: torch.Tensor, weights: torch.Tensor, remainders: torch.Tensor, ties: torch.Tensor) -> None:
    """Split `master` (fp32[n]) into `weights` (bf16[n]), `remainders` (int16[n]) and `ties` (int16[ceil(n / 256)])."""
    for start in range(0, master.numel(), _PIECE):
        piece = slice(start, min(start + _PIECE, master.numel()))
        words = master[piece].view(torch.int32)
        upper, nan = words >> 16, (words & _MAGNITUDE) > _INFINITY
        rounded = (words + 0x7FFF + (upper & 1)) >> 16
        weights[piece].view(torch.int16).copy_(torch.where(nan, upper | 0x40, rounded))
        lower = (words << 16) >> 16  # sign-extended, like int16
        down = ((words & 0x1FFFF) == _MIDDLE) & ~nan
        places = down.nonzero().view(-1)
        counts = torch.bincount(places // BLOCK, minlength=-(-words.numel() // BLOCK))
        ties[_blocks(piece)].copy_(counts)
        if places.numel():
            for block in counts.nonzero().view(-1).tolist():
                here = slice(block * BLOCK, (block + 1) * BLOCK)
                _list_ties(lower[here], down[here])
        remainders[piece].copy_(lower)


def join(weights: torch.Tensor, remainders: torch.Tensor, ties: torch.Tensor, master: torch.Tensor) -> None:
    """Restore the masters (`master`, fp32[n]) from the results of `split`."""
    for start in range(0, master.numel(), _PIECE):
        piece = slice(start, min(start + _PIECE, master.numel()))
        upper = weights[piece].view(torch.int16).int() << 16
        lower, counts = remainders[piece].int(), ties[_blocks(piece)]
        for block in counts.nonzero().view(-1).tolist():
            here = slice(block * BLOCK, (block + 1) * BLOCK)
            _put_back(lower[here], int(counts[block]))
        nan = (upper & _MAGNITUDE) > _INFINITY
        words = torch.where(nan, upper | (lower & 0xFFFF), upper + lower)
        master[piece].view(torch.int32).copy_(words)


def _blocks(elements: slice) -> slice:
    return slice(elements.start // BLOCK, -(-elements.stop // BLOCK))


def _list_ties(lower: torch.Tensor, tie: torch.Tensor) -> None:
    """Store the positions of a block's ties in its lower halves (int32)."""
    places = tie.nonzero().view(-1)
    first = places.numel()
    lower[places[places >= first]] = lower[:first][~tie[:first]]
    lower[:first] = places.int()


def _put_back(lower: torch.Tensor, count: int) -> None:
    """Reverse `_list_ties`. A tie's lower half becomes +2^15, its distance from the weight, not int16's -2^15."""
    # The clamps only matter for data that was damaged on NVMe.
    places = lower[: max(0, min(count, lower.numel()))].clamp(0, lower.numel() - 1).long()
    tie = torch.zeros(lower.numel(), dtype=torch.bool)
    tie[places] = True
    first = int(tie.sum())
    lower[:first][~tie[:first]] = lower[first:][tie[first:]]
    lower[tie] = _MIDDLE


# -- the masters of a page in either format ---------------------------------------------------------------------------


def read_masters(
    fields: Mapping[str, torch.Tensor], weights: torch.Tensor | None, here: slice | None = None
) -> torch.Tensor:
    """Return the masters (fp32[n]) of a page's elements `here`, or of all; fp32 masters are not copied.

    `here` starts at a multiple of 256. `weights` are the page's weights rounded from these masters; they are needed
    only if masters are split.
    """
    if "master" in fields:
        return fields["master"] if here is None else fields["master"][here]
    assert weights is not None
    here = here or slice(0, fields["remainder"].numel())
    master = torch.empty(here.stop - here.start)
    join(weights[here], fields["remainder"][here], fields["ties"][_blocks(here)], master)
    return master


def write_masters(
    fields: Mapping[str, torch.Tensor], weights: torch.Tensor, master: torch.Tensor, here: slice | None = None
) -> None:
    """Store new masters of a page with split masters: its remainders and its weights."""
    here = here or slice(0, fields["remainder"].numel())
    split(master, weights[here], fields["remainder"][here], fields["ties"][_blocks(here)])


def with_remainders(
    fields: Mapping[str, torch.Tensor], format: StateFormat
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a page's fields with its masters split as `format` requires, and the weights."""
    master, n = fields["master"], fields["master"].numel()
    assert format.remainders
    halves = {name: torch.empty(format.fields[name].entries(n), dtype=torch.int16) for name in ("remainder", "ties")}
    weights = torch.empty(n, dtype=torch.bfloat16)
    split(master, weights, halves["remainder"], halves["ties"])
    return {**halves, **{name: field for name, field in fields.items() if name != "master"}}, weights
