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
from offload_trainer.plan.layout import Place, Unit
from offload_trainer.plan.norm_parts import NormParts, norm_parts


@dataclass(frozen=True)
class _Share:
    """What a rank has to do with the norm of one weight."""

    unit: int
    norm: PiecewiseNorm
    numbers: slice  # of all ranks' numbers those that are the weight's
    first: int  # of these the first that the rank takes
    parts: NormParts


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
            starts = share.parts.starts[:-1] if share.parts.gets else share.parts.starts
            pieces = (sums[start : min(start + share.norm.width, share.parts.ends)] for start in starts)
            self._numbers[share.first : share.first + len(starts)] = share.norm.of(pieces, count=len(starts))
            given = sums[share.parts.gives[1] : share.parts.gives[2]] if share.parts.gives else sums[:0]
            begun = sums[share.parts.starts[-1] : share.parts.has] if share.parts.gets else sums[:0]
            self._cut[name] = (given.clone(), begun.clone()) if leaves else (given, begun)

    def of(self, arrived: Container[str]) -> dict[str, torch.Tensor]:
        """fp32, 0-dim, in order, of those weights that have arrived, all of which were taken; on every rank alike.

        All ranks call.
        """
        shares = {name: share for name, share in self._shares.items() if name in arrived}
        ends = {
            name: [torch.empty(end - first, dtype=self._dtype) for _, first, end in share.parts.gets]
            for name, share in shares.items()
        }
        out = [(share.parts.gives[0], self._cut[name][0]) for name, share in shares.items() if share.parts.gives]
        into = [
            (part[0], end) for name in shares for part, end in zip(shares[name].parts.gets, ends[name], strict=True)
        ]
        self._node.trade(out, into)()
        numbers = self._numbers.clone()
        for name, share in shares.items():
            if share.parts.gets:
                piece = torch.cat([self._cut[name][1], *ends[name]])
                last = share.first + len(share.parts.starts) - 1
                numbers[last : last + 1] = share.norm.of([piece], count=1)
        self._node.add_up(numbers)
        return {name: share.norm.total(numbers[share.numbers]) for name, share in shares.items()}

    def clear(self) -> None:
        """The next step begins."""
        self._numbers.zero_()
        self._cut.clear()


def _share(unit: Unit, place: Place, norm: PiecewiseNorm, *, node: Node, numbers: int) -> _Share:
    """`numbers`: how many go before the weight's."""
    parts = norm_parts(unit, place, width=norm.width, rank=node.rank, ranks=node.world)
    taken = numbers + (parts.starts.start - place.start) // norm.width
    return _Share(unit.index, norm, slice(numbers, numbers + norm.pieces), taken, parts)
