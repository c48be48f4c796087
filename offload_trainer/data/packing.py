"""Rows of fixed length from encoded conversations, with one or several conversations in a row, marked for the loss.

    row      id id id id ... | pad pad                     one conversation per row
    packed   id id id id | id id | id id id ... | pad pad  as many conversations as fit

The top bit of an id means that the id is not learned, the bit below it that a conversation or the padding begins there.
Every conversation has a learned token and padding has no learned token, so the two can be told apart. A file of rows is
an ordinary file of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offload_trainer.data.loss_mask import Encoded
from offload_trainer.units import format_count

NOT_LEARNED = 1 << 31
BEGINS = 1 << 30
IDS = BEGINS - 1
_OPEN = 64  # rows being filled at the same time


def padding_of(marks: np.ndarray) -> np.ndarray:
    """Return the number of padding tokens at the end of each row of marked ids, shape [rows, tokens].

    It is 0 for files of unpacked rows that were written before padding was marked.
    """
    places = np.arange(marks.shape[1])
    last = np.where(marks & BEGINS, places, 0).max(axis=1)
    learned = (marks & NOT_LEARNED == 0) & (places >= last[:, None])
    found: np.ndarray = np.where(learned.any(axis=1), 0, marks.shape[1] - last)
    return found


@dataclass
class Counts:
    """Statistics on the conversations of a file."""

    conversations: int = 0
    tokens: int = 0
    longest: int = 0
    learned: int = 0  # learned tokens in rows
    cut: int = 0  # number of conversations cut to the row length
    cut_off: int = 0  # their tokens that are in no row
    left_out: int = 0  # conversations whose answers are all cut off
    unanswered: int = 0  # conversations that have no answer to learn

    def told(self, *, rows: int, length: int) -> str:
        """Return a one-line summary for a file of `rows` rows of `length` tokens."""
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
    """Converts conversations one by one into uint32 rows of `length`, marked as described above."""

    def __init__(self, length: int, *, pad: int) -> None:
        """Set the row length in tokens and the id `pad` that fills the rest of a row."""
        self.counts = Counts()
        self._length, self._pad = length, pad

    def row_of(self, encoded: Encoded) -> np.ndarray | None:
        """Return a row with this conversation alone, or None if nothing is learned in its first `length` tokens."""
        ids = self.cut(encoded)
        if ids is None:
            return None
        return np.concatenate([ids, _padding(self._length - len(ids), pad=self._pad)])

    def cut(self, encoded: Encoded) -> np.ndarray | None:
        """Return the conversation's first `length` tokens, marked, or None if nothing is learned in them."""
        count, used = len(encoded.ids), min(len(encoded.ids), self._length)
        learned = np.asarray(encoded.counted[:used], dtype=bool)
        learned[:1] = False  # the first token has no context to be predicted from
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
    """Marked ids of conversations, concatenated."""

    parts: list[np.ndarray] = field(default_factory=list)
    used: int = 0

    def add(self, ids: np.ndarray) -> None:
        self.parts.append(ids)
        self.used += len(ids)


class Packer:
    """Packs marked conversations into rows, each into the row with the least sufficient room (best fit)."""

    def __init__(self, length: int, *, pad: int) -> None:
        self._length, self._pad = length, pad
        self._open: list[_Row] = []

    def add(self, ids: np.ndarray) -> np.ndarray | None:
        """Add a conversation of at most `length` ids.

        Returns a row that is complete, if any: a full one, or the fullest one if too many are open.
        """
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
        """Return the rows that are still open, in the order in which they were started."""
        return [self._closed(row) for row in self._open]

    def _closed(self, row: _Row) -> np.ndarray:
        row.add(_padding(self._length - row.used, pad=self._pad))
        return np.concatenate(row.parts)


def _padding(count: int, *, pad: int) -> np.ndarray:
    """Return `count` padding ids, marked as a separate segment."""
    ids = np.full(count, pad | NOT_LEARNED, dtype=np.uint32)
    ids[:1] |= np.uint32(BEGINS)
    return ids
