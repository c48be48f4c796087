"""The checksum of each field of each page on a drive, in each of its places.

    write    the sums are computed from memory once the bytes have left, and kept
    read     the sums are computed again, and compared before anybody uses the bytes

The sums are in memory that the ranks of a node share. With two places the record of a step holds those of its pages
(`page_index`). So another process can check what it reads: a page that was damaged, that is of another step or of
another run, does not have the sums that the record names for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.pages.shadow_pages import ShadowPages
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.checksum import Sum
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiered.state_formats import StateFormat

SUM_BYTES = 4


class DamagedPage(TrainerError):
    """A page on a drive is not what was written there."""


class PageChecksums:
    """The sums of all pages of a node. Each rank sets those of its own pages, and all ranks read them.

    They begin as 0, the sum of zeros: new files hold zeros, as new memory does.
    """

    def __init__(
        self, pages: Sequence[Page], *, format: StateFormat, places: ShadowPages, node: Node, compute: Sum
    ) -> None:
        """All ranks call it alike. `places`: of these pages."""
        self.places, self._compute = places, compute
        self._fields = list(format.fields)
        self._sizes = [[field.padded(page.elements) for field in format.fields.values()] for page in pages]
        self._each = places.count * len(self._fields)  # sums of a page
        memory = node.memory(SUM_BYTES * self._each * len(pages))
        self._sums = memory.numpy().data.cast("I")

    def keep(self, number: int, place: int, data: torch.Tensor, *, field: str | None = None) -> None:
        """Set the sums of a page in one of its places to those of `data`: all its bytes, or those of one `field`."""
        for _, at, computed in self._computed(number, place, data, field):
            self._sums[at] = computed

    def differing(self, number: int, place: int, data: torch.Tensor, *, field: str | None = None) -> str | None:
        """Return the first field of `data` that does not have its sum, or None. `data` is as `keep` takes it."""
        for name, at, computed in self._computed(number, place, data, field):
            if computed != self._sums[at]:
                return name
        return None

    def _computed(
        self, number: int, place: int, data: torch.Tensor, field: str | None
    ) -> Iterator[tuple[str, int, int]]:
        """Yield each field's name, the index of its sum, and the sum of its bytes in `data`."""
        first, start = self._first(number, place), 0
        for index, (name, size) in enumerate(zip(self._fields, self._sizes[number], strict=True)):
            if field in (None, name):
                yield name, first + index, self._compute(data[start:][:size])
                start += size
        assert start == data.numel(), "all bytes of the page, or of its field"

    def _first(self, number: int, place: int) -> int:
        return number * self._each + place * len(self._fields)

    def of_newest(self) -> bytes:
        """Return the sums of each page as it was written last, page by page."""
        count = len(self._fields)
        firsts = [self._first(number, self.places.newest(number)) for number in range(len(self._sizes))]
        return b"".join(self._sums[first : first + count].tobytes() for first in firsts)

    def begin(self, newest: Sequence[int], sums: bytes) -> None:
        """Take over the files of another process: where each page is, and its sums there, as `of_newest` gives them."""
        self.places.begin(newest)
        given, count = memoryview(sums).cast("I"), len(self._fields)
        for number, place in enumerate(newest):
            first = self._first(number, place)
            self._sums[first : first + count] = given[number * count : (number + 1) * count]
