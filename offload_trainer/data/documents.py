"""Readers of users' files in bounded memory: text in blocks, records of JSON and tables, and conversations in records.

The suffix gives the format. A file of text is one document; of the others each row, line or item is a record.
packing.py turns both into ids. Error messages begin with the file and the line of a record.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import open_given
from offload_trainer.common.units import format_bytes

TABLES = (".parquet", ".arrow")  # Arrow files as `datasets` saves them
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # also when compressed
LINE_BYTES = 1 << 26  # limit for a line or a record of text, which is in memory whole, several times over
_BLOCK = 1 << 18
_ROWS = 256  # rows of a table converted to records at a time
_BETWEEN = re.compile(r"[\s,]*")  # separator between the items of a JSON array


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
    """Open a regular file for reading and peeking its decompressed bytes. Raises UserError if they cannot be read."""
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


def read_records(source: Path, *, column: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON or the rows of a table, each as (file and line, object).

    Fields of CSV are strings. Of a Parquet or Arrow table that has the `column`, only this is read. Nulls inside a
    value are left out.

    Raises UserError with file and line for what is not UTF-8, no JSON object, over `LINE_BYTES` or unlike the header.
    """
    if source.suffix.lower() in TABLES:
        yield from _table_rows(source, column)
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
                named = named_fields(dict.fromkeys(names))
                raise UserError(f"{where}: not one field for each of the {len(names)} names in the first row: {named}")
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
            # The end of the text may cut a record, in it perhaps a literal or an escape: of under 16 characters.
            unfinished = isinstance(error, json.JSONDecodeError) and (
                error.msg.startswith("Unterminated") or error.pos > len(text) - 16
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


def _table_rows(source: Path, column: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import ipc, parquet

    def columns(schema: Any) -> list[str]:
        return [column] if column and column in schema.names else schema.names

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
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a date that Python does not have
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


# -- conversations ---------------------------------------------------------------------------------------------------

TEXT = "text"
# Names of forms, and the fields of each; those of "alpaca" are any of `_QUESTIONS` with any of `_ANSWERS`
_KEYS = {"chat": ("messages",), "sharegpt": ("conversations",), "pairs": ("prompt", "completion")}
_QUESTIONS = ("instruction", "question", "query", "prompt")
_ANSWERS = ("output", "response", "answer")
_SYSTEM = ("system", "system_prompt")
_TEXT_ALONE = (
    "this command trains on text alone. To train an image-text model on images, load it with ot.load for a loop of "
    "your own, or with offload_trainer.hf.load for transformers' Trainer (docs/library.md, Images and text)"
)
_READ_HERE = (
    "give 'text', 'messages', a 'prompt' and its 'completion' (plain text), or an 'instruction' and its 'output' "
    "without such fields, and ids of tokens in a .bin file. TRL trains on preferences (`offload-train cp dpo` writes a "
    "script) and on answers marked as good or bad (docs/integrations.md)"
)
# Fields that together identify a form for another kind of training
_OTHERS = (
    *(("chosen", "rejected"), ("chosen_response", "rejected_response"), ("prompt", "completions", "labels")),
    *(("kto_tag",), ("input_ids",), ("segments",), ("prompt",)),
)
# Metadata fields, which are not expected in a row.
_ABOUT = frozenset(
    (
        *("id", "uid", "uuid", "guid", "idx", "index", "hash", "source", "dataset", "subset", "split", "origin", "url"),
        *("license", "lang", "language", "locale", "date", "time", "timestamp", "created", "created_at", "updated_at"),
        *("author", "model", "version", "meta", "metadata", "tool_call_ids"),
    )
)
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CALL = "function_call"  # LLaMA-Factory's role of an answer that calls tools

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One line of a file: messages, whose answers from index `first` on are learned, or a `pair` of plain strings.

    `texts` are all strings of the line that a row is expected to contain, each as (field, string).
    """

    where: str  # file and line, for error messages
    messages: tuple[Message, ...] = ()
    first: int = 0
    tools: tuple[Any, ...] | None = None
    pair: tuple[str, str] | None = None
    texts: tuple[tuple[str, str], ...] = ()


def form_of_record(record: dict[str, Any], *, text_field: str, where: str) -> str:
    """Return a record's form, or `TEXT`. Raises UserError if it shows several, or one that is not trained on here."""
    if text_field in record:
        return TEXT
    fitting = [name for name, keys in _KEYS.items() if all(key in record for key in keys)]
    if _asks_and_answers(record) and "pairs" not in fitting:
        fitting.append("alpaca")
    with at(where):
        if len(fitting) > 1:
            raise UserError(f"it could be read as {' or as '.join(fitting)}: choose one with data.format=NAME")
        if not fitting:
            _refuse_other(record)
    return fitting[0] if fitting else TEXT  # the text reader then reports what is missing


def example_of(record: dict[str, Any], *, form: str, where: str) -> Example:
    """Parse one line. Raises UserError, with file and line, for a line of another form."""
    with at(where):
        lacks = [f"no field {key!r}, which {form} has" for key in _KEYS.get(form, ()) if key not in record]
        if form == "alpaca" and not _asks_and_answers(record):
            question, answer = f"{', '.join(_QUESTIONS)} or input", ", ".join(_ANSWERS)
            lacks = [f"no fields of a question ({question}) and its answer ({answer})"]
        _refuse_other(record, form=None if lacks else form)
        if lacks:
            raise UserError(f"{lacks[0]}; there are: {named_fields(record)}")
        first = 0
        pair: tuple[str, str] | None = None
        if form == "alpaca":
            messages = _alpaca(record)
        elif form != "pairs":
            messages = _messages(record, _KEYS[form][0])
        elif not (isinstance(record["prompt"], list) and isinstance(record["completion"], list)):
            messages, unused = (), [key for key in (*_SYSTEM, "tools") if record.get(key)]
            if unused:
                raise UserError(
                    f"{unused[0]!r} has no place next to a prompt and a completion of plain text: put it into the "
                    "prompt, or give 'messages'"
                )
            pair = string_in(record, "prompt"), string_in(record, "completion")
        else:
            messages = _messages(record, "prompt")
            first = len(messages)
            messages += _messages(record, "completion")
        system = _only(record, _SYSTEM) if messages else None
        if system is not None and record[system] not in (None, "") and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": string_in(record, system)}, *messages)
            first += 1
        tools = _tools(record) if messages else None
    return Example(where, messages, first=first, tools=tools, pair=pair, texts=tuple(texts_in(record)))


def _refuse_other(record: dict[str, Any], *, form: str | None = None) -> None:
    """Raise UserError for a line of a form that is not trained on here, or that holds more than text.

    If the line has the fields of `form`, a "prompt" field alone does not make it a prompt without an answer.
    """
    marked = [("label",)] if isinstance(record.get("label"), bool) else []
    for keys in (*_OTHERS, *marked):
        if all(record.get(key) is not None for key in keys) and (form is None or keys != ("prompt",)):
            fields = "'prompt' without an answer" if keys == ("prompt",) else " and ".join(map(repr, keys))
            raise UserError(f"a line with {fields} is not trained on: {_READ_HERE}")
    for key in ("images", "image", "videos", "video", "audios", "audio"):
        if record.get(key):
            raise UserError(f"{key!r} is not empty: {_TEXT_ALONE}")
    if record.get("chat_template_kwargs"):
        raise UserError("'chat_template_kwargs' is not read: set its values in data.chat_template=FILE")


def _asks_and_answers(record: dict[str, Any]) -> bool:
    return any(key in record for key in (*_QUESTIONS, "input")) and any(key in record for key in _ANSWERS)


def _alpaca(record: dict[str, Any]) -> tuple[Message, ...]:
    question, answer = _only(record, _QUESTIONS), _only(record, _ANSWERS)
    parts = [string_in(record, key) for key in (question, "input") if key and record.get(key) is not None]
    assert answer is not None, record
    turns = [("user", "\n\n".join(part for part in parts if part)), ("assistant", string_in(record, answer))]
    history = [] if record.get("history") in (None, "") else record["history"]
    if not isinstance(history, list):
        raise UserError(f"'history' holds {json_kind(history)}, where a list is needed")
    for number, turn in reversed(list(enumerate(history, 1))):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(one, str) for one in turn):
            raise UserError(f"turn {number} of 'history' is no list of a question and its answer")
        turns = [("user", turn[0]), ("assistant", turn[1]), *turns]
    return tuple({"role": role, "content": encodable(text, role)} for role, text in turns)


def _only(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return which of several names of one field is present, or None. Raises UserError for several."""
    there = [name for name in names if record.get(name) not in (None, "")] or [n for n in names if n in record][:1]
    if len(there) > 1:
        raise UserError(f"{' and '.join(map(repr, there))} both match; leave one of them out")
    return there[0] if there else None


def _messages(record: dict[str, Any], field: str) -> tuple[Message, ...]:
    """Return the messages of a field, each with `role` and `content`; ShareGPT's key names are accepted too."""
    value = record[field]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else json_kind(value)
        fix = "; a string is not parsed, and CSV has strings only: write lines of JSON" * isinstance(value, str)
        raise UserError(f"{field!r} holds {what}, where a list of messages is needed{fix}")
    return tuple(_message(message, number) for number, message in enumerate(value, 1))


def _message(message: Any, number: int) -> Message:
    its: Message = dict(message) if isinstance(message, dict) else {}
    role = its.get("role", its.get("from"))
    if not isinstance(role, str):
        raise UserError(f"message {number} is no object with a 'role' or a 'from'")
    known = _ROLES.get(role.lower())
    if "role" not in its:
        value = its.pop("value", None)
        del its["from"]
        if role.lower() == _CALL:
            its = {key: its[key] for key in ("weight", "train") if key in its}
            known, its["tool_calls"], value = "assistant", _called(value, number), None
        elif known is None:
            raise UserError(f"message {number} is from {role[:60]!r}; known are {', '.join((*_ROLES, _CALL))}")
        its["content"] = value
    role = known or role
    calls, content = its.get("tool_calls"), its.get("content")
    if calls and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise UserError(f"'tool_calls' of message {number} is no list of objects")
    for key in ("train_detail", "training_detail"):  # Axolotl's fields for training on parts of an answer
        if its.get(key):
            raise UserError(f"message {number} has {key!r}: an answer is trained on whole, or not at all ('weight': 0)")
    if its.get("train") is True and role != "assistant":
        raise UserError(f"message {number} has 'train': true, and only messages of the assistant can be trained on")
    return its | {"role": role, "content": "" if content is None and calls else _text(content, number)}


def _called(value: Any, number: int) -> list[Any]:
    """Parse LLaMA-Factory's calls in JSON: {"name": ..., "arguments": ...}, or a list of those."""
    found = json_in(value, f"message {number}, a {_CALL},")
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(f"message {number} is a {_CALL} without the 'name' of a function")
    return [{"type": "function", "function": call} for call in calls]


def _tools(record: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a line's tools, which are a list or JSON text, each in the form that templates expect."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = json_in(tools, "'tools'")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"'tools' holds {json_kind(tools)}, where a list is needed")
    return tuple(
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str)
        else tool
        for tool in tools
    )


def _text(content: Any, number: int) -> str:
    if content is None:
        raise UserError(f"message {number} has no content; if it is empty, use an empty string")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"message {number} holds something other than text: {_TEXT_ALONE}")
        if "train" in part or "weight" in part:
            raise UserError(f"message {number} mixes parts to train on with others: an answer is trained on whole")
    return encodable("".join(part["text"] for part in parts), f"message {number}")


def texts_in(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield each non-empty string of a line with its field; metadata fields are left out."""
    if isinstance(value, str):
        if value.strip():
            yield field, value
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one, field)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key not in _ABOUT and not key.endswith("_id") and not (field and key in ("role", "from", "type")):
                yield from texts_in(one, f"{field}.{key}" if field else key)
