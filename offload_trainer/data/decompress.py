"""Reading of plain and compressed files as one stream of bytes; the suffix determines the decompressor.

NAME.jsonl.zst ── _Seen ── decompressor ──> bytes          `seen` is called with all bytes of the file itself
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from offload_trainer.errors import UserError
from offload_trainer.packages import is_installed, lacks
from offload_trainer.safe_files import open_given

PACKED = (".gz", ".bz2", ".xz", ".zst")
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError)


def packing_of(path: Path) -> str:
    """Return the path's last suffix in lower case if it is that of a compressed file, else ""."""
    return path.suffix.lower() if path.suffix.lower() in PACKED else ""


def kind_of(path: Path) -> str:
    """Return the suffix of the content: NAME.jsonl.gz -> .jsonl."""
    return (path.with_suffix("") if packing_of(path) else path).suffix.lower()


def refuse_without_library(path: Path) -> None:
    """Raise UserError if the library that reads files of this name is not installed."""
    if path.suffix.lower() in (".parquet", ".arrow", ".zst") and not is_installed("pyarrow"):
        raise UserError(lacks(str(path), "pyarrow"))


class _Seen(io.RawIOBase):
    """A file that passes the bytes to a callback as they are read."""

    def __init__(self, file: BinaryIO, seen: Callable[[bytes], object]) -> None:
        self._file, self._seen = file, seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._seen(data)
        buffer[: len(data)] = data
        return len(data)


class _Arrows(io.RawIOBase):
    """pyarrow's stream of decompressed bytes as a Python raw stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def opened(path: Path, *, seen: Callable[[bytes], object]) -> Iterator[BinaryIO]:
    """Open `path` for reading its decompressed bytes. On exit, `seen` has been called with every byte of the file.

    Raises OSError if it cannot be read, UserError if it is not a regular file or cannot be decompressed.
    """
    with open_given(path) as file:
        raw: Any = io.BufferedReader(_Seen(file, seen), 1 << 18)
        try:
            yield _unpacked(raw, packing_of(path))
            while raw.read(1 << 18):  # bytes that the decompressor did not need
                pass
        except _DAMAGED as error:
            raise _damaged(path, error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise _damaged(path, error) from error  # an OSError without errno comes from a decompressor


def _unpacked(raw: io.BufferedReader, packing: str) -> BinaryIO:
    if packing == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if packing == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if packing == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if packing == ".zst":
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(_Arrows(stream), 1 << 18)
    return raw


def _damaged(path: Path, error: Exception) -> UserError:
    shown = str(path) if str(path).isprintable() else ascii(str(path))
    return UserError(f"{shown} cannot be decompressed: {str(error)[:200]}; is it damaged or incomplete?")
