"""Conversations -> rows of one length, each conversation whole within its row, and what of a row is learned.

    row   id id id id ... | id id ... | pad pad     one conversation, or several behind each other

An id's upper two bits say that it is not learned, and that it begins a conversation. So a file of rows is a file of
ids, read at any place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from offload_trainer.data.answers import Encoded
from offload_trainer.units import format_count

NOT_LEARNED, BEGINS = 1 << 31, 1 << 30
IDS = BEGINS - 1
_OPEN = 256  # rows that are filled at a time


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
    rows: int = 0

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
        parts.append(f"{self.rows} rows, {1 - kept / (self.rows * length):.0%} of them padding")
        return "; ".join(parts)


@dataclass(eq=False)
class _Row:
    parts: list[np.ndarray] = field(default_factory=list)
    used: int = 0


class RowMaker:
    """Takes conversations one by one and gives rows as they are full: uint32 of `length`, marked as above."""

    def __init__(self, length: int, *, pad: int, packed: bool) -> None:
        """`packed`: several conversations in a row where they fit, else one. `pad` fills up what is left."""
        self.counts = Counts()
        self._length, self._pad, self._packed = length, pad, packed
        self._open: list[_Row] = []

    def add(self, encoded: Encoded) -> Iterator[np.ndarray]:
        """Put a conversation into a row, its first `length` tokens if it has more."""
        count = len(encoded.ids)
        learned = np.asarray(encoded.counted[: self._length], dtype=bool)
        learned[:1] = False  # nothing comes before it that it could follow from
        if not learned.any():
            self.counts.left_out += 1
            return
        self.counts.conversations += 1
        self.counts.tokens += count
        self.counts.longest = max(self.counts.longest, count)
        self.counts.learned += int(learned.sum())
        self.counts.cut += count > self._length
        self.counts.cut_off += max(0, count - self._length)
        marked = np.asarray(encoded.ids[: self._length], dtype=np.uint32)
        marked[~learned] |= np.uint32(NOT_LEARNED)
        marked[0] |= np.uint32(BEGINS)
        yield from self._put(marked)

    def _put(self, marked: np.ndarray) -> Iterator[np.ndarray]:
        """Into the fullest row that has room, so that rows are full and few are open."""
        fitting = [row for row in self._open if row.used + marked.size <= self._length]
        if fitting:
            row = max(fitting, key=lambda row: row.used)
        else:
            row = _Row()
            self._open.append(row)
        row.parts.append(marked)
        row.used += marked.size
        if not self._packed or row.used == self._length:
            yield self._close(row)
        elif len(self._open) > _OPEN:
            yield self._close(max(self._open, key=lambda row: row.used))

    def rest(self) -> Iterator[np.ndarray]:
        """The rows that were not full yet, in the order in which they were begun."""
        for row in list(self._open):
            yield self._close(row)

    def _close(self, row: _Row) -> np.ndarray:
        self._open.remove(row)
        self.counts.rows += 1
        whole = np.full(self._length, self._pad | NOT_LEARNED, dtype=np.uint32)
        whole[: row.used] = np.concatenate(row.parts)
        whole[row.used : row.used + 1] |= np.uint32(BEGINS)
        return whole
