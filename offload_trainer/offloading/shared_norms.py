"""Norms of sums that lie in stretches on several ranks: those of one rank that has them whole, to the last bit.

    its own sums ──pieces of a weight──> numbers ──added up over all ranks──> the weight's norm, on each
                 ──what ends a piece──> the rank in whose stretch that piece begins

A rank reads no other's sums: of each weight it sends at most one part of a piece, and gets what ends one. What it
takes of a unit it takes while that unit's sums are in memory.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from offload_trainer.offloading.node import Node
from offload_trainer.offloading.norms import PiecewiseNorm
from offload_trainer.plan.layout import Place, Unit, rank_of, stretch_of

Part = tuple[int, int, int]  # rank; elements [first, end) of the unit, which lie in its stretch


@dataclass(frozen=True)
class _Share:
    """What a rank has to do with the norm of one weight. Elements are counted from the unit's start."""

    unit: int
    norm: PiecewiseNorm
    numbers: slice  # of all ranks' numbers those that are the weight's
    first: int  # of these the first that the rank takes
    starts: range  # of its pieces, which begin in its stretch
    ends: int  # the element behind the weight's last
    has: int  # the element behind the last that lies in its stretch
    gives: Part | None  # to a rank before it
    gets: tuple[Part, ...]  # from ranks behind it


class SharedNorms:
    """Of the weights whose `places` are given, in the order in which their norms are added up."""

    def __init__(self, places: Sequence[tuple[Unit, Place]], node: Node, *, dtype: torch.dtype, ordered: bool) -> None:
        """`dtype` of the sums. `ordered`: see `PiecewiseNorm`."""
        self._node, self._dtype = node, dtype
        self._shares: dict[str, _Share] = {}
        count = 0
        for unit, place in places:
            norm = PiecewiseNorm(place.weight.numel, ordered=ordered)
            self._shares[place.weight.name] = _share(unit, place, norm, node=node, numbers=count)
            count += norm.pieces
        self._numbers = torch.zeros(count)  # this rank's; 0 for those of others
        self._cut: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # own parts of pieces: to give, and to be ended

    def take(self, unit: int, sums: torch.Tensor, arrived: Container[str], *, leaves: bool) -> None:
        """What this rank has to do with a unit's weights that have arrived; `sums`: all of it, as far as it is its own.

        `leaves`: that memory is another's soon.
        """
        for name, share in self._shares.items():
            if share.unit != unit or name not in arrived:
                continue
            starts = share.starts[:-1] if share.gets else share.starts
            pieces = (sums[start : min(start + share.norm.width, share.ends)] for start in starts)
            self._numbers[share.first : share.first + len(starts)] = share.norm.of(pieces, count=len(starts))
            given = sums[share.gives[1] : share.gives[2]] if share.gives else sums[:0]
            begun = sums[share.starts[-1] : share.has] if share.gets else sums[:0]
            self._cut[name] = (given.clone(), begun.clone()) if leaves else (given, begun)

    def of(self, arrived: Container[str]) -> dict[str, torch.Tensor]:
        """fp32, 0-dim, in order, of those weights that have arrived, all of which were taken; on every rank alike.

        All ranks call.
        """
        shares = {name: share for name, share in self._shares.items() if name in arrived}
        ends = {
            name: [torch.empty(end - first, dtype=self._dtype) for _, first, end in share.gets]
            for name, share in shares.items()
        }
        out = [(share.gives[0], self._cut[name][0]) for name, share in shares.items() if share.gives]
        into = [(part[0], end) for name in shares for part, end in zip(shares[name].gets, ends[name], strict=True)]
        self._node.trade(out, into)()
        numbers = self._numbers.clone()
        for name, share in shares.items():
            if share.gets:
                piece = torch.cat([self._cut[name][1], *ends[name]])
                last = share.first + len(share.starts) - 1
                numbers[last : last + 1] = share.norm.of([piece], count=1)
        self._node.add_up(numbers)
        return {name: share.norm.total(numbers[share.numbers]) for name, share in shares.items()}

    def clear(self) -> None:
        """The next step begins."""
        self._numbers.zero_()
        self._cut.clear()


def _share(unit: Unit, place: Place, norm: PiecewiseNorm, *, node: Node, numbers: int) -> _Share:
    """`numbers`: how many go before the weight's."""
    width, ends = norm.width, place.start + place.weight.numel
    first, has = _within(unit, place, node.rank, ranks=node.world)
    into = (first - place.start) % width  # elements of a piece that began before
    piece = first - into
    gives = (rank_of(unit, piece, ranks=node.world), first, min(has, piece + width)) if into and first < has else None
    starts = range(piece + width * (into > 0), has, width)
    gets: list[Part] = []
    if starts:
        last = min(starts[-1] + width, ends)
        for rank in range(node.rank + 1, node.world):
            begin, end = _within(unit, place, rank, ranks=node.world)
            if begin < min(end, last):
                gets.append((rank, begin, min(end, last)))
    taken = numbers + (starts.start - place.start) // width
    its = slice(numbers, numbers + norm.pieces)
    return _Share(unit.index, norm, its, taken, starts, ends, has, gives, tuple(gets))


def _within(unit: Unit, place: Place, rank: int, *, ranks: int) -> tuple[int, int]:
    """The elements [first, end) of a weight that lie in a rank's stretch; first = end where none does."""
    first, end = stretch_of(unit, rank, ranks=ranks)
    first = max(first, place.start)
    return first, max(first, min(end, place.start + place.weight.numel))
