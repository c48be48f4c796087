"""Compute gradient norms of sums that are sharded over ranks, with the bits of one rank that has the whole sums.

    own sums ──pieces of a weight──> partial norms ──all-reduce──> the weight's norm on every rank
             ──end of a piece──> the rank in whose range that piece begins

A rank does not read other ranks' sums. For each weight it sends at most one part of a piece, and receives the ends of
one piece. Partial norms of a unit are computed while the unit's sums are in memory.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from offload_trainer.offloading.gradients.norms import PiecewiseNorm
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import Place, Unit
from offload_trainer.plan.tiered.norm_shards import NormShards, norm_parts


@dataclass(frozen=True)
class _Share:
    """One rank's share in the norm of one weight."""

    unit: int
    norm: PiecewiseNorm
    numbers: slice  # the weight's positions among all partial norms
    first: int  # the first position that this rank computes
    parts: NormShards


class SharedNorms:
    """The norms of the weights in `places`, in the order in which they are summed."""

    def __init__(self, places: Sequence[tuple[Unit, Place]], node: Node, *, dtype: torch.dtype, ordered: bool) -> None:
        """Prepare this rank's shares. `dtype` is that of the sums; `ordered` is explained in `PiecewiseNorm`."""
        self._node, self._dtype = node, dtype
        self._shares: dict[str, _Share] = {}
        count = 0
        for unit, place in places:
            norm = PiecewiseNorm(place.weight.numel, ordered=ordered)
            self._shares[place.weight.name] = _share(unit, place, norm, node=node, numbers=count)
            count += norm.pieces
        self._numbers = torch.zeros(count)  # partial norms of this rank; 0 at other ranks' positions
        self._cut: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # parts of pieces: to send, and to be completed

    def take(self, unit: int, sums: torch.Tensor, arrived: Container[str], *, leaves: bool) -> None:
        """Compute this rank's partial norms of a unit's weights that have arrived.

        `sums` holds the unit's sums; only this rank's range is valid. `leaves`: the memory will be reused soon.
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
        """Return the norms (fp32, 0-dim) of the weights that have arrived, in order and equal on all ranks.

        All ranks call it, after `take` for all of these weights.
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
        self._node.send_recv(out, into)()
        numbers = self._numbers.clone()
        for name, share in shares.items():
            if share.parts.gets:
                piece = torch.cat([self._cut[name][1], *ends[name]])
                last = share.first + len(share.parts.starts) - 1
                numbers[last : last + 1] = share.norm.of([piece], count=1)
        self._node.add_up(numbers)
        return {name: share.norm.total(numbers[share.numbers]) for name, share in shares.items()}

    def clear(self) -> None:
        """Begin the next step."""
        self._numbers.zero_()
        self._cut.clear()


def _share(unit: Unit, place: Place, norm: PiecewiseNorm, *, node: Node, numbers: int) -> _Share:
    """Return this rank's share in a weight's norm; `numbers` is the weight's first position."""
    parts = norm_parts(unit, place, width=norm.width, rank=node.rank, ranks=node.world)
    taken = numbers + (parts.starts.start - place.start) // norm.width
    return _Share(unit.index, norm, slice(numbers, numbers + norm.pieces), taken, parts)
