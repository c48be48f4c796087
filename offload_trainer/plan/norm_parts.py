"""Which rank takes which pieces of a weight's norm, where the weight's sum lies on several. Pure arithmetic.

A norm is put together from fixed pieces, counted from the weight's start, which the ranks' stretches cut: whoever has
a later part of a piece gives it to the rank in whose stretch that piece begins. The engine sends by this, and the plan
counts by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload_trainer.plan.layout import Place, Unit, rank_of, stretch_of

_PIECE = 1 << 17  # elements, as the CPU takes norms
_CHUNK = 1 << 20  # elements whose squares are added up by halves, as norms are taken for a GPU

Part = tuple[int, int, int]  # rank; elements [first, end) of the unit, which lie in its stretch


def piece_width(numel: int, *, ordered: bool) -> int:
    """Elements of a piece of the norm of so many; `ordered`: as it is taken for a GPU."""
    return min(_CHUNK, 1 << max(0, numel - 1).bit_length()) if ordered else _PIECE


@dataclass(frozen=True)
class NormParts:
    """What a rank has to do with the norm of one weight. Elements are counted from the unit's start."""

    starts: range  # of its pieces, which begin in its stretch
    ends: int  # the element behind the weight's last
    has: int  # the element behind the last that lies in its stretch
    gives: Part | None  # to a rank before it
    gets: tuple[Part, ...]  # from ranks behind it


def norm_parts(unit: Unit, place: Place, *, width: int, rank: int, ranks: int) -> NormParts:
    """Of one of several ranks, in pieces of `width`."""
    ends = place.start + place.weight.numel
    first, has = _within(unit, place, rank, ranks=ranks)
    into = (first - place.start) % width  # elements of a piece that began before
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
    return NormParts(starts, ends, has, _gives(unit, place, width=width, rank=rank, ranks=ranks), tuple(gets))


def _gives(unit: Unit, place: Place, *, width: int, rank: int, ranks: int) -> Part | None:
    """What a rank gives of the piece that began before its stretch."""
    first, has = _within(unit, place, rank, ranks=ranks)
    into = (first - place.start) % width
    if not into or first >= has:
        return None
    return rank_of(unit, first - into, ranks=ranks), first, min(has, first - into + width)


def given(units: Sequence[Unit], *, ranks: int, ordered: bool) -> list[tuple[int, int, int]]:
    """(giver, taker, elements) of all that ranks send each other for the norms of a step.

    Units whose weights lie alike, as a model's blocks do, have the same.
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
    """Of one weight."""
    width = piece_width(place.weight.numel, ordered=ordered)
    here, last = (rank_of(unit, at, ranks=ranks) for at in (place.start, place.start + place.weight.numel - 1))
    for rank in range(here, last + 1):
        gives = _gives(unit, place, width=width, rank=rank, ranks=ranks)
        if gives is not None:
            yield rank, gives[0], gives[2] - gives[1]


def _within(unit: Unit, place: Place, rank: int, *, ranks: int) -> tuple[int, int]:
    """The elements [first, end) of a weight that lie in a rank's stretch; first = end where none does."""
    first, end = stretch_of(unit, rank, ranks=ranks)
    first = max(first, place.start)
    return first, max(first, min(end, place.start + place.weight.numel))
