"""Divide the gradient norm of a weight over the ranks that each hold a part of its summed gradient. Pure arithmetic.

A norm is computed from pieces of fixed size, counted from the weight's start, so that its bits do not depend on the
number of ranks. The ranks' ranges may cut a piece. A rank with a later part of a piece sends it to the rank in whose
range the piece begins. The engine communicates by these rules, and the planner counts the bytes that ranks send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload_trainer.plan.tiered.layout import Place, Unit, range_of_rank, rank_of

_PIECE = 1 << 17  # elements of a piece on a CPU
_CHUNK = 1 << 20  # elements of a piece for a GPU, whose squares are summed pairwise

Part = tuple[int, int, int]  # rank, and elements [first, end) of the unit in that rank's range


def piece_width(numel: int, *, ordered: bool) -> int:
    """Return the elements per piece for a weight of `numel` elements; `ordered`: the norm is computed for a GPU."""
    return min(_CHUNK, 1 << max(0, numel - 1).bit_length()) if ordered else _PIECE


@dataclass(frozen=True)
class NormShards:
    """The part of one weight's norm that one rank computes. Elements are counted from the unit's start."""

    starts: range  # starts of the pieces that begin in its range
    ends: int  # end of the weight
    has: int  # end of the weight's part in its range
    gives: Part | None  # the part that it sends to an earlier rank
    gets: tuple[Part, ...]  # the parts that it receives from later ranks


def norm_parts(unit: Unit, place: Place, *, width: int, rank: int, ranks: int) -> NormShards:
    """Return the share of `rank` in a weight's norm with pieces of `width` elements."""
    ends = place.start + place.weight.numel
    first, has = _within(unit, place, rank, ranks=ranks)
    into = (first - place.start) % width  # elements since the start of the piece, which an earlier rank computes
    starts = range(first - into + width * (into > 0), has, width)
    gets: list[Part] = []
    if starts:
        last = min(starts[-1] + width, ends)
        for other in range(rank + 1, ranks):
            begin, end = _within(unit, place, other, ranks=ranks)
            if begin >= last:
                break
            if begin < min(end, last):
                gets.append((other, begin, min(end, last)))
    return NormShards(starts, ends, has, _gives(unit, place, width=width, rank=rank, ranks=ranks), tuple(gets))


def _gives(unit: Unit, place: Place, *, width: int, rank: int, ranks: int) -> Part | None:
    """Return the part that a rank sends of the piece that begins before its range."""
    first, has = _within(unit, place, rank, ranks=ranks)
    into = (first - place.start) % width
    if not into or first >= has:
        return None
    return rank_of(unit, first - into, ranks=ranks), first, min(has, first - into + width)


def given(units: Sequence[Unit], *, ranks: int, ordered: bool) -> list[tuple[int, int, int]]:
    """Return (sender, receiver, elements) of all messages for the norms of a step.

    Units with the same layout, such as a model's blocks, have the same messages and are computed once.
    """
    alike: dict[tuple[tuple[int, int], ...], list[tuple[int, int, int]]] = {}
    found: list[tuple[int, int, int]] = []
    for unit in units:
        trained = [place for place in unit.places if place.weight.trainable]
        lying = ((unit.trained, 0), *((place.start, place.weight.numel) for place in trained))
        if lying not in alike:
            alike[lying] = [one for place in trained for one in _given_of(unit, place, ranks=ranks, ordered=ordered)]
        found += alike[lying]
    return found


def _given_of(unit: Unit, place: Place, *, ranks: int, ordered: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the messages for one weight."""
    width = piece_width(place.weight.numel, ordered=ordered)
    here, last = (rank_of(unit, at, ranks=ranks) for at in (place.start, place.start + place.weight.numel - 1))
    for rank in range(here, last + 1):
        gives = _gives(unit, place, width=width, rank=rank, ranks=ranks)
        if gives is not None:
            yield rank, gives[0], gives[2] - gives[1]


def _within(unit: Unit, place: Place, rank: int, *, ranks: int) -> tuple[int, int]:
    """Return the elements [first, end) of a weight in a rank's range; first equals end if there are none."""
    first, end = range_of_rank(unit, rank, ranks=ranks)
    first = max(first, place.start)
    return first, max(first, min(end, place.start + place.weight.numel))
