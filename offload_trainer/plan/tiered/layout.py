"""Lay out a model for the tiered engine: units, the pages of their optimizer state, and the tier of each page.

A unit is fetched at a time: a block, or a module outside the blocks, with its trainable weights first and matrices
before vectors. A page is updated at a time: a range of a unit's trainable part. Every transfer starts and ends at a
multiple of 4096 elements, which are whole sectors of a drive. The planner counts with these functions, and the engine
allocates with them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Annotated

from pydantic import Field, Strict

from offload_trainer.common.safe_files import Count, exact_record
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiers import DEVICE, NOT_DRIVES, RAM

ALIGN = 4096  # elements
BLOCK_8BIT = 256  # elements that share a scale (Dettmers et al. 2022, 8-bit optimizers via block-wise quantization)
_WEIGHT_ALIGN = BLOCK_8BIT  # elements; each scale then belongs to one weight, and matrix products read aligned rows
SMALL = 1 << 20  # elements; a unit outside the blocks that is smaller than this stays on the device


def aligned(elements: int, to: int = ALIGN) -> int:
    """Return `elements` rounded up to a multiple of `to`."""
    return -(-elements // to) * to


@dataclass(frozen=True)
class Place:
    """A weight and its offset in its unit, in elements."""

    weight: Weight
    start: int


@dataclass(frozen=True)
class Unit:
    """Weights that are fetched together. Counts are elements."""

    index: int
    name: str
    block: bool  # one of the model's repeated blocks
    places: tuple[Place, ...]
    trained: int  # the trainable weights occupy [0, trained); a multiple of ALIGN
    elements: int  # trainable and frozen weights; a multiple of ALIGN
    cuts: tuple[int, ...] = (0,)  # positions between its matrices at which pages may end, from 0 to the last one's end

    @property
    def matrices(self) -> int:
        """Return the end of the elements whose pages consist of whole matrices. They come first."""
        return self.cuts[-1]

    @cached_property
    def quantised(self) -> bool:
        """Return whether some of its weights are stored quantised."""
        return any(place.weight.quantised for place in self.places)

    def stored_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the unit's weights as they are stored; `item_bytes`: those of an element in use."""
        if not self.quantised:
            return item_bytes * self.elements
        return aligned(self.stored_weights(item_bytes)[-1].end, ALIGN * item_bytes)

    def stored_weights(self, item_bytes: int) -> tuple[StoredWeight, ...]:
        """Return the frozen weights of a quantised unit as they are stored, after the trained ones."""
        found, end = list[StoredWeight](), self.trained * item_bytes
        for place in (place for place in self.places if not place.weight.trainable):
            weight, first = place.weight, end
            if not weight.quantised:
                end = aligned(first + weight.numel * item_bytes, _PART)
                found.append(StoredWeight(place.start, weight.numel, None, first, end, end))
                continue
            format, elements = FORMATS[weight.quantised], aligned(weight.numel, PAD)
            scales = aligned(first + format.code_bytes(elements), _PART)
            end = aligned(scales + format.scale_bytes(elements), _PART)
            found.append(StoredWeight(place.start, elements, format, first, scales, end))
        return tuple(found)

    def in_place(self, home: int) -> bool:
        """Return whether the model uses the unit's weights in their home; others are copied or dequantised first."""
        return home == DEVICE and not self.quantised

    @property
    def small(self) -> bool:
        """Return whether the unit is too small to be worth moving, so that its weights stay on the device."""
        return not self.block and self.elements <= SMALL


@exact_record
class Page:
    """Elements [start, start + elements) of a unit's trainable part, and the tier of their optimizer state.

    The manifest of page files lists pages as they are.
    """

    unit: Count
    start: Count
    elements: Annotated[Count, Field(gt=0, multiple_of=ALIGN)]
    home: Annotated[int, Strict(), Field(ge=min(NOT_DRIVES), lt=1000)]
    matrices: bool = False  # it consists of whole matrices, which are updated as such


