"""Keep a checksum (CRC-32) for each field of each page on a drive, and for each of the page's copies.

    write    the checksums are computed from the buffer after it has been written, and stored
    read     the checksums are computed again and compared before the page is used

The ranks of a node share the checksums in memory. With two copies of each page, the record of a step stores them too
(`pages/index.py`), so that a later process can detect a page that is damaged or belongs to another step or run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.pages.shadow_pages import ShadowPages
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.native_adam import Sum
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiered.state_formats import StateFormat

SUM_BYTES = 4


class DamagedPage(TrainerError):
    """Raised when a page that was read from a drive differs from what was written there."""


class PageChecksums:
    """The checksums of all pages of a node. Each rank sets those of its own pages; all ranks read them.

    They start as 0, the checksum of zeros, because new files contain zeros.
    """

    def __init__(
        self, pages: Sequence[Page], *, format: StateFormat, places: ShadowPages, node: Node, compute: Sum
    ) -> None:
        """Allocate the checksums; all ranks call it with the same arguments. `compute` returns a buffer's CRC-32."""
        self.places, self._compute = places, compute
        self._fields = list(format.fields)
        self._sizes = [[field.padded(page.elements) for field in format.fields.values()] for page in pages]
        self._each = places.count * len(self._fields)  # checksums per page
        memory = node.memory(SUM_BYTES * self._each * len(pages))
        self._sums = memory.numpy().data.cast("I")

    def keep(self, number: int, place: int, data: torch.Tensor, *, field: str | None = None) -> None:
        """Store the checksums of one copy of a page. `data` is the whole page, or only `field` (uint8)."""
        for _, at, computed in self._computed(number, place, data, field):
            self._sums[at] = computed

    def differing(self, number: int, place: int, data: torch.Tensor, *, field: str | None = None) -> str | None:
        """Return the first field of `data` whose checksum differs, or None. `data` is the same as for `keep`."""
        for name, at, computed in self._computed(number, place, data, field):
            if computed != self._sums[at]:
                return name
        return None

    def _computed(
        self, number: int, place: int, data: torch.Tensor, field: str | None
    ) -> Iterator[tuple[str, int, int]]:
        """Yield each field's name, the index of its checksum, and the checksum of its bytes in `data`."""
        first, start = self._first(number, place), 0
        for index, (name, size) in enumerate(zip(self._fields, self._sizes[number], strict=True)):
            if field in (None, name):
                yield name, first + index, self._compute(data[start:][:size])
                start += size
        assert start == data.numel(), "all bytes of the page, or of its field"

    def _first(self, number: int, place: int) -> int:
        return number * self._each + place * len(self._fields)

    def of_newest(self) -> bytes:
        """Return the checksums of each page's newest copy, page by page, 4 bytes for each field."""
        count = len(self._fields)
        firsts = [self._first(number, self.places.newest(number)) for number in range(len(self._sizes))]
        return b"".join(self._sums[first : first + count].tobytes() for first in firsts)

    def begin(self, newest: Sequence[int], sums: bytes) -> None:
        """Take over an earlier process's files: the valid copy of each page, and `sums` as `of_newest` returns them."""
        self.places.begin(newest)
        given, count = memoryview(sums).cast("I"), len(self._fields)
        for number, place in enumerate(newest):
            first = self._first(number, place)
            self._sums[first : first + count] = given[number * count : (number + 1) * count]
