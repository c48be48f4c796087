"""Conversations -> rows of one length, each whole in a row, and what of a row is learned.

    row      id id id id ... | pad pad                     a conversation in a row of its own
    packed   id id id id | id id | id id id ... | pad pad  as many as have room

An id's upper bit says that it is not learned, the one below it that a conversation or the padding begins with it. Every
conversation has a token that is learned and padding has none, so both can be told apart. A file of rows is a file of
ids, read at any place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offload_trainer.data.loss_mask import Encoded
from offload_trainer.units import format_count

NOT_LEARNED = 1 << 31
BEGINS = 1 << 30
IDS = BEGINS - 1
_OPEN = 64  # rows that are being filled at a time


def padding_of(marks: np.ndarray) -> np.ndarray:
    """Return the number of padding tokens at the end of each row of marked ids, shape [rows, tokens].

    Files of unpacked rows that were made before padding was marked count none.
    """
    places = np.arange(marks.shape[1])
    last = np.where(marks & BEGINS, places, 0).max(axis=1)
    learned = (marks & NOT_LEARNED == 0) & (places >= last[:, None])
    found: np.ndarray = np.where(learned.any(axis=1), 0, marks.shape[1] - last)
    return found


@dataclass
class Counts:
    """What became of the conversations that were given."""

    conversations: int = 0
    tokens: int = 0
    longest: int = 0
    learned: int = 0  # tokens, of those that are in rows
    cut: int = 0  # conversations
    cut_off: int = 0  # their tokens that are in no row
    left_out: int = 0  # conversations whose answers are all cut off
    unanswered: int = 0  # conversations that have no answer to learn

    def told(self, *, rows: int, length: int) -> str:
        """In a line, of so many rows."""
        kept = self.tokens - self.cut_off
        parts = [
            f"{self.conversations} conversations, {format_count(self.tokens)} tokens, {self.learned / kept:.0%} of "
            f"them trained on; the longest has {self.longest}"
        ]
        if self.cut:
            share = f"{self.cut_off / self.tokens:.1%} of the tokens"
            parts.append(f"{self.cut} longer than a row of {length} are cut ({share})")
        if self.left_out:
            parts.append(f"{self.left_out} are left out, because their first {length} tokens have nothing to train on")
        if self.unanswered:
            parts.append(f"{self.unanswered} are left out, because they have no answer to train on")
        parts.append(f"{rows} rows, {1 - kept / (rows * length):.0%} of them padding")
        return "; ".join(parts)


class RowMaker:
    """Takes conversations one by one and gives their rows: uint32 of `length`, marked as above."""

    def __init__(self, length: int, *, pad: int) -> None:
        """`pad` fills up what is left of a row."""
        self.counts = Counts()
        self._length, self._pad = length, pad

    def row_of(self, encoded: Encoded) -> np.ndarray | None:
        """The conversation in a row of its own; None where nothing is learned in its first `length` tokens."""
        ids = self.cut(encoded)
        if ids is None:
            return None
        return np.concatenate([ids, _padding(self._length - len(ids), pad=self._pad)])

    def cut(self, encoded: Encoded) -> np.ndarray | None:
        """Its first `length` tokens, marked; None where nothing is learned in them."""
        count, used = len(encoded.ids), min(len(encoded.ids), self._length)
        learned = np.asarray(encoded.counted[:used], dtype=bool)
        learned[:1] = False  # nothing comes before it that it could follow from
        if not learned.any():
            if any(encoded.counted):
                self.counts.left_out += 1
            else:
                self.counts.unanswered += 1
            return None
        self.counts.conversations += 1
        self.counts.tokens += count
        self.counts.longest = max(self.counts.longest, count)
        self.counts.learned += int(learned.sum())
        self.counts.cut += count > used
        self.counts.cut_off += count - used
        ids = np.array(encoded.ids[:used], dtype=np.uint32)
        ids[~learned] |= np.uint32(NOT_LEARNED)
        return ids


@dataclass(eq=False)
class _Row:
    """Marked ids of conversations, one behind the other."""

    parts: list[np.ndarray] = field(default_factory=list)
    used: int = 0

    def add(self, ids: np.ndarray) -> None:
        self.parts.append(ids)
        self.used += len(ids)


class Packer:
    """Lays marked conversations out in rows, each in the row with the least room that has enough (best fit)."""

    def __init__(self, length: int, *, pad: int) -> None:
        self._length, self._pad = length, pad
        self._open: list[_Row] = []

    def add(self, ids: np.ndarray) -> np.ndarray | None:
        """Takes at most `length` ids. Gives a row that is complete: full, or the fullest where too many are open."""
        first = ids[:1] | np.uint32(BEGINS)
        row = max((r for r in self._open if r.used + len(ids) <= self._length), key=lambda r: r.used, default=None)
        if row is None:
            row = _Row()
            self._open.append(row)
        row.add(np.concatenate([first, ids[1:]]))
        fullest = max(self._open, key=lambda r: r.used)
        if len(self._open) <= _OPEN and fullest.used < self._length:
            return None
        self._open.remove(fullest)
        return self._closed(fullest)

    def rest(self) -> list[np.ndarray]:
        """The rows that are still open, in the order in which they were begun."""
        return [self._closed(row) for row in self._open]

    def _closed(self, row: _Row) -> np.ndarray:
        row.add(_padding(self._length - row.used, pad=self._pad))
        return np.concatenate(row.parts)


def _padding(count: int, *, pad: int) -> np.ndarray:
    """Return `count` padding ids, marked as a segment of their own."""
    ids = np.full(count, pad | NOT_LEARNED, dtype=np.uint32)
    ids[:1] |= np.uint32(BEGINS)
    return ids
