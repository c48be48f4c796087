"""Tokenisation of documents of any length in pieces that give, one after another, the ids of the whole document.

A tokenizer needs about 160 bytes of memory per byte of text in one call, so long text is passed in pieces. Only the
tokenizer knows whether a cut changes ids: GPT-2's kind treats a run of newlines and spaces as one word, Metaspace puts
a space before the first word. Each candidate cut is therefore tested by tokenising the text around it whole and in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from offload_trainer.data.documents import read_documents, text_in
from offload_trainer.data.tokenizer import document_marks

PIECE = 1 << 16  # characters
# A batch for one call: large enough for a multi-threaded tokenizer, small enough for memory.
BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 4096
_AROUND = 256  # characters on each side of a cut that are tokenised to test it
_TRIED = 4  # candidate places of each kind


class Piece(NamedTuple):
    """Consecutive text of one document; `ends_document` is set on the last piece."""

    text: str
    ends_document: bool
    before: str = ""  # text to tokenise in front of `text`; its ids are then removed


class TextSplitter:
    """Splits text at places where `encode`, which returns a text's ids, gives the ids of the whole text."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.inexact = 0  # cuts for which no exact place was found
        self._encode = encode

    def pieces(self, blocks: Iterable[str]) -> Iterator[Piece]:
        """Yield a document, passed as consecutive blocks of text, in pieces of at most `PIECE` characters.

        An empty document yields no piece.
        """
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
        self.inexact += 1
        if places:
            return places[0], ""
        # A run of one kind of character: cut between two tokens if a nearby place between tokens is found.
        near = range(end, max(start, end - 8 * _TRIED), -1)
        return next((place for place in near if self._exact(text, place, "")), end), ""

    def _exact(self, text: str, place: int, before: str) -> bool:
        left, right = text[max(0, place - _AROUND) : place], text[place : place + _AROUND]
        following = self._encode(before + right)[len(self._encode(before)) if before else 0 :]
        return self._encode(left + right) == self._encode(left) + following


def _between_words(text: str, space: str, start: int, end: int) -> list[int]:
    """Return the last places of `space` that have no other white space next to them."""
    found: list[int] = []
    place = end
    while len(found) < _TRIED and (place := text.rfind(space, start + 1, place)) >= 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            found.append(place)
    return found


class DocumentEncoder:
    """Encodes documents of any length, each between the ids that begin and end it, unless its text has them.

    `RowEncoder` (packing.py) has the same methods for conversations.
    """

    row_length, packed, open_rows, summary = None, False, 0, None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, text_field: str) -> None:
        self.splitter = TextSplitter(self._encode)
        self.key: list[Any] = [text_field]
        self._tokenizer, self._field = tokenizer, text_field

    @property
    def note(self) -> str:
        """A remark for the user on the documents so far, or an empty string."""
        inexact = self.splitter.inexact
        without = "splits text that has no lines or words, so a few ids may differ from those of the unsplit text"
        return f"note: {inexact} {without}" if inexact else ""

    def read(self, source: Path) -> Iterator[Iterable[str]]:
        """Yield the documents of a file as `read_documents` does."""
        return read_documents(source, text_field=self._field)

    def parsed(self, record: dict[str, Any], *, where: str) -> list[str]:
        """Return the document in a record. Raises UserError if it has none."""
        return [text_in(record, self._field, where=where)]

    def encode(self, documents: Iterable[Iterable[str]]) -> Iterator[np.ndarray]:
        """Yield the documents' ids as uint32, batch after batch."""
        (begin, end), begins_document = document_marks(self._tokenizer), True
        last: list[int] = []  # as many of the document's last ids as there are in `end`
        for batch in _batches(piece for blocks in documents for piece in self.splitter.pieces(blocks)):
            ids: list[int] = []
            for piece, row in zip(batch, self._encode_all([one.before + one.text for one in batch]), strict=True):
                if begins_document and row[: len(begin)] != begin:
                    ids += begin
                own = row[len(self._encode(piece.before)) :] if piece.before else row
                ids += own
                last = [*([] if begins_document else last), *own][-len(end) :]
                if piece.ends_document and last != end:
                    ids += end
                begins_document = piece.ends_document
            yield np.array(ids, dtype=np.uint32)

    def rest(self) -> list[np.ndarray]:
        return []

    def why_none(self) -> str:
        return "it contains no text: name another"

    def _encode_all(self, texts: list[str]) -> Any:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode_all([text])[0]
        return ids


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
