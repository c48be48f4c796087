"""Conversations -> rows of one length, each whole in a row of its own, and what of a row is learned.

    row   id id id id ... pad pad

An id's upper bit says that it is not learned. So a file of rows is a file of ids, read at any place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offload_trainer.data.answers import Encoded
from offload_trainer.units import format_count

NOT_LEARNED = 1 << 31
IDS = NOT_LEARNED - 1


@dataclass
class Counts:
    """What became of the conversations that were given."""

    conversations: int = 0
    tokens: int = 0
    longest: int = 0
    learned: int = 0  # tokens, of those that are in rows
    cut: int = 0  # conversations
    cut_off: int = 0  # their tokens that are in no row
    left_out: int = 0  # conversations, in which nothing is learned

    def told(self, *, length: int) -> str:
        """In a line."""
        kept = self.tokens - self.cut_off
        parts = [
            f"{self.conversations} conversations, {format_count(self.tokens)} tokens, {self.learned / kept:.0%} of "
            f"them learned; the longest has {self.longest}"
        ]
        if self.cut:
            share = f"{self.cut_off / self.tokens:.1%} of the tokens"
            parts.append(f"{self.cut} longer than a row of {length} are cut ({share})")
        if self.left_out:
            parts.append(f"{self.left_out} are left out, in whose first {length} tokens nothing is learned")
        parts.append(f"{1 - kept / (self.conversations * length):.0%} of the rows is padding")
        return "; ".join(parts)


class RowMaker:
    """Takes conversations one by one and gives their rows: uint32 of `length`, marked as above."""

    def __init__(self, length: int, *, pad: int) -> None:
        """`pad` fills up what is left of a row."""
        self.counts = Counts()
        self._length, self._pad = length, pad

    def row_of(self, encoded: Encoded) -> np.ndarray | None:
        """The conversation's first `length` tokens; None where nothing is learned in them."""
        count, used = len(encoded.ids), min(len(encoded.ids), self._length)
        learned = np.asarray(encoded.counted[:used], dtype=bool)
        learned[:1] = False  # nothing comes before it that it could follow from
        if not learned.any():
            self.counts.left_out += 1
            return None
        self.counts.conversations += 1
        self.counts.tokens += count
        self.counts.longest = max(self.counts.longest, count)
        self.counts.learned += int(learned.sum())
        self.counts.cut += count > used
        self.counts.cut_off += count - used
        row = np.full(self._length, self._pad | NOT_LEARNED, dtype=np.uint32)
        row[:used] = encoded.ids[:used]
        row[:used][~learned] |= np.uint32(NOT_LEARNED)
        return row
