"""Conversion of documents to token ids, and of conversations to rows of fixed length that are marked for the loss.

A row has one conversation, or with packing as many as fit, and padding. The top bit of an id (`NOT_LEARNED`) means that
the id is not learned, the bit below it (`BEGINS`) that a conversation or the padding begins there. Every conversation
has a learned token, unlike padding.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_count
from offload_trainer.config import DataSection
from offload_trainer.data import documents
from offload_trainer.data.loss_mask import AnswerEncoder, Encoded
from offload_trainer.data.tokenfile import BEGINS, IDS, NOT_LEARNED
from offload_trainer.data.tokenizer import document_marks, vocabulary_size

PIECE = 1 << 16  # characters
# A batch for one call: large enough for a multi-threaded tokenizer, small enough for memory.
BATCH_CHARACTERS = 1 << 20
_AROUND = 256  # characters on each side of a cut that are tokenised to test it
_TRIED = 4  # candidate places of each kind
_OPEN = 64  # rows being filled at the same time
_PLAIN_TEMPLATE = Path(__file__).parent / "builtin" / "chat_template.jinja"


class Piece(NamedTuple):
    """Consecutive text of one document; `ends_document` is set on the last piece."""

    text: str
    ends_document: bool
    before: str = ""  # text to tokenise in front of `text`; its ids are then removed


class DocumentEncoder:
    """Encodes documents of any length, each between the ids that begin and end it, unless its text has them.

    A tokenizer needs about 160 bytes of memory per byte of text in one call, so long text is passed in pieces. Only the
    tokenizer knows whether a cut changes ids: GPT-2's kind treats a run of newlines and spaces as one word, Metaspace
    puts a space before the first word. Each candidate cut is tested by tokenising the text around it whole and in two.

    `RowEncoder` has the same methods. Ids depend on `identity`, `row_length`, the records and the tokenizer.
    """

    row_length, packed, summary = None, False, None
    why_none = "it contains no text: name another"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, text_field: str) -> None:
        self.identity = "" if text_field == "text" else f", field {text_field}"
        self._tokenizer, self.column = tokenizer, text_field
        self._inexact = 0  # cuts for which no exact place was found
        self.open_rows = list[np.ndarray]()  # documents are not in rows

    @property
    def note(self) -> str:
        """A remark for the user on the documents so far, or an empty string."""
        without = "splits text that has no lines or words, so a few ids may differ from those of the unsplit text"
        return f"note: {self._inexact} {without}" if self._inexact else ""

    def parsed(self, record: dict[str, Any], *, where: str) -> list[str]:
        """Return the document in a record. Raises UserError for a record without one."""
        with documents.at(where):
            return [documents.text_in(record, self.column)]

    def encode(self, documents: Iterable[Iterable[str]], *, last: bool = True) -> Iterator[np.ndarray]:
        """Yield the documents' ids as uint32, batch after batch. `last` is of no concern to documents."""
        (begin, end), begins_document = document_marks(self._tokenizer), True
        tail: list[int] = []  # the document's last ids, as many as `end` has
        for batch in _batches(piece for blocks in documents for piece in self.pieces(blocks)):
            ids: list[int] = []
            for piece, row in zip(batch, self._encode_all([one.before + one.text for one in batch]), strict=True):
                if begins_document and row[: len(begin)] != begin:
                    ids += begin
                own = row[len(self._encode(piece.before)) :] if piece.before else row
                ids += own
                tail = [*([] if begins_document else tail), *own][-len(end) :]
                if piece.ends_document and tail != end:
                    ids += end
                begins_document = piece.ends_document
            yield np.array(ids, dtype=np.uint32)

    def pieces(self, blocks: Iterable[str]) -> Iterator[Piece]:
        """Yield a document's consecutive blocks of text in pieces of at most `PIECE` characters; none if empty."""
        text, start, before = "", 0, ""
        for block in blocks:
            text, start = text[start:] + block, 0
            while len(text) - start > PIECE:
                end, next_before = self._cut(text, start)
                yield Piece(text[start:end], ends_document=False, before=before)
                start, before = end, next_before
        if text:
            yield Piece(text[start:], ends_document=True, before=before)

    def _cut(self, text: str, start: int) -> tuple[int, str]:
        """Return where the piece from `start` on ends, and the text to tokenise in front of the next piece."""
        end = start + PIECE
        # after a newline between two lines that are not blank, else before a space between two words
        places = [place + 1 for place in _between_words(text, "\n", start, end)]
        places += _between_words(text, " ", start, end)
        for before in (0, 1):  # characters of this piece to tokenise in front of the next one
            for place in places:
                if self._exact(text, place, text[place - before : place]):
                    return place, text[place - before : place]
        self._inexact += 1
        if places:
            return places[0], ""
        # A run of one kind of character: cut between two tokens if a nearby place between tokens is found.
        near = range(end, max(start, end - 8 * _TRIED), -1)
        return next((place for place in near if self._exact(text, place, "")), end), ""

    def _exact(self, text: str, place: int, before: str) -> bool:
        """Return whether a cut at this place gives the ids of the whole text."""
        left, right = text[max(0, place - _AROUND) : place], text[place : place + _AROUND]
        following = self._encode(before + right)[len(self._encode(before)) if before else 0 :]
        return self._encode(left + right) == self._encode(left) + following

    def _encode_all(self, texts: list[str]) -> Any:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _encode(self, text: str) -> list[int]:
        return self._encode_all([text])[0]


