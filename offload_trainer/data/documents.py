"""Paths -> files -> pieces of text, in bounded memory.

A text file is one document; it comes in pieces cut at line ends. Each line of a jsonl file is a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from offload_trainer.errors import UserError

BUILTIN_CORPUS = Path(__file__).parent / "builtin" / "corpus.txt"
TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
PIECE_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """Consecutive text of one document; the last piece of a document says so."""

    text: str
    ends_document: bool


def find_sources(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` stand for: in the given order, a directory's own files sorted by path.

    ``builtin`` is the text that ships with the package. A directory gives its .txt, .md and .jsonl files at
    any depth, hidden ones excepted; a file named itself may have any suffix. Either all are text, or all are
    ``.bin`` token files. A path given twice is read twice.

    Raises UserError: paths that do not exist (all of them), a directory without text, .bin beside text.
    """
    if not paths:
        raise UserError("data.path is empty: name a text file, a jsonl file, a directory, a .bin file, or builtin")
    named = [BUILTIN_CORPUS if path == "builtin" else Path(path).expanduser() for path in paths]
    if missing := [str(path) for path in named if not path.exists()]:
        raise UserError(f"no such file or directory: {', '.join(missing)}; correct the path")
    sources = [file for path in named for file in (_text_files(path) if path.is_dir() else [path])]
    token_files = [str(file) for file in sources if file.suffix == ".bin"]
    if token_files and len(sources) > len(token_files):
        raise UserError(
            f"{len(sources)} files were given, and {', '.join(token_files[:5])} among them is already tokens: "
            "give .bin files alone, or text only"
        )
    return sources


def _text_files(directory: Path) -> list[Path]:
    """A directory's text files, sorted by their path inside it."""
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.suffix.lower() in TEXT_SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    ]
    if not files:
        token_files = sorted(str(file) for file in directory.glob("*.bin"))
        hint = f"name the token file itself: --data {token_files[0]}" if token_files else "correct the path"
        raise UserError(f"{directory} holds no {', '.join(TEXT_SUFFIXES)} file: {hint}")
    return files


def read_documents(source: Path, *, text_field: str) -> Iterator[Piece]:
    """Stream a file's documents. Together, a document's pieces are exactly its text; empty documents are left
    out.

    A text file is one document, in pieces of at most `PIECE_BYTES` UTF-8 bytes. Each line of a ``.jsonl``
    file is one document and one piece: the string in its `text_field`. Blank lines are skipped, and so is a
    byte-order mark.

    Raises UserError with file and line: not UTF-8, not JSON, no such field, a field that is not a string.
    """
    try:
        if source.suffix.lower() == ".jsonl":
            yield from _jsonl_documents(source, text_field=text_field)
        else:
            yield from _text_document(source)
    except PermissionError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from error


def _text_document(source: Path) -> Iterator[Piece]:
    with source.open("rb") as file:
        pending = file.read(2 * PIECE_BYTES).removeprefix(_BOM)
        line = 1
        while pending:
            # Two pieces' worth, or the file is at its end.
            pending += file.read(2 * PIECE_BYTES - len(pending))
            end = len(pending) if len(pending) <= PIECE_BYTES else _cut(pending[:PIECE_BYTES])
            head, pending = pending[:end], pending[end:]
            yield Piece(_decoded(head, source=source, line=line), ends_document=not pending)
            line += head.count(b"\n")


def _cut(block: bytes) -> int:
    """Where to cut a block that more text follows: as late as possible, and where the tokens stay the same.

    Word patterns take a run of line ends and spaces as one word, so the best place is behind a line end
    between two lines that are not blank; then behind any line end; then before a space; then between any two
    characters.
    """
    end = len(block)
    while (end := block.rfind(b"\n", 0, end)) > 0:
        if not block[end - 1 : end].isspace() and not block[end + 1 : end + 2].isspace() and end + 1 < len(block):
            return end + 1
    for mark, behind in ((b"\n", 1), (b" ", 0)):
        if (end := block.rfind(mark)) > 0:
            return end + behind
    end = len(block)
    # A UTF-8 character is at most 4 bytes and its continuation bytes are 10xxxxxx: step back to where one
    # starts.
    while end > len(block) - 4 and block[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if block[end - 1] & 0x80 else end


def _jsonl_documents(source: Path, *, text_field: str) -> Iterator[Piece]:
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = _decoded(raw.removeprefix(_BOM) if number == 1 else raw, source=source, line=number)
            if line.strip() and (text := _field(line, text_field, where=f"{source}, line {number}")):
                yield Piece(text, ends_document=True)


def _field(line: str, name: str, *, where: str) -> str:
    """The string in a JSON object's field, or a UserError that says what is there instead."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON {type(record).__name__}, where an object with {name!r} is needed")
    if name not in record:
        near = get_close_matches(name, record, n=1)
        fix = near[0] if near else "NAME"
        there = ", ".join(record) or "none at all"
        raise UserError(f"{where}: no field {name!r}; there are: {there}. Set data.text_field={fix}")
    text = record[name]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {name!r} holds a {type(text).__name__}, where a string is needed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field {name!r} holds half a surrogate pair at character {error.start}") from error
    return text


def _decoded(data: bytes, *, source: Path, line: int) -> str:
    """`data`, which begins on `line` of `source`, as text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        bad = line + data.count(b"\n", 0, error.start)
        raise UserError(
            f"{source}, line {bad}: not UTF-8 (byte 0x{data[error.start]:02x}); convert the file, "
            "or unpack it if it is compressed"
        ) from error
