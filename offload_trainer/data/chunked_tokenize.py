"""Tokenisation of documents of any length in pieces that give, one after another, the ids of the whole document.

A tokenizer needs about 160 bytes of memory per byte of text in one call, so long text is passed in pieces. Only the
tokenizer knows whether a cut changes ids: GPT-2's kind treats a run of newlines and spaces as one word, Metaspace puts
a space before the first word. Each candidate cut is therefore tested by tokenising the text around it whole and in two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from offload_trainer.data.tokenfile import TokenWriter
from offload_trainer.units import format_bytes, format_count, format_seconds

PIECE = 1 << 16  # characters
# A batch for one call: large enough for a multi-threaded tokenizer, small enough for memory.
BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 4096
_SECONDS_BETWEEN_REPORTS = 5.0
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
    """Encodes documents of any length; each is followed by the id `separator`, if there is one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, separator: int | None) -> None:
        self.splitter = TextSplitter(self._encode)
        self._tokenizer, self._separator = tokenizer, separator

    def batches(self, documents: Iterable[Iterable[str]]) -> Iterator[tuple[list[int], int]]:
        """Yield batch after batch of the documents' ids, with the number of bytes of their text."""
        for batch in _batches(piece for blocks in documents for piece in self.splitter.pieces(blocks)):
            ids: list[int] = []
            for piece, row in zip(batch, self._encode_all([one.before + one.text for one in batch]), strict=True):
                ids += row[len(self._encode(piece.before)) :] if piece.before else row
                if piece.ends_document and self._separator is not None:
                    ids.append(self._separator)
            yield ids, sum(len(piece.text.encode()) for piece in batch)

    def _encode_all(self, texts: list[str]) -> Any:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode_all([text])[0]
        return ids


def tokenize_documents(
    documents: Iterator[Iterable[str]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    separator: int | None,
    writer: TokenWriter,
    total: int,
    say: Callable[[str], None],
) -> None:
    """Write the documents' ids, each document followed by `separator`, and the number of bytes of their text.

    `total` is the size of the files in bytes, for progress reports.
    """
    encoder = DocumentEncoder(tokenizer, separator=separator)
    done = 0
    begin = reported = time.monotonic()
    for ids, size in encoder.batches(documents):
        writer.write(ids)
        done += size
        now = time.monotonic()
        if now - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = now
            say(
                f"tokenised {format_bytes(done)} of {format_bytes(total)}: {format_count(writer.tokens)} "
                f"tokens, {format_bytes(done / (now - begin))}/s"
            )
    say(f"{format_count(writer.tokens)} tokens in {format_seconds(time.monotonic() - begin)}")
    writer.text_bytes = done
    if inexact := encoder.splitter.inexact:
        say(
            f"note: {inexact} splits text that has no lines or words, so a few ids may differ from those "
            "of the unsplit text"
        )


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
