"""Conversion of conversations to rows of fixed length, with one or several conversations in a row, marked for the loss.

    records ── Example ── RowEncoder: AnswerEncoder ── RowMaker ──> rows of marked ids ── TokenWriter

    row      id id id id ... | pad pad                     one conversation per row
    packed   id id id id | id id | id id id ... | pad pad  as many conversations as fit

The top bit of an id (`NOT_LEARNED`) means that the id is not learned, the bit below it (`BEGINS`) that a conversation
or the padding begins there. Every conversation has a learned token, unlike padding, which distinguishes the two.
A file of rows is an ordinary file of ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from offload_trainer.config import DataSection
from offload_trainer.data.chunked_tokenize import DocumentEncoder
from offload_trainer.data.conversations import COLUMNS, TEXT, Example, example_of
from offload_trainer.data.documents import read_records
from offload_trainer.data.loss_mask import AnswerEncoder, Encoded
from offload_trainer.data.tokenfile import BEGINS, NOT_LEARNED
from offload_trainer.data.tokenizer import document_marks
from offload_trainer.units import format_count

# Increase it when the same conversations and template give other rows than before.
_VERSION = 4
_BATCH = 256  # conversations per tokenizer call
_OPEN = 64  # rows being filled at the same time
_PLAIN_TEMPLATE = Path(__file__).parent / "builtin" / "chat_template.jinja"


@contextmanager
def _now_is(now: datetime) -> Iterator[None]:
    """Let chat templates that ask for the date or the time print `now`."""
    real, chat_template_utils.datetime = chat_template_utils.datetime, SimpleNamespace(now=lambda: now)
    try:
        yield
    finally:
        chat_template_utils.datetime = real


class RowEncoder:
    """Encodes conversations as rows, for a token file and for a stream."""

    note = ""

    def __init__(
        self,
        section: DataSection,
        form: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        say: Callable[[str], None],
    ) -> None:
        """Set up the encoder of records of `form` (conversations.py) into rows of `length` tokens.

        A tokenizer without a chat template gets a plain one, which exports of the model then contain too. Raises
        UserError as `AnswerEncoder`.
        """
        if not tokenizer.chat_template:
            begin = tokenizer.convert_ids_to_tokens(document_marks(tokenizer)[0])
            tokenizer.chat_template = "".join(begin) + _PLAIN_TEMPLATE.read_text()
            say('note: the tokenizer has no chat template: turns become lines with "User: ..." and "Assistant: ..."')
        everything = section.train_on == "all"
        self.row_length, self.packed, self._form = length, section.packing == "on", form
        day = date.today().isoformat() if section.template_date == "auto" else section.template_date
        self._day, self._answers = datetime.fromisoformat(day), AnswerEncoder(tokenizer, everything=everything)
        if self._answers.uses_variant:
            say("conversations are rendered with trl's training variant of the chat template")
        templates = repr(self._answers.templates)
        tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if name in templates}
        # This text differs whenever the templates, or what they read, do.
        self.template = hashlib.blake2b((templates + repr(tokens)).encode(), digest_size=8).hexdigest()
        if "strftime_now" in templates:
            self.template += f" on {day}"
            say(f"the chat template prints the date: {day} in the whole run (data.template_date)")
        # All that the rows depend on except the records and the tokenizer's ids
        self.key: list[Any] = [_VERSION, form, everything, length, self.packed, self.template]
        # Padding is not learned, so any id serves that the model has. It may lack the tokenizer's pad token.
        self._maker = RowMaker(length, pad=tokenizer.eos_token_id or 0, packed=self.packed)
        self.rest = self._maker.rest

    @property
    def open_rows(self) -> int:
        """Number of packed rows that more conversations may join."""
        return len(self._maker.open)

    @property
    def summary(self) -> str:
        """Statistics of the conversations so far, of which one at least must have a row."""
        told = self._maker.counts.told(rows=self._maker.complete + self.open_rows, length=self.row_length)
        return "; ".join([told, *self._answers.unsaid.told()])

    def read(self, source: Path) -> Iterator[Example]:
        """Yield the conversations of a file. Raises UserError, with file and line, for other records."""
        for where, record in read_records(source, wanted=COLUMNS, strings=True):
            yield self.parsed(record, where=where)

    def parsed(self, record: dict[str, Any], *, where: str) -> Example:
        """Return the conversation in a record. Raises UserError if it has none."""
        return example_of(record, form=self._form, where=where)

    def encode(self, examples: Iterable[Example]) -> Iterator[np.ndarray]:
        """Yield the rows that these conversations complete. Raises UserError as `AnswerEncoder.encode`."""
        left = iter(examples)
        while batch := list(islice(left, _BATCH)):
            with _now_is(self._day):
                rendered = list(self._answers.encode(batch))
            for encoded in rendered:
                row = self._maker.add(encoded)
                if row is not None:
                    yield row

    def why_none(self) -> str:
        return self._maker.counts.why_none(length=self.row_length)


Encoder = DocumentEncoder | RowEncoder


def encoder_of(
    section: DataSection, form: str, *, tokenizer: PreTrainedTokenizerBase, length: int, say: Callable[[str], None]
) -> Encoder:
    """Return the encoder of records of `form`, for a token file or a stream that is read in rows of `length` tokens."""
    if form == TEXT:
        if tokenizer.eos_token_id is None:
            say("note: the tokenizer has no end-of-text: document boundaries are not marked")
        return DocumentEncoder(tokenizer, text_field=section.text_field)
    return RowEncoder(section, form, tokenizer=tokenizer, length=length, say=say)


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
        return (
            f"no conversation has tokens to train on within its first {length}: {self.left_out} are longer, and "
            f"{self.unanswered} have no answer to train on (a message from the assistant, without 'weight': 0 or "
            "'train': false); give answers, a larger --seq-len, or data.train_on=all"
        )


class RowMaker:
    """Puts conversations into uint32 rows of `length`, marked as described above.

    Each has a row alone, or with `packed` joins the open row with the least sufficient room (best fit).
    """

    def __init__(self, length: int, *, pad: int, packed: bool = False) -> None:
        """Set the row length in tokens and the id `pad` that fills the rest of a row."""
        self.counts, self.complete = Counts(), 0  # statistics, and the number of rows that have been returned
        self.open: list[np.ndarray] = []  # marked ids of each open row
        self._length, self._pad, self._packed = length, pad, packed

    def add(self, encoded: Encoded) -> np.ndarray | None:
        """Add a conversation's first `length` tokens, unless nothing is learned in them.

        Returns a row that is complete, if any: of packed rows a full one, or the fullest one if too many are open.
        """
        ids = self._cut(encoded)
        if ids is None:
            return None
        if not self._packed:
            return self._padded(ids)
        ids[:1] |= np.uint32(BEGINS)
        fitting = [n for n, row in enumerate(self.open) if len(row) + len(ids) <= self._length]
        if fitting:
            place = max(fitting, key=lambda n: len(self.open[n]))
            self.open[place] = np.concatenate([self.open[place], ids])
        else:
            self.open.append(ids)
        fullest = max(range(len(self.open)), key=lambda n: len(self.open[n]))
        if len(self.open) <= _OPEN and len(self.open[fullest]) < self._length:
            return None
        return self._padded(self.open.pop(fullest))

    def rest(self) -> list[np.ndarray]:
        """Return the rows that are still open, in the order in which they were started, and forget them."""
        rows, self.open = self.open, []
        return [self._padded(row) for row in rows]

    def _cut(self, encoded: Encoded) -> np.ndarray | None:
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

    def _padded(self, ids: np.ndarray) -> np.ndarray:
        """Return a complete row, in which the padding is marked as a separate segment."""
        self.complete += 1
        padding = np.full(self._length - len(ids), self._pad | NOT_LEARNED, dtype=np.uint32)
        padding[:1] |= np.uint32(BEGINS)
        return np.concatenate([ids, padding])
