"""Masters in two bytes beside their bf16 weights: the lower half of each, and which of two masters a tie was.

    master (fp32) ──split──> weight (bf16, to nearest even), remainder (the master's lower half), ties (of 256 elements)
    weight, remainder, ties ──join──> the same master, bit for bit

A weight is its master's upper half, one more where the lower half is above the middle, and in the middle where the
upper half is odd. So the lower half tells whether it was rounded up, but in the middle: the weight is then even either
way. A master in the middle whose upper half is even, rounded down, is called a tie here: one of 131072 masters, if
their lower halves are anything. A block of 256 has a count of its ties. Where it is not 0 their places in the block lie
in its first remainders, as many as there are ties; what stood there of others lies in the remainders of the ties that
come after those, in the same order. A tie's own remainder is known, so nothing is lost.

Of a NaN the weight is the upper half made quiet, as the kernels round it; each NaN that arithmetic makes is quiet and
comes back bit for bit. The functions here define what is computed; native/remainders.h and adam.cu compute it faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload_trainer.plan.formats import StateFormat
from offload_trainer.plan.layout import BLOCK_8BIT

BLOCK = BLOCK_8BIT  # elements that share a count
_PIECE = 2**16  # elements at a time, in the cache; a multiple of BLOCK
_MIDDLE, _INFINITY, _MAGNITUDE = 0x8000, 0x7F800000, 0x7FFFFFFF


def split(master: torch.Tensor, weights: torch.Tensor, remainders: torch.Tensor, ties: torch.Tensor) -> None:
    """`master` (fp32[n]) into `weights` (bf16[n]), `remainders` (int16[n]) and `ties` (int16[ceil(n / 256)])."""
    for start in range(0, master.numel(), _PIECE):
        piece = slice(start, min(start + _PIECE, master.numel()))
        words = master[piece].view(torch.int32)
        upper, nan = words >> 16, (words & _MAGNITUDE) > _INFINITY
        rounded = (words + 0x7FFF + (upper & 1)) >> 16
        weights[piece].view(torch.int16).copy_(torch.where(nan, upper | 0x40, rounded))
        lower = (words << 16) >> 16  # with a sign, as int16 has it
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
    """The masters (`master`, fp32[n]) that `split` made these of."""
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
    """Write into a block's lower halves (int32) where its ties are."""
    places = tie.nonzero().view(-1)
    first = places.numel()
    lower[places[places >= first]] = lower[:first][~tie[:first]]
    lower[:first] = places.int()


def _put_back(lower: torch.Tensor, count: int) -> None:
    """The reverse; a tie's lower half then is the way from its weight, 2^15, and not -2^15, as int16 would have it."""
    places = lower[: max(0, min(count, lower.numel()))].clamp(0, lower.numel() - 1).long()  # of what a drive has broken
    tie = torch.zeros(lower.numel(), dtype=torch.bool)
    tie[places] = True
    first = int(tie.sum())
    lower[:first][~tie[:first]] = lower[first:][tie[first:]]
    lower[tie] = _MIDDLE


# -- masters of a page, however they are stored -----------------------------------------------------------------------


def read_masters(
    fields: Mapping[str, torch.Tensor], weights: torch.Tensor | None, here: slice | None = None
) -> torch.Tensor:
    """fp32[n] of a page's elements `here`, which start at a multiple of 256, or of all; no copy of those in fp32.

    `weights`: the page's, as they are rounded of these masters; not asked for where masters are in fp32.
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
    """Remainders, and the page's weights, of new masters; where masters are remainders."""
    here = here or slice(0, fields["remainder"].numel())
    split(master, weights[here], fields["remainder"][here], fields["ties"][_blocks(here)])


def with_remainders(
    fields: Mapping[str, torch.Tensor], format: StateFormat
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A page's fields with its masters in `format`, which has remainders, and the weights beside them."""
    master, n = fields["master"], fields["master"].numel()
    assert format.remainders
    halves = {name: torch.empty(format.fields[name].entries(n), dtype=torch.int16) for name in ("remainder", "ties")}
    weights = torch.empty(n, dtype=torch.bfloat16)
    split(master, weights, halves["remainder"], halves["ties"])
    return {**halves, **{name: field for name, field in fields.items() if name != "master"}}, weights