def units_of(shape: ModelShape, *, matrices: bool = False) -> tuple[Unit, ...]:
    """Return the model's units, in the order of their first weight.

    `matrices`: the update rule works on whole matrices. They come first in a unit then, each at a multiple of ALIGN, so
    that pages and the ranges of ranks can end between any two.
    """
    units = list[Unit]()
    for name, weights in shape.by_unit().items():
        places, cuts, end, trained = list[Place](), [0], 0, 0
        for weight in sorted(weights, key=lambda w: (not w.trainable, not (matrices and w.matrix), not w.decays)):
            if not weight.trainable:
                end = max(end, aligned(trained))
            start, matrix = end, weight.matrix if matrices else None
            places.append(Place(weight, start))
            end = aligned(start + weight.numel, ALIGN if matrix else _WEIGHT_ALIGN)
            if matrix:  # its matrices' ends that are multiples of ALIGN, and its own
                inner = range(start + prod(matrix), start + weight.numel, prod(matrix))
                cuts += [*(cut for cut in inner if cut % ALIGN == 0), end]
            if weight.trainable:
                trained = end
        block, trained = weights[0].block, aligned(trained)
        units.append(Unit(len(units), name, block, tuple(places), trained, aligned(end), tuple(cuts)))
    return tuple(units)


def first_block(units: Sequence[Unit]) -> int:
    """Return the index of the first unit that is a block; 0 without blocks."""
    return next((unit.index for unit in units if unit.block), 0)


def range_of_rank(unit: Unit, rank: int, *, ranks: int) -> tuple[int, int]:
    """Return the range [first, end) of a unit's trainable part that `rank` updates, in elements and aligned.

    The ranges of all ranks in order cover the unit. They differ by at most ALIGN, so a small unit leaves some ranks
    without elements. A range that would end inside a matrix that is updated as a whole ends at the nearest end of one.
    """
    first, end = part_of(unit.trained, rank, ranks=ranks)
    return _between_matrices(unit, first), _between_matrices(unit, end)


def _between_matrices(unit: Unit, element: int) -> int:
    """Return the nearest position that is not inside a matrix."""
    if element >= unit.matrices:
        return element
    after = bisect_right(unit.cuts, element)
    return min(unit.cuts[after - 1 : after + 1], key=lambda cut: abs(cut - element))


def part_of(elements: int, rank: int, *, ranks: int) -> tuple[int, int]:
    """Return the range [first, end) of `elements`, a multiple of ALIGN, that belongs to `rank`; see `range_of_rank`."""
    pieces = elements // ALIGN
    return pieces * rank // ranks * ALIGN, pieces * (rank + 1) // ranks * ALIGN


def largest_range(units: Sequence[Unit], *, ranks: int) -> int:
    """Return the largest number of elements of one unit that a single rank updates."""
    kinds = {(unit.trained, unit.cuts): unit for unit in units}.values()
    ranges = (range_of_rank(unit, rank, ranks=ranks) for unit in kinds for rank in range(ranks))
    return max((end - first for first, end in ranges), default=0)


def rank_of(unit: Unit, element: int, *, ranks: int) -> int:
    """Return the rank that updates an element of the unit."""
    return bisect_right(range(ranks), element, key=lambda rank: range_of_rank(unit, rank, ranks=ranks)[0]) - 1


def pages_of(
    units: Sequence[Unit],
    *,
    page: int,
    shares: Sequence[tuple[int, float]],
    speeds: Sequence[float],
    ranks: int = 1,
    ahead: bool = False,
) -> CutPages:
    """Cut each rank's ranges into pages, assign them to tiers, and return them in element order.

    `shares` are pairs of a home and its share of the state; `speeds` divides the rest over the drives. With `ahead`,
    pages on drives are updated during the backward, and RAM takes the pages whose gradients are computed last. Ranks
    whose ranges are cut alike get the same pages, relative to the start of each range.
    """

    @cache
    def pages_of_range(cuts: tuple[tuple[int, ...], ...]) -> tuple[Page, ...]:
        pieces = [piece for unit, its in zip(units, cuts, strict=True) for piece in _cut(unit, its, page=page)]
        return _pages_of_rank(pieces, shares=dict(shares), speeds=speeds, last=first_block(units) if ahead else 0)

    found = list[tuple[Page, int]]()
    for rank in range(ranks):
        ranges = {unit.index: range_of_rank(unit, rank, ranks=ranks) for unit in units}
        cuts = tuple(  # the ends of the matrices in each range, and the range's end, counted from its start
            (*(cut - first for cut in unit.cuts if first < cut <= end), end - first)
            for unit, (first, end) in zip(units, ranges.values(), strict=True)
        )
        mine: Iterable[Page] = pages_of_range(cuts)
        if rank:
            mine = (Page(it.unit, ranges[it.unit][0] + it.start, it.elements, it.home, it.matrices) for it in mine)
        found += [(page, rank) for page in mine]
    found.sort(key=lambda one: (one[0].unit, one[0].start))
    return CutPages(tuple(page for page, _ in found), tuple(rank for _, rank in found))


