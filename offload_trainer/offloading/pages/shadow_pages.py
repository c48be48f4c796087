"""Track the two copies of each page on a drive, so that an update never overwrites the last valid state.

    write      goes to the copy that is not valid            `newest` points to it; `holding` stays the valid copy
    flip       makes all written copies the valid ones       the old copies become free
    forget     discards all written copies (rollback)        `newest` points to the valid copies again

Pages in RAM and on the device have one copy, and so do pages on drives if `count` is 1. Those are updated in place.
This module keeps only the bookkeeping; `PageStore` transfers the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import Page


class ShadowPages:
    """The valid and the newest copy of each page of a node.

    Each rank writes and flips its own pages. All ranks of the node see `newest`.
    """

    def __init__(self, pages: Sequence[Page], *, count: int, node: Node) -> None:
        """Set up `count` copies (1 or 2) of each page on a drive. All ranks call it with the same arguments."""
        self.count = count
        self._two = [count == 2 and page.home >= 0 for page in pages]
        self._holding = bytearray(len(pages))
        self._newest = node.memory(len(pages) if count == 2 else 0)
        self._written: set[int] = set()

    def holding(self, number: int) -> int:
        """Return the valid copy of the page, as of the last flip: 0 or 1."""
        return self._holding[number]

    def newest(self, number: int) -> int:
        """Return the copy that any rank wrote last; its content is complete once that write has completed."""
        return int(self._newest[number]) if self._two[number] else 0

    def free(self, number: int) -> int:
        """Return the copy that the next write goes to."""
        return 1 - self._holding[number] if self._two[number] else 0

    def written(self, number: int) -> None:
        """Record a write of the page to its free copy. Any thread may call it."""
        if self._two[number]:
            self._newest[number] = self.free(number)
            self._written.add(number)

    def flip(self) -> None:
        """Make all written copies the valid ones; call it after their writes have completed."""
        for number in self._written:
            self._holding[number] = self.free(number)
        self._written.clear()

    def forget(self) -> None:
        """Discard all written copies. Call it after their writes have completed, or they could overwrite later ones."""
        for number in self._written:
            self._newest[number] = self._holding[number]
        self._written.clear()

    def begin(self, newest: Sequence[int]) -> None:
        """Take over the files of an earlier process: `newest` is the valid copy of each page."""
        for number, place in enumerate(newest):
            if self._two[number]:
                self._holding[number] = self._newest[number] = place

    def bits(self) -> bytes:
        """Return the newest copy of each page as a bit map, the first page in the lowest bit of the first byte."""
        bits = bytearray(-(-len(self._two) // 8))
        for number in range(len(self._two)):
            bits[number // 8] |= self.newest(number) << number % 8
        return bytes(bits)


def places_of(bits: bytes, count: int) -> list[int]:
    """Decode `ShadowPages.bits` for `count` pages; raise ValueError if it has another length."""
    if len(bits) != -(-count // 8):
        raise ValueError(f"it has {len(bits)} bytes of places for {count} pages")
    return [bits[number // 8] >> number % 8 & 1 for number in range(count)]
