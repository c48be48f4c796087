"""Lay out the pages of a node, and track their copies on drives, so that no update overwrites the last valid state.

    write      goes to the copy that is not valid            `newest` points to it; `valid` stays the copy to read
    flip       makes all written copies the valid ones       the old copies become free
    forget     discards all written copies (rollback)        `newest` points to the valid copies again

Pages in RAM and on the device have one copy, and so do pages on drives if `count` is 1. Those are updated in place.

Each field of each copy on a drive has a checksum (CRC-32). It is computed from the buffer after the page has been
written, and computed again and compared before a page that was read is used. With two copies the record of a step
stores the checksums too (`pages/manifest.py`), so that a later process can detect a page that is damaged or belongs to
another step or run. This module keeps only the bookkeeping; `PageStore` transfers the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.native_adam import Sum
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import ELSEWHERE, offsets, on_drive, size_of_home
from offload_trainer.storage.tensorfile import DTYPES

_SUM_BYTES = 4


class DamagedPage(TrainerError):
    """Raised when a page that was read from a drive differs from what was written there."""


class PageTable:
    """Where the pages of a node and their fields are. A page's fields follow each other, masters first."""

    def __init__(self, pages: Sequence[Page], format: StateFormat) -> None:
        self.pages, self.format = tuple(pages), format
        self.homes = [page.home for page in pages]
        self.sizes = [format.page_bytes(page) for page in pages]
        self._offsets = offsets(self.sizes, self.homes)
        self._bytes = {home: size_of_home(self.sizes, self.homes, home) for home in set(self.homes)}

    def home_bytes(self, home: int) -> int:
        """Return the bytes of one copy of all pages of a tier."""
        return self._bytes.get(home, 0)

    def offset(self, number: int, *, copy: int = 0, field: str = "master") -> int:
        """Return the first byte of one field of a page in its tier. Of a drive's pages, copies 1 follow copies 0."""
        page, start = self.pages[number], self._offsets[number] + copy * self._bytes[self.homes[number]]
        for name, kind in self.format.fields.items():
            if name == field:
                break
            start += kind.padded(page)
        return start

    def fields(self, number: int, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the page's fields in `data`, the page's bytes, or in each row of `data`, for equal pages."""
        page, found, start = self.pages[number], {}, 0
        for name, field in self.format.fields.items():
            found[name] = data[..., start : start + field.bytes(page)].view(DTYPES[field.dtype])
            start += field.padded(page)
        return found

    def touched(self, field: str, unit: int, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield each page with some of these elements of a unit, as (number, range of the page's field, of the values).

        Pages of other nodes are left out.
        """
        per = self.format.fields[field].per
        for number in self._of_unit.get(unit, ()):
            page = self.pages[number]
            first, last = max(start, page.start), min(start + count, page.start + page.elements)
            if first < last and page.home != ELSEWHERE:
                held = slice((first - page.start) // per, -(-(last - page.start) // per))
                yield number, held, slice((first - start) // per, -(-(last - start) // per))

    @cached_property
    def _of_unit(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, page in enumerate(self.pages):
            found.setdefault(page.unit, []).append(number)
        return found


class PageCopies:
    """The valid and the newest copy of each page of a node, and the checksums of all copies.

    Each rank writes and flips its own pages. All ranks of the node see `newest` and the checksums, which start as 0,
    the checksum of zeros, because new files contain zeros.
    """

    def __init__(self, table: PageTable, *, count: int, node: Node, compute: Sum) -> None:
        """Set up `count` copies (1 or 2) of each page on a drive. All ranks call it with the same arguments.

        `compute` returns a buffer's CRC-32.
        """
        self.count, self._compute, pages, fields = count, compute, table.pages, table.format.fields
        self._two = [count == 2 and on_drive(page.home) for page in pages]
        self._valid = bytearray(len(pages))
        self._newest = node.memory(len(pages) if count == 2 else 0)
        self._written: set[int] = set()
        self._fields = list(fields)
        self._sizes = [[field.padded(page) for field in fields.values()] for page in pages]
        memory = node.memory(_SUM_BYTES * count * len(self._fields) * len(pages))
        self._sums = memory.numpy().data.cast("I")

    def valid(self, number: int) -> int:
        """Return the valid copy of the page, as of the last flip: 0 or 1."""
        return self._valid[number]

    def newest(self, number: int) -> int:
        """Return the copy that any rank wrote last; its content is complete once that write has completed."""
        return int(self._newest[number]) if self._two[number] else 0

    def free(self, number: int) -> int:
        """Return the copy that the next write goes to."""
        return 1 - self._valid[number] if self._two[number] else 0

    def written(self, number: int) -> None:
        """Record a write of the page to its free copy. Any thread may call it."""
        if self._two[number]:
            self._newest[number] = self.free(number)
            self._written.add(number)

    def flip(self) -> None:
        """Make all copies that this rank has written the valid ones; call it after their writes have completed."""
        for number in self._written:
            self._valid[number] = self.free(number)
        self._written.clear()

    def forget(self) -> None:
        """Discard all written copies. Call it after their writes have completed, or they could overwrite later ones."""
        for number in self._written:
            self._newest[number] = self._valid[number]
        self._written.clear()

    # -- checksums ----------------------------------------------------------------------------------------------------

    def keep_sums(self, number: int, copy: int, field: str | None, data: torch.Tensor) -> None:
        """Store the checksums of one copy of a page. `data` (uint8) is `field`, or with None the whole page."""
        for _, at, computed in self._computed(number, copy, field, data):
            self._sums[at] = computed

    def differing(self, number: int, copy: int, field: str | None, data: torch.Tensor) -> str | None:
        """Return the first field of `data` whose checksum differs, or None. `data`: see `keep_sums`."""
        for name, at, computed in self._computed(number, copy, field, data):
            if computed != self._sums[at]:
                return name
        return None

    def _computed(
        self, number: int, copy: int, field: str | None, data: torch.Tensor
    ) -> Iterator[tuple[str, int, int]]:
        """Yield each field's name, the index of its checksum, and the checksum of its bytes in `data`."""
        first, start = self._first_sum(number, copy), 0
        for index, (name, size) in enumerate(zip(self._fields, self._sizes[number], strict=True)):
            if field in (None, name):
                yield name, first + index, self._compute(data[start:][:size])
                start += size
        assert start == data.numel(), "all bytes of the page, or of its field"

    def _first_sum(self, number: int, copy: int) -> int:
        return (number * self.count + copy) * len(self._fields)

    # -- for the record of a step -------------------------------------------------------------------------------------

    def newest_bits(self) -> bytes:
        """Return the newest copy of each page as a bit map, the first page in the lowest bit of the first byte."""
        bits = bytearray(-(-len(self._two) // 8))
        for number in range(len(self._two)):
            bits[number // 8] |= self.newest(number) << number % 8
        return bytes(bits)

    def newest_sums(self) -> bytes:
        """Return the checksums of each page's newest copy, page by page, 4 bytes for each field."""
        count = len(self._fields)
        firsts = [self._first_sum(number, self.newest(number)) for number in range(len(self._two))]
        return b"".join(self._sums[first : first + count].tobytes() for first in firsts)

    def begin(self, newest: Sequence[int], sums: bytes) -> None:
        """Take over an earlier process's files: the valid copy of each page, and `sums` as from `newest_sums`."""
        given, count = memoryview(sums).cast("I"), len(self._fields)
        for number, copy in enumerate(newest):
            if self._two[number]:
                self._valid[number] = self._newest[number] = copy
            first = self._first_sum(number, copy)
            self._sums[first : first + count] = given[number * count : (number + 1) * count]


def copies_of_bits(bits: bytes, count: int) -> list[int]:
    """Decode `PageCopies.newest_bits` for `count` pages; raise ValueError if it has another length."""
    if len(bits) != -(-count // 8):
        raise ValueError(f"it has {len(bits)} bytes of places for {count} pages")
    return [bits[number // 8] >> number % 8 & 1 for number in range(count)]