def _between_words(text: str, space: str, start: int, end: int) -> list[int]:
    """Return the last places of `space` that have no other white space next to them."""
    found: list[int] = []
    place = end
    while len(found) < _TRIED and (place := text.rfind(space, start + 1, place)) >= 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            found.append(place)
    return found


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class RowEncoder:
    """Encodes conversations as uint32 rows, marked as described above, for a token file and for a stream.

    Each has a row alone, or with `packing` joins the open row with the least sufficient room (best fit).
    """

    note, column = "", None

    def __init__(self, spec: TokenSpec, form: str) -> None:
        """Set up the encoder of records of `form`. A tokenizer without a chat template gets a plain one."""
        section, tokenizer, say = spec.section, spec.tokenizer, spec.say
        if not tokenizer.chat_template:
            begin = tokenizer.convert_ids_to_tokens(document_marks(tokenizer)[0])
            tokenizer.chat_template = "".join(begin) + _PLAIN_TEMPLATE.read_text()
            say('note: the tokenizer has no chat template: turns become lines with "User: ..." and "Assistant: ..."')
        everything = section.train_on == "all"
        self.row_length, self.packed, self._form = spec.seq_len, section.packing == "on", form
        day = date.today().isoformat() if section.template_date == "auto" else section.template_date
        self._day, self._answers = datetime.fromisoformat(day), AnswerEncoder(tokenizer, everything=everything)
        if self._answers.uses_variant:
            say("conversations are rendered with trl's training variant of the chat template")
        templates = repr(self._answers.templates)
        tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if name in templates}
        # This text differs whenever the templates, or what they read, do.
        template = hashlib.blake2b((templates + repr(tokens)).encode(), digest_size=8).hexdigest()
        if "strftime_now" in templates:
            template += f" on {day}"
            say(f"the chat template prints the date: {day} in the whole run (data.template_date)")
        self.identity = f", as {form}, train_on={section.train_on}, packing={section.packing}, template {template}"
        # Padding is not learned, so any id serves that the model has. It may lack the tokenizer's pad token.
        self._pad = (tokenizer.eos_token_id or 0) | NOT_LEARNED
        # Counts: conversations in rows, their tokens and the longest; tokens `learned` and `cut_off`; conversations
        # `cut` to a row, `left_out` since all their answers would be cut off, and `unanswered`, with nothing to learn.
        self.counts = Counter[str]()
        self._complete = 0  # number of rows that have been returned
        self.open_rows: list[np.ndarray] = []  # marked ids of each packed row that more conversations may join

    @property
    def summary(self) -> str:
        """Statistics of the conversations so far, of which one at least must have a row."""
        counts, length, rows = self.counts, self.row_length, self._complete + len(self.open_rows)
        kept = counts["tokens"] - counts["cut_off"]
        parts = [
            f"{counts['conversations']} conversations, {format_count(counts['tokens'])} tokens, "
            f"{counts['learned'] / kept:.0%} of them trained on; the longest has {counts['longest']}"
        ]
        if counts["cut"]:
            share = f"{counts['cut_off'] / counts['tokens']:.1%} of the tokens"
            parts.append(f"{counts['cut']} longer than a row of {length} are cut ({share})")
        if number := counts["left_out"]:
            parts.append(f"{number} are left out, because their first {length} tokens have nothing to train on")
        if number := counts["unanswered"]:
            parts.append(f"{number} are left out, because they have no answer to train on")
        parts.append(f"{rows} rows, {1 - kept / (rows * length):.0%} of them padding")
        return "; ".join([*parts, *self._answers.told()])

    def parsed(self, record: dict[str, Any], *, where: str) -> documents.Example:
        """Return the conversation in a record. Raises UserError for a record without one."""
        return documents.example_of(record, form=self._form, where=where)

    def encode(self, examples: Iterable[documents.Example], *, last: bool = True) -> Iterator[np.ndarray]:
        """Yield the rows that these conversations complete, and the open ones in their order if they are the `last`."""
        left = iter(examples)
        while batch := list(islice(left, 256)):  # one call of the tokenizer encodes a batch
            # Chat templates that ask for the date or the time print the day.
            with patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: self._day)):
                rendered = list(self._answers.encode(batch))
            yield from (row for encoded in rendered if (row := self.add(encoded)) is not None)
        if last:
            rows, self.open_rows = self.open_rows, []
            yield from map(self._padded, rows)

    @property
    def why_none(self) -> str:
        """Return why no conversation has produced a row, and what to do."""
        return (
            f"no conversation has tokens to train on within its first {self.row_length}: {self.counts['left_out']} are "
            f"longer, and {self.counts['unanswered']} have no answer to train on (a message from the assistant, "
            "without 'weight': 0 or 'train': false); give answers, a larger --seq-len, or data.train_on=all"
        )

    def add(self, encoded: Encoded) -> np.ndarray | None:
        """Add a conversation's first ids, as many as a row has, unless nothing is learned in them.

        Returns a row that is complete, if any: of packed rows a full one, or the fullest one if too many are open.
        """
        count, used = len(encoded.ids), min(len(encoded.ids), self.row_length)
        learned = np.asarray(encoded.counted[:used], dtype=bool)
        learned[:1] = False  # the first token has no context to be predicted from
        if not learned.any():
            self.counts["left_out" if any(encoded.counted) else "unanswered"] += 1
            return None
        self.counts.update(conversations=1, tokens=count, learned=int(learned.sum()), cut_off=count - used)
        self.counts["cut"] += count > used
        self.counts["longest"] = max(self.counts["longest"], count)
        ids = np.array(encoded.ids[:used], dtype=np.uint32)
        ids[~learned] |= np.uint32(NOT_LEARNED)
        if not self.packed:
            return self._padded(ids)
        ids[:1] |= np.uint32(BEGINS)
        fitting = [n for n, row in enumerate(self.open_rows) if len(row) + len(ids) <= self.row_length]
        if fitting:
            place = max(fitting, key=lambda n: len(self.open_rows[n]))
            self.open_rows[place] = np.concatenate([self.open_rows[place], ids])
        else:
            self.open_rows.append(ids)
        fullest = max(range(len(self.open_rows)), key=lambda n: len(self.open_rows[n]))
        if len(self.open_rows) <= _OPEN and len(self.open_rows[fullest]) < self.row_length:
            return None
        return self._padded(self.open_rows.pop(fullest))

    def _padded(self, ids: np.ndarray) -> np.ndarray:
        """Return a complete row, in which the padding is marked as a separate segment."""
        self._complete += 1
        padding = np.full(self.row_length - len(ids), self._pad, dtype=np.uint32)
        padding[:1] |= np.uint32(BEGINS)
        return np.concatenate([ids, padding])


