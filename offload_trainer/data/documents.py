"""Readers of text, records of JSON and tables, with bounded memory, and checks of a record's fields for error messages.

The suffix gives the format. A file of text is one document; of the others each row, line or item is a record.

    any other suffix (.txt, .md)   text_blocks    -> blocks of text; the caller opens the file with `opened`
    .jsonl, .ndjson                read_records   -> (file and line, object), one a line
    .json                                            the same, or the items of one array
    .csv, .tsv                                       the first row has the names; all fields are strings
    .parquet, .arrow                                 a few rows in memory (pyarrow), without nulls in nested values
    NAME.jsonl.gz, .bz2, .xz, .zst                   all of these but .parquet and .arrow, decompressed by `opened`

What a record means, a document or a conversation, is for conversations.py and packing.py to say.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from offload_trainer.errors import UserError
from offload_trainer.safe_files import open_given
from offload_trainer.units import format_bytes

TABLES = (".parquet", ".arrow")  # Arrow files as `datasets` saves them
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # also when compressed
LINE_BYTES = 1 << 26  # limit for a line or a record of text, which is in memory whole, several times over
_BLOCK = 1 << 18
_ROWS = 256  # rows of a table converted to records at a time
_LITERAL = 16  # more characters than a JSON literal or escape that a block may cut
_BETWEEN = re.compile(r"[\s,]*")  # what separates the items of a JSON array


def _zstd(raw: io.BufferedReader) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), _BLOCK)


_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
COMPRESSED = tuple(_DECOMPRESSORS)


def kind_of(path: Path) -> str:
    """Return the suffix of the content: NAME.jsonl.gz -> .jsonl."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def holds_records(source: Path) -> bool:
    """Return whether a file holds JSON or rows of a table instead of one text."""
    return kind_of(source) in RECORDS or source.suffix.lower() in TABLES


def printable(path: Path | str) -> str:
    """Return a path for a message, escaped if it has unprintable characters, which could control a terminal."""
    return str(path) if str(path).isprintable() else ascii(str(path))


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open `path` for reading and peeking its decompressed bytes.

    Raises UserError if it is not a regular file, cannot be read or cannot be decompressed.
    """
    with open_given(path) as file:
        try:
            yield _DECOMPRESSORS.get(path.suffix.lower(), lambda plain: plain)(io.BufferedReader(file, _BLOCK))
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # one without errno is a decompressor's
                raise UserError(f"{printable(path)} cannot be read: {error.strerror}") from error
            raise UserError(
                f"{printable(path)} cannot be decompressed: {str(error)[:200]}; is it damaged or incomplete?"
            ) from error


def text_in(record: dict[str, Any], text_field: str) -> str:
    """Return the text of a record. Raises UserError, with what to do, if there is no such field."""
    if text_field not in record:
        near = filter(str.isprintable, get_close_matches(text_field, record, n=1))
        raise UserError(
            f"no field {text_field!r}; there are: {named_fields(record)}. Set data.text_field="
            f"{next(near, 'NAME')} to train on one of them as text; questions and answers are read from 'instruction' "
            "and 'output', conversations from 'messages'"
        )
    return string_in(record, text_field)


def text_blocks(source: Path, file: BinaryIO) -> Iterator[str]:
    """Yield a text in blocks, without a byte-order mark. Raises UserError, with the line, if it is not UTF-8."""
    decoder, data, line = codecs.getincrementaldecoder("utf-8-sig")(), b"any", 1
    while data:
        data = file.read(_BLOCK)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _not_utf8(source, error, line=line + error.object.count(b"\n", 0, error.start)) from error
        line += text.count("\n")
        yield text


def read_records(
    source: Path, *, wanted: Collection[str], strings: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON or the rows of a table, each as (file and line, object).

    Fields of CSV are strings. Of a Parquet or Arrow table, the columns in `wanted` are read, and with `strings` those
    of strings; if there are none, all are read, for an error that lists them. Nulls inside a value are left out.

    Raises UserError with file and line for what is not UTF-8, no JSON object, over `LINE_BYTES` or unlike the header.
    """
    if source.suffix.lower() in TABLES:
        yield from _table_rows(source, wanted=wanted, strings=strings)
        return
    kind = kind_of(source)
    with opened(source) as file:
        if kind in (".csv", ".tsv"):
            yield from _csv_rows(source, file, delimiter="\t" if kind == ".tsv" else ",")
        elif kind == ".json" and file.peek(1).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):
            yield from _array_items(source, filter(None, text_blocks(source, file)))
        else:
            for number, line in enumerate(_lines(source, file), 1):
                if not line.isspace():
                    where = f"{printable(source)}, line {number}"
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise _not_json(error, where=where) from error
                    yield where, _object(record, where=where)


def _lines(source: Path, file: BinaryIO) -> Iterator[str]:
    number = 0
    while raw := file.readline(LINE_BYTES + 1):
        number += 1
        if len(raw) > LINE_BYTES:
            raise _too_long(f"{printable(source)}, line {number}")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(source, error, line=number) from error
        del raw
        yield line


