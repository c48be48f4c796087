"""Conversion of conversations to rows of fixed length, with one or several conversations in a row, marked for the loss.

    records ── Example ── RowEncoder: AnswerEncoder ── RowMaker (── Packer) ──> rows of marked ids ── TokenWriter

    row      id id id id ... | pad pad                     one conversation per row
    packed   id id id id | id id | id id id ... | pad pad  as many conversations as fit

The top bit of an id (`NOT_LEARNED`) means that the id is not learned, the bit below it (`BEGINS`) that a conversation
or the padding begins there. Every conversation has a learned token, unlike padding, which distinguishes the two.
A file of rows is an ordinary file of ids.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from offload_trainer.config import DataSection
from offload_trainer.data.conversations import Example, example_of
from offload_trainer.data.loss_mask import AnswerEncoder, Encoded
from offload_trainer.data.tokenfile import BEGINS, NOT_LEARNED, TokenWriter
from offload_trainer.data.tokenizer import padding_id
from offload_trainer.errors import UserError
from offload_trainer.units import format_count

# Increase it when the same conversations and template give other rows than before.
_VERSION = 2
_BATCH = 256  # conversations per tokenizer call
_SECONDS_BETWEEN_REPORTS = 5.0
_OPEN = 64  # rows being filled at the same time
_PLAIN_TEMPLATE = Path(__file__).parent / "builtin" / "chat_template.jinja"


@dataclass(frozen=True)
class RowOptions:
    """Settings of the conversion of conversations to rows."""

    form: str  # name of the lines' form, see conversations.py
    everything: bool  # train on all tokens, not only on answers
    length: int  # row length in tokens
    packed: bool  # put several conversations in a row

    def key(self, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
        """Return everything that the rows depend on except the lines and the tokenizer's ids."""
        # omit the key for unpacked rows, so that their existing cache files keep their names
        packed = ["packed"] if self.packed else []
        return [_VERSION, self.form, self.everything, self.length, template_digest(tokenizer), *packed]


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits that differ whenever two chat templates do."""
    return hashlib.blake2b(repr(tokenizer.chat_template).encode(), digest_size=8).hexdigest()


def row_options(
    section: DataSection, form: str, *, tokenizer: PreTrainedTokenizerBase, length: int, say: Callable[[str], None]
) -> RowOptions:
    """Return how conversations of `form` become rows of `length` tokens, in a token file and in a stream.

    A tokenizer without a chat template gets a plain one, which exports of the model then contain too.
    """
    if not tokenizer.chat_template:
        tokenizer.chat_template = _PLAIN_TEMPLATE.read_text()
        say('note: the tokenizer has no chat template: turns become lines with "User: ..." and "Assistant: ..."')
    return RowOptions(form, everything=section.train_on == "all", length=length, packed=section.packing == "on")


def write_rows(
    writer: TokenWriter,
    records: Iterator[tuple[str, dict[str, Any]]],
    wish: RowOptions,
    *,
    tokenizer: PreTrainedTokenizerBase,
    end_of_text: int | None,
    say: Callable[[str], None],
) -> None:
    """Write the rows of all records and set the writer's summary; `tokenizer` must have its chat template.

    Raises UserError, with file and line, for a record that is not a conversation, and if no conversation has a learned
    token.
    """
    rows = RowEncoder(wish, tokenizer=tokenizer, end_of_text=end_of_text)
    reported = time.monotonic()
    examples = (example_of(record, form=wish.form, where=where) for where, record in records)
    while batch := list(islice(examples, _BATCH)):
        for row in rows.encode(batch):
            writer.write(row)
        if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            say(f"{rows.counts.conversations} conversations, {format_count(rows.counts.tokens)} tokens")
    for row in rows.rest():
        writer.write(row)
    if not writer.tokens:
        raise UserError(rows.counts.why_none(length=wish.length))
    writer.write([padding_id(tokenizer) | NOT_LEARNED])  # the last row needs one token after it as its last target
    writer.summary = rows.summary


class RowEncoder:
    """Converts conversations to rows, as a file of rows and a stream have them."""

    def __init__(self, wish: RowOptions, *, tokenizer: PreTrainedTokenizerBase, end_of_text: int | None) -> None:
        """Set up the encoder; `tokenizer` must have its chat template. Raises UserError as `AnswerEncoder`."""
        self.options = wish
        self._encoder = AnswerEncoder(tokenizer, everything=wish.everything, end_of_text=end_of_text)
        pad = padding_id(tokenizer)
        self._maker, self._packer = RowMaker(wish.length, pad=pad), Packer(wish.length, pad=pad)
        self._complete = 0  # rows

    @property
    def counts(self) -> Counts:
        return self._maker.counts

    @property
    def open_rows(self) -> int:
        """Number of packed rows that more conversations may join."""
        return len(self._packer.open)

    @property
    def summary(self) -> str:
        """Statistics of the conversations so far, of which one at least must have a row."""
        told = self.counts.told(rows=self._complete + self.open_rows, length=self.options.length)
        return "; ".join([told, *self._encoder.unsaid.told()])

    def encode(self, examples: Sequence[Example]) -> Iterator[np.ndarray]:
        """Yield the rows that these conversations complete. Raises UserError as `AnswerEncoder.encode`."""
        packed = self.options.packed
        for encoded in self._encoder.encode(examples):
            row = self._maker.cut(encoded) if packed else self._maker.row_of(encoded)
            if row is not None and packed:
                row = self._packer.add(row)
            if row is not None:
                self._complete += 1
                yield row

    def rest(self) -> list[np.ndarray]:
        """Return the rows that are still open; conversations that follow begin new ones."""
        rows = self._packer.rest()
        self._complete += len(rows)
        return rows


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

    def why_none(self, *, length: int) -> str:
        """Return why no conversation has produced a row, and what to do."""
        without = (
            f"{self.unanswered} have no answer to train on (a message from the assistant, without 'weight': 0 or "
            "'train': false)"
        )
        if self.unanswered and not self.left_out:
            return (
                f"of the conversations {without}, and there are no others; give them answers, or set data.train_on=all"
            )
        left = f": all {self.left_out} are left out" if self.left_out else ""
        more = f"; {without}" if self.unanswered else ""
        return (
            f"no conversation has tokens to train on within its first {length}{left}{more}; give more, a "
            "larger --seq-len, or data.train_on=all"
        )


class RowMaker:
    """Converts conversations one by one into uint32 rows of `length`, marked as described above."""

    def __init__(self, length: int, *, pad: int) -> None:
        """Set the row length in tokens and the id `pad` that fills the rest of a row."""
        self.counts = Counts()
        self._length, self._pad = length, pad

    def row_of(self, encoded: Encoded) -> np.ndarray | None:
        """Return a row with this conversation alone, or None if nothing is learned in its first `length` tokens."""
        ids = self.cut(encoded)
        return None if ids is None else _padded(ids, self._length, pad=self._pad)

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


class Packer:
    """Packs marked conversations into rows, each into the row with the least sufficient room (best fit)."""

    def __init__(self, length: int, *, pad: int) -> None:
        self._length, self._pad = length, pad
        self.open: list[np.ndarray] = []  # marked ids of each open row

    def add(self, ids: np.ndarray) -> np.ndarray | None:
        """Add a conversation of at most `length` ids.

        Returns a row that is complete, if any: a full one, or the fullest one if too many are open.
        """
        ids = np.concatenate([ids[:1] | np.uint32(BEGINS), ids[1:]])
        fitting = [n for n, row in enumerate(self.open) if len(row) + len(ids) <= self._length]
        if fitting:
            place = max(fitting, key=lambda n: len(self.open[n]))
            self.open[place] = np.concatenate([self.open[place], ids])
        else:
            self.open.append(ids)
        fullest = max(range(len(self.open)), key=lambda n: len(self.open[n]))
        if len(self.open) <= _OPEN and len(self.open[fullest]) < self._length:
            return None
        return _padded(self.open.pop(fullest), self._length, pad=self._pad)

    def rest(self) -> list[np.ndarray]:
        """Return the rows that are still open, in the order in which they were started, and forget them."""
        rows, self.open = self.open, []
        return [_padded(row, self._length, pad=self._pad) for row in rows]


def _padded(ids: np.ndarray, length: int, *, pad: int) -> np.ndarray:
    """Return a row of `length` ids, in which the padding is marked as a separate segment."""
    padding = np.full(length - len(ids), pad | NOT_LEARNED, dtype=np.uint32)
    padding[:1] |= np.uint32(BEGINS)
    return np.concatenate([ids, padding])