Encoder = DocumentEncoder | RowEncoder


def records_in(source: Path, encoder: Encoder) -> Iterator[Any]:
    """Yield a file's conversations or documents, each as blocks of text that must be read before the next document."""
    if documents.holds_records(source):
        for where, record in documents.read_records(source, column=encoder.column):
            yield encoder.parsed(record, where=where)
        return
    with documents.opened(source) as file:
        yield documents.text_blocks(source, file)


@dataclass(frozen=True)
class TokenSpec:
    """The data section, the tokenizer and the rows of the model: all that turns text or conversations into ids."""

    section: DataSection
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str  # hash of the tokenizer
    vocabulary: int  # the model's number of ids
    seq_len: int
    say: Callable[[str], None]

    def form_of(self, sources: Sequence[Path]) -> str:
        """Return `data.format`, or the form of the files' first lines. Raises UserError if it is not trained on."""
        form: str = self.section.format
        text_field = self.section.text_field
        found: dict[str, Path] = {}  # the first file of each form
        for source in sources:
            kind, is_records = form, documents.holds_records(source)
            if form not in ("auto", documents.TEXT) and not is_records:
                raise UserError(f"{source}: data.format={form} is for lines of JSON and tables: give .jsonl files")
            if form == "auto":
                records = documents.read_records(source, column=text_field) if is_records else ()
                forms = (documents.form_of_record(one, text_field=text_field, where=where) for where, one in records)
                kind = next(forms, documents.TEXT)
            found.setdefault(kind, source)
        if len(found) > 1:
            listing = ", ".join(f"{kind} in {source}" for kind, source in found.items())
            raise UserError(f"the files have different formats: {listing}; use files of one format, or set data.format")
        return next(iter(found))

    def encoder(self, form: str) -> Encoder:
        """Return the encoder of records of `form`, for a token file or a stream."""
        if form != documents.TEXT:
            return RowEncoder(self, form)
        if self.tokenizer.eos_token_id is None:
            self.say("note: the tokenizer has no end-of-text: document boundaries are not marked")
        return DocumentEncoder(self.tokenizer, text_field=self.section.text_field)

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids`, which may be marked. Raises UserError if the model does not have all of them."""
        largest = int((ids & IDS).max(initial=0))
        if largest >= self.vocabulary:
            raise UserError(
                f"{', '.join(self.section.path)} has {self.tokenizer.convert_ids_to_tokens(largest)!r}, id {largest}, "
                f"but the model only has ids below {self.vocabulary}: leave that token out, set data.tokenizer to the "
                "model's own, or, with random weights, "
                f"model.overrides.vocab_size={vocabulary_size(self.tokenizer)}"
            )
        return ids
