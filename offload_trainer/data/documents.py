"""Readers of text, JSON lines and tables as documents, in pieces of text, with bounded memory.

A text file is one document. Each line of a jsonl file and each row of a table is a document.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload_trainer.data.chunked_tokenize import Piece, TextSplitter
from offload_trainer.data.decompress import kind_of, opened
from offload_trainer.data.sources import printable
from offload_trainer.data.tables import TABLES, read_rows
from offload_trainer.errors import UserError
from offload_trainer.units import format_bytes

LINE_BYTES = 1 << 26  # limit for a jsonl line, which is in memory whole, several times over
_BLOCK = 1 << 18
_BOM = b"\xef\xbb\xbf"


def read_documents(
    source: Path, *, text_field: str, cutter: TextSplitter, seen: Callable[[bytes], object] = lambda _: None
) -> Iterator[Piece]:
    """Yield the pieces of a file's documents. A document's pieces together are exactly its text.

    A text file is one document. Each line of a ``.jsonl`` file and each row of a table is one document: the string in
    its `text_field`. Empty documents, blank lines and a byte-order mark are skipped. `seen` is called with all bytes of
    the file.

    Raises UserError with file and line for text that is not UTF-8, a line that is not a JSON object or longer than
    `LINE_BYTES`, and a field that is missing or not a string.
    """
    try:
        if holds_records(source):
            for where, record in read_records(source, wanted=(text_field,), seen=seen):
                if text := _field(record, text_field, where=where):
                    yield from cutter.pieces([text])
        else:
            yield from cutter.pieces(_text_blocks(source, seen=seen))
    except OSError as error:
        raise UserError(f"{printable(source)} cannot be read: {error.strerror}") from error


def _text_blocks(source: Path, *, seen: Callable[[bytes], object]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, column, done = 1, 0, 0  # line number; bytes decoded of the current line, and in total
    first = True
    with opened(source, seen=seen) as file:
        while True:
            data = file.read(_BLOCK)
            mark = len(_BOM) if first and data.startswith(_BOM) else 0
            column, done = column + mark, done + mark
            try:
                text = decoder.decode(data[mark:], final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(source, line, error, column=column, before=done) from error
            yield text
            if not data:
                return
            line += text.count("\n")
            column = len(text.rpartition("\n")[2].encode()) + (0 if "\n" in text else column)
            done += len(text.encode())
            first = False


def holds_records(source: Path) -> bool:
    """Return whether a file holds lines of JSON or rows of a table instead of one text."""
    return kind_of(source) == ".jsonl" or source.suffix.lower() in TABLES


def read_records(
    source: Path, *, wanted: Collection[str], strings: bool = False, seen: Callable[[bytes], object] = lambda _: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a ``.jsonl`` file or the rows of a table, each as (file and line, object).

    Of a table, only the columns in `wanted` are read, and with `strings` also all columns of strings. Raises UserError
    as `read_documents`.
    """
    try:
        if source.suffix.lower() in TABLES:
            yield from read_rows(source, wanted=wanted, strings=strings, seen=seen)
            return
        for where, line in _lines(source, seen=seen):
            yield where, _object(line, where=where)
    except OSError as error:
        raise UserError(f"{printable(source)} cannot be read: {error.strerror}") from error


def _lines(source: Path, *, seen: Callable[[bytes], object]) -> Iterator[tuple[str, str]]:
    """Yield the lines that are not blank, each as (file and line, text)."""
    number = done = 0
    with opened(source, seen=seen) as file:
        while raw := file.readline(LINE_BYTES + 1):
            number += 1
            if len(raw) > LINE_BYTES:
                raise UserError(
                    f"{_where(source, number)}: longer than {format_bytes(LINE_BYTES)}, and lines are read whole; "
                    "split that document, or give it as a separate text file"
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                mark = len(raw) - len(error.object)
                raise _not_utf8(source, number, error, column=mark, before=done + mark) from error
            done += len(raw)
            del raw
            if not line.isspace():
                yield _where(source, number), line


def _object(line: str, *, where: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises UserError for anything else."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    except ValueError as error:  # integers of thousands of digits
        raise UserError(f"{where}: JSON that cannot be read ({error})") from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON that is nested too deeply to be read; leave that field out") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: {json_kind(record)}, where an object is needed")
    return record


def _field(record: dict[str, Any], name: str, *, where: str) -> str:
    """Return the string in a field of an object. Raises UserError if the field is missing or not a string."""
    if name not in record:
        near = get_close_matches(name, record, n=1)
        fix = near[0] if near and near[0].isprintable() else "NAME"
        raise UserError(
            f"{where}: no field {name!r}; there are: {named_fields(record)}. Set data.text_field={fix} to train on one "
            "of them as text; questions and answers are read from 'instruction' and 'output', conversations from "
            "'messages'"
        )
    return string_in(record, name, where=where)


def string_in(record: dict[str, Any], name: str, *, where: str) -> str:
    """Return the string in a field that exists. Raises UserError for any other type."""
    text = record[name]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {name!r} holds {json_kind(text)}, where a string is needed")
    return encodable(text, f"field {name!r}", where=where)


def named_fields(record: dict[str, Any]) -> str:
    """List the first keys of an object for an error message."""
    return ", ".join(repr(key)[1:-1][:40] for key in list(record)[:20]) or "none at all"


def json_in(text: object) -> Any:
    """Parse a string from a user's file as JSON. Raises ValueError if it is not JSON."""
    try:
        return json.loads(text)  # type: ignore[arg-type]
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def json_kind(value: object) -> str:
    """Name the JSON type of a value for a message: "a string", "null"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    # a type that only a table's column can have
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def encodable(text: str, what: str, *, where: str) -> str:
    """Return the text. Raises UserError if it contains half a surrogate pair, which JSON escapes can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {what} holds half a surrogate pair at character {error.start}") from error
    return text


def _where(source: Path, line: int) -> str:
    return f"{printable(source)}, line {line}"


def _not_utf8(source: Path, line: int, error: UnicodeDecodeError, *, column: int, before: int) -> UserError:
    """Return the UserError for a decoding error.

    `column` is the number of bytes decoded before it in `line`, and `before` the number in the whole text.
    """
    good = error.object[: error.start]
    ended = good.rfind(b"\n") + 1
    place = len(good) - ended if ended else column + len(good)
    where = _where(source, line + good.count(b"\n"))
    return UserError(
        f"{where}: not UTF-8: byte {place + 1} of the line, byte {before + len(good) + 1} of the text, is "
        f"0x{error.object[error.start]:02x}; convert the file (iconv -t UTF-8), or decompress it"
    )
