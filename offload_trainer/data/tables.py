"""Rows of Parquet and Arrow files (as `datasets` saves them), read a few at a time as records through pyarrow.

Memory holds one row group of a Parquet file, or one batch of an Arrow file, limited to the columns that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import open_given

TABLES = (".parquet", ".arrow")
_ROWS = 256  # converted to records at a time
_BLOCK = 1 << 20


def read_rows(
    source: Path, *, wanted: Collection[str], strings: bool = False, seen: Callable[[bytes], object]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and row, record) for each row.

    The columns read are those in `wanted` and, with `strings`, those of strings; if there are none, all are read, so
    that an error can list what is present. Nulls inside a column's values are left out. `seen` is called with every
    byte of the file at the end.

    Raises UserError for a file of another format, OSError if it cannot be read.
    """
    import pyarrow

    name = str(source) if str(source).isprintable() else ascii(str(source))
    number = 0
    open_given(source).close()  # refuse a pipe, on which pyarrow would block
    try:
        for batch in _batches(source, partial(_chosen, wanted=wanted, strings=strings)):
            for start in range(0, batch.num_rows, _ROWS):
                for record in batch.slice(start, _ROWS).to_pylist():
                    number += 1
                    yield f"{name}, row {number}", {key: _without_nulls(value) for key, value in record.items()}
    except pyarrow.ArrowException as error:
        kind = source.suffix.lower().removeprefix(".")
        raise UserError(f"{name} cannot be read as {kind}: {str(error).splitlines()[0][:200]}") from error
    with open_given(source) as file:
        while block := file.read(_BLOCK):
            seen(block)


def _batches(source: Path, chosen: Callable[[Any], list[str]]) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc, parquet

    if source.suffix.lower() == ".parquet":
        with parquet.ParquetFile(source) as file:
            yield from file.iter_batches(batch_size=_ROWS, columns=chosen(file.schema_arrow))
        return
    with pyarrow.OSFile(str(source), "rb") as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        if is_file:
            reader = ipc.open_file(opened)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = ipc.open_stream(opened)
            batches = iter(reader)
        columns = chosen(reader.schema)
        for batch in batches:
            yield batch.select(columns)


def _chosen(schema: Any, *, wanted: Collection[str], strings: bool) -> list[str]:
    from pyarrow.types import is_large_string, is_string

    names: list[str] = schema.names
    texts = [field.name for field in schema if strings and (is_string(field.type) or is_large_string(field.type))]
    return [name for name in names if name in wanted or name in texts] or names


def _without_nulls(value: Any) -> Any:
    """Remove null fields of nested objects: a table gives each message every field that any message has."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
