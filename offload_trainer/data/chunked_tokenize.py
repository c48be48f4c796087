"""Splitting of long documents into pieces that tokenise, one after another, to the ids of the whole document.

A tokenizer needs about 160 bytes of memory per byte of text in one call, so long text is passed in pieces. Only the
tokenizer knows whether a cut changes ids: GPT-2's kind treats a run of newlines and spaces as one word, Metaspace puts
a space before the first word. Each candidate cut is therefore tested by tokenising the text around it whole and in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 16  # characters
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
                end, behind = self._cut(text, start)
                yield Piece(text[start:end], ends_document=False, before=before)
                start, before = end, behind
        if text:
            yield Piece(text[start:], ends_document=True, before=before)

    def _cut(self, text: str, start: int) -> tuple[int, str]:
        """Return where the piece from `start` on ends, and the text to tokenise in front of the next piece."""
        end = start + PIECE
        places = _line_ends(text, start, end) + _spaces(text, start, end)
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
        behind = self._encode(before + right)[len(self._encode(before)) if before else 0 :]
        return self._encode(left + right) == self._encode(left) + behind


def _line_ends(text: str, start: int, end: int) -> list[int]:
    """Return the last places after a newline between two lines that are not blank."""
    found: list[int] = []
    place = end
    while len(found) < _TRIED and (place := text.rfind("\n", start + 1, place)) >= 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            found.append(place + 1)
    return found


def _spaces(text: str, start: int, end: int) -> list[int]:
    """Return the last places before a space between two words."""
    found: list[int] = []
    place = end
    while len(found) < _TRIED and (place := text.rfind(" ", start + 1, place)) >= 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            found.append(place)
    return found