def _csv_rows(source: Path, file: BinaryIO, *, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(LINE_BYTES)
    rows = csv.reader(_lines(source, file), delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        for row in filter(None, rows):  # blank lines are empty rows
            where = f"{printable(source)}, line {rows.line_num}"
            record = dict(zip(names, row, strict=False))
            if not len(record) == len(names) == len(row):
                listing = named_fields(dict.fromkeys(names))
                raise UserError(
                    f"{where}: not one field for each of the {len(names)} names in the first row: {listing}"
                )
            yield where, record
    except csv.Error as error:
        raise UserError(f"{printable(source)}, line {rows.line_num}: cannot be read as CSV: {error}") from error


def _array_items(source: Path, blocks: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON array, of which a few blocks are in memory at a time."""
    decode = json.JSONDecoder().raw_decode
    text, place, number = next(blocks).lstrip()[1:], 0, 1
    while True:
        where = f"{printable(source)}, record {number}"
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith("]", place):
            break
        try:
            record, place = decode(text, place)
        except (ValueError, RecursionError) as error:
            # The end of the text may cut a record. More text does not mend an error far before that end.
            unfinished = isinstance(error, json.JSONDecodeError) and (
                error.msg.startswith("Unterminated") or error.pos > len(text) - _LITERAL
            )
            if unfinished and len(text) - place > LINE_BYTES:
                raise _too_long(where) from error
            more = "".join(islice(blocks, 1 + (len(text) - place) // _BLOCK)) if unfinished else ""
            if not more:
                raise _not_json(error, where=where, start=place) from error
            text, place = text[place:] + more, 0
        else:
            yield where, _object(record, where=where)
            number += 1
    if any(map(str.strip, chain([text[place + 1 :]], blocks))):
        raise UserError(f"{where}: the array has ended, and more text follows; give one array a file")


def _object(record: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where}: {json_kind(record)}, where an object is needed")
    return record


def _not_json(error: Exception, *, where: str, start: int = 0) -> UserError:
    reason = f"JSON that cannot be read ({error})"  # integers of thousands of digits
    if isinstance(error, json.JSONDecodeError):
        reason = f"not JSON ({error.msg}, character {error.pos - start + 1})"
    elif isinstance(error, RecursionError):
        reason = "JSON that is nested too deeply to be read; leave that field out"
    return UserError(f"{where}: {reason}")


def _too_long(where: str) -> UserError:
    limit = f"longer than {format_bytes(LINE_BYTES)}, and lines and records are read whole"
    return UserError(f"{where}: {limit}; split that document, or give it as a separate text file")


def _table_rows(source: Path, *, wanted: Collection[str], strings: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import ipc, parquet
    from pyarrow.types import is_large_string, is_string

    def columns(schema: Any) -> list[str]:
        texts = [field.name for field in schema if strings and (is_string(field.type) or is_large_string(field.type))]
        return [name for name in schema.names if name in wanted or name in texts] or schema.names

    open_given(source).close()  # refuse a pipe, on which pyarrow would block
    kind = source.suffix.lower().removeprefix(".")
    try:
        with pyarrow.OSFile(str(source), "rb") as file:
            if kind == "parquet":
                table = parquet.ParquetFile(file)
                batches = table.iter_batches(batch_size=_ROWS, columns=columns(table.schema_arrow))
            else:
                is_file = file.read(6) == b"ARROW1"  # otherwise a stream
                file.seek(0)
                reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
                every = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                batches = (batch.select(columns(reader.schema)) for batch in every)
            slices = (batch.slice(start, _ROWS) for batch in batches for start in range(0, batch.num_rows, _ROWS))
            for number, record in enumerate(chain.from_iterable(few.to_pylist() for few in slices), 1):
                yield f"{printable(source)}, row {number}", {key: without_nulls(value) for key, value in record.items()}
    except pyarrow.ArrowException as error:
        raise UserError(f"{printable(source)} cannot be read as {kind}: {str(error).splitlines()[0][:200]}") from error
    except OSError as error:
        raise UserError(f"{printable(source)} cannot be read: {error.strerror}") from error


def without_nulls(value: Any) -> Any:
    """Remove null fields of nested objects: a table gives each message every field that any message has."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _not_utf8(source: Path, error: UnicodeDecodeError, *, line: int) -> UserError:
    return UserError(
        f"{printable(source)}, line {line}: not UTF-8: its byte 0x{error.object[error.start]:02x} begins no character "
        "that is whole; convert the file (iconv -t UTF-8), or decompress it"
    )


@contextmanager
def at(where: str) -> Iterator[None]:
    """Put the place of a record, its file and line, in front of UserErrors that are raised in this context."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def string_in(record: dict[str, Any], name: str) -> str:
    """Return the string in a field that exists. Raises UserError for any other type."""
    text = record[name]
    if not isinstance(text, str):
        raise UserError(f"field {name!r} holds {json_kind(text)}, where a string is needed")
    return encodable(text, f"field {name!r}")


def named_fields(record: dict[str, Any]) -> str:
    """List the first keys of an object for an error message."""
    return ", ".join(repr(key)[1:-1][:40] for key in list(record)[:20]) or "none at all"


def json_in(text: Any, what: str) -> Any:
    """Parse a string from a user's file as JSON. Raises UserError, which names it as `what`, if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what} holds no JSON") from error


def json_kind(value: object) -> str:
    """Name the JSON type of a value for a message: "a string", "null"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    # a type that only a table's column can have
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def encodable(text: str, what: str) -> str:
    """Return the text. Raises UserError if it contains half a surrogate pair, which JSON escapes can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} holds half a surrogate pair at character {error.start}") from error
    return text