def _pages_of_rank(
    bare: Sequence[Page], *, shares: Mapping[int, float], speeds: Sequence[float], last: int
) -> tuple[Page, ...]:
    """Assign a tier to each page: `shares` of all elements go to the tiers that they name, the rest to the drives.

    The device holds the first units, so that their gradients stay there and the next forward finds them updated. RAM
    holds the first `last` units until its share is used up. After that RAM and the drives alternate, so that updating
    pages in RAM hides the drives' transfers. Shares are rounded up to ALIGN elements, and a page is cut where one ends.
    A page of matrices is not: a share of such pages may be smaller by less than one page.
    """
    pages, waiting = list[Page](), deque(bare)
    left = total = sum(page.elements for page in bare)

    def fill(home: int, elements: int) -> int:
        nonlocal left
        before = left
        while elements and (waiting[0].elements <= elements or not waiting[0].matrices):
            page = waiting.popleft()
            size = min(page.elements, elements)
            pages.append(_piece(page, 0, size, home=home))
            if size < page.elements:
                waiting.appendleft(_piece(page, size, page.elements, home=page.home))
            elements, left = elements - size, left - size
        return before - left

    targets = {home: aligned(int(-(-total * share // 1))) for home, share in shares.items()}
    for home in (home for home in targets if home != RAM):
        fill(home, min(left, targets[home]))
    in_ram = min(left, targets.get(RAM, 0)) if round(1 - sum(shares.values()), 9) > 0 else left
    assert in_ram == left or speeds, "state outside memory needs a drive"
    in_ram -= fill(RAM, left if in_ram == left else min(in_ram, sum(p.elements for p in waiting if p.unit < last)))
    wanted = {RAM: in_ram / max(1, left)}
    wanted |= {drive: (1 - wanted[RAM]) * speed / sum(speeds) for drive, speed in enumerate(speeds)}
    held, done = dict.fromkeys(wanted, 0), 0

    def lacks(home: int) -> float:
        return wanted[home] * done - held[home]

    for page in waiting:
        done += page.elements
        drive, room = max(range(len(speeds)), key=lacks), in_ram - held[RAM]
        inside = min(page.elements, room if lacks(RAM) >= lacks(drive) else max(0, room - (left - done)))
        if page.matrices and inside < page.elements:
            inside = 0
        for home, first, end in ((RAM, 0, inside), (drive, inside, page.elements)):
            if first < end:
                pages.append(_piece(page, first, end, home=home))
                held[home] += end - first
    return tuple(pages)


def _cut(unit: Unit, cuts: Sequence[int], *, page: int) -> list[Page]:
    """Cut a rank's range of a unit into pages; `cuts` are the ends of its matrices, and the range's end.

    A page of matrices has at most `page` elements or a single matrix. The others are nearly equal in size, and none is
    larger than `page`.
    """
    *matrices, end = cuts
    pages, start = list[Page](), 0
    for number, cut in enumerate(matrices, 1):
        if number == len(matrices) or matrices[number] - start > page:
            pages.append(Page(unit.index, start, cut - start, RAM, matrices=True))
            start = cut
    if start == end:
        return pages
    size = aligned(-(-(end - start) // -(-(end - start) // page)))
    return pages + [Page(unit.index, at, min(size, end - at), RAM) for at in range(start, end, size)]


def _piece(page: Page, first: int, end: int, *, home: int) -> Page:
    """Return elements of a page in a tier; faster than `replace`, since a plan may count millions of pages."""
    if (first, end, home) == (0, page.elements, page.home):
        return page
    return Page(page.unit, page.start + first, end - first, home, page.matrices)


@dataclass(frozen=True)
class PageGroup:
    """Pages of one rank and one unit with the same size and the same tier of state."""

    count: int
    number: int  # index of the group's first page
    page: Page  # the group's first page
    rank: int

    @property
    def elements(self) -> int:
        return self.count * self.page.elements


@dataclass(frozen=True)
class CutPages:
    """All pages of optimizer state in element order, as `pages_of` cuts them."""

    pages: tuple[Page, ...]
    owners: tuple[int, ...]  # the rank that updates each page

    @cached_property
    def groups(self) -> tuple[PageGroup, ...]:
        """Return all pages in groups, in the order of each group's first page; a plan may count millions of pages."""
        kinds = [
            (rank, page.unit, page.home, page.elements, page.matrices)
            for page, rank in zip(self.pages, self.owners, strict=True)
        ]
        first = dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True))
        found = ((count, first[kind], kind[0]) for kind, count in Counter(kinds).items())
        return tuple(PageGroup(count, number, self.pages[number], rank) for count, number, rank in found)


@dataclass(frozen=True)
class TierMap:
    """The tier of each page of optimizer state, and of each unit's weights and gradients."""

    units: tuple[Unit, ...]
    cut: CutPages
    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    shadows: frozenset[int] = frozenset()  # pages in RAM with shadow memory

    @property
    def pages(self) -> tuple[Page, ...]:
        return self.cut.pages


# -- frozen weights that are stored quantised (`model.base`), and where a unit's stored bytes hold each weight
#
#     in use   [ trained weights | frozen weights, each from a multiple of 256 elements on ]       in the run's dtype
#     stored   [ trained weights | codes, scales | elements | codes, scales | ... | padding ]      bytes
#
# A code selects one of the format's numbers between -1 and 1, and an element is that number times the largest absolute
# value of its block of consecutive elements, the scale. Weights are rounded to bf16 before they are quantised, so 2
# bytes store a scale exactly. `offloading/weights/placed.py` computes codes and values with bitsandbytes.

SCALE_BYTES = 2  # bf16
PIECE = 1 << 20  # elements that are quantised at a time, and on a CPU dequantised at a time
PAD = 256  # elements; quantised weights are padded with zeros to a multiple, so that all blocks are whole
_PART = 256  # bytes; codes, scales and elements start at multiples


@dataclass(frozen=True)
class WeightFormat:
    """A format of quantised weights."""

    name: str
    bits: int  # the size of a code
    block: int  # elements that share a scale; a divisor of PAD

    @property
    def bytes_each(self) -> float:
        """Return the bytes of an element, with its share of the scale."""
        return self.bits / 8 + SCALE_BYTES / self.block

    def code_bytes(self, elements: int) -> int:
        """Return the bytes of the codes of `elements`, a multiple of PAD."""
        return elements * self.bits // 8

    def scale_bytes(self, elements: int) -> int:
        """Return the bytes of the scales of `elements`, a multiple of PAD."""
        return elements // self.block * SCALE_BYTES


# nf4: the 16 numbers of NormalFloat (Dettmers et al. 2023, QLoRA). int8: k / 127 for k from -127 to 127.
FORMATS = {one.name: one for one in (WeightFormat("nf4", bits=4, block=64), WeightFormat("int8", bits=8, block=256))}


@dataclass(frozen=True)
class StoredWeight:
    """One frozen weight of a unit, as it is stored. Offsets are bytes from the start of the unit's stored bytes."""

    start: int  # its first element in the unit that is in use
    elements: int  # a multiple of PAD if it is quantised
    format: WeightFormat | None  # None: it is stored as it is used
    values: int  # offset of its codes, or of its elements
    scales: int  # offset of its scales
    end: int  # offset of the next weight
