"""Which of the two places that a page has in its file holds it, so that no step overwrites the state before it.

    write      to the place that does not hold       `newest` is there, `holding` where it was
    flip       what was written is what holds        all pages at once; the places that held are free
    forget     what was written never was            all pages at once

Pages in memory and on the device have one place, and those on drives as well unless a second one was set aside: what
is written there is changed where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import Page


class ShadowPages:
    """Of all pages of a node. Each rank writes and flips its own; `newest` all of them see."""

    def __init__(self, pages: Sequence[Page], *, count: int, node: Node) -> None:
        """`count`: places of a page on a drive, 1 or 2. All ranks call it alike."""
        self.count = count
        self._two = [count == 2 and page.home >= 0 for page in pages]
        self._holding = bytearray(len(pages))
        self._newest = node.memory(len(pages) if count == 2 else 0)
        self._written: set[int] = set()

    def holding(self, number: int) -> int:
        """Where the page is as it was at the last flip."""
        return self._holding[number]

    def newest(self, number: int) -> int:
        """Where it is as it was written last, by whichever rank: of interest once its bytes have arrived."""
        return int(self._newest[number]) if self._two[number] else 0

    def free(self, number: int) -> int:
        """Where it would be written now."""
        return 1 - self._holding[number] if self._two[number] else 0

    def written(self, number: int) -> None:
        """Its bytes go to the free place. On any thread."""
        if self._two[number]:
            self._newest[number] = self.free(number)
            self._written.add(number)

    def flip(self) -> None:
        """All that was written is what holds; its bytes have arrived."""
        for number in self._written:
            self._holding[number] = self.free(number)
        self._written.clear()

    def forget(self) -> None:
        """All that was written never was; its bytes have arrived, so that they follow none that is written next."""
        for number in self._written:
            self._newest[number] = self._holding[number]
        self._written.clear()

    def begin(self, newest: Sequence[int]) -> None:
        """As another process has left the files: where each page is."""
        for number, place in enumerate(newest):
            if self._two[number]:
                self._holding[number] = self._newest[number] = place

    def bits(self) -> bytes:
        """The newest place of each page, eight to a byte, the first in the lowest bit."""
        bits = bytearray(-(-len(self._two) // 8))
        for number in range(len(self._two)):
            bits[number // 8] |= self.newest(number) << number % 8
        return bytes(bits)


def places_of(bits: bytes, count: int) -> list[int]:
    """What `bits` has told of `count` pages. ValueError where it is of another number."""
    if len(bits) != -(-count // 8):
        raise ValueError(f"it has {len(bits)} bytes of places for {count} pages")
    return [bits[number // 8] >> number % 8 & 1 for number in range(count)]
