"""Long documents -> pieces whose ids, one after another, are those of the whole.

A tokenizer's memory grows with what it is given at once, about 160 bytes a byte of text, so it is given pieces.
Whether a cut changes ids only the tokenizer knows: GPT-2's kind takes a run of line ends and spaces as one word,
Metaspace puts a space before whatever comes first. So it is asked: the text around the cut, whole and in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 16  # characters
_AROUND = 256  # characters on each side of a cut that the tokenizer is asked about
_TRIED = 4  # places of each kind


class Piece(NamedTuple):
    """Consecutive text of one document; the last piece of a document says so."""

    text: str
    ends_document: bool
    before: str = ""  # to be tokenised in front of the text, and its ids taken off again


class TextSplitter:
    """Cuts text where `encode`, which gives a text's ids, gives those of the whole."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.inexact = 0  # cuts for which there was no such place
        self._encode = encode

    def pieces(self, blocks: Iterable[str]) -> Iterator[Piece]:
        """One document, given as consecutive blocks of text, in pieces of at most `PIECE` characters; none if empty."""
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
        """Where to end the piece that begins at `start`, and what to put before the next."""
        end = start + PIECE
        places = _line_ends(text, start, end) + _spaces(text, start, end)
        for before in (0, 1):  # characters of the piece that the next one is tokenised behind
            for place in places:
                if self._exact(text, place, text[place - before : place]):
                    return place, text[place - before : place]
        self.inexact += 1
        if places:
            return places[0], ""
        # A run of one kind of character: a place where tokens meet, if the tokenizer shows one.
        near = range(end, max(start, end - 8 * _TRIED), -1)
        return next((place for place in near if self._exact(text, place, "")), end), ""

    def _exact(self, text: str, place: int, before: str) -> bool:
        left, right = text[max(0, place - _AROUND) : place], text[place : place + _AROUND]
        behind = self._encode(before + right)[len(self._encode(before)) if before else 0 :]
        return self._encode(left + right) == self._encode(left) + behind


def _line_ends(text: str, start: int, end: int) -> list[int]:
    """The last places behind a line end between two lines that are not blank."""
    found: list[int] = []
    place = end
    while len(found) < _TRIED and (place := text.rfind("\n", start + 1, place)) >= 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            found.append(place + 1)
    return found


def _spaces(text: str, start: int, end: int) -> list[int]:
    """The last places before a space between two words."""
    found: list[int] = []
    place = end
    while len(found) < _TRIED and (place := text.rfind(" ", start + 1, place)) >= 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace():
            found.append(place)
    return found
