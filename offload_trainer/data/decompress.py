"""A file's bytes in order, unpacked as they are read where its name ends as those of packed files do.

NAME.jsonl.zst ── _Seen ── decompressor ──> bytes          all bytes of the file itself go by `seen`
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
    """Its last suffix where that is of a packed file, else nothing."""
    return path.suffix.lower() if path.suffix.lower() in PACKED else ""


def kind_of(path: Path) -> str:
    """The suffix that says what the text is: NAME.jsonl.gz -> .jsonl."""
    return (path.with_suffix("") if packing_of(path) else path).suffix.lower()


def refuse_without_library(path: Path) -> None:
    """UserError where a library is missing that a file of this name is read with."""
    if path.suffix.lower() in (".parquet", ".arrow", ".zst") and not is_installed("pyarrow"):
        raise UserError(lacks(str(path), "pyarrow"))


class _Seen(io.RawIOBase):
    """A file whose bytes somebody sees as they are read."""

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
    """pyarrow's stream of unpacked bytes as one of Python's."""

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
    """The bytes of `path`, unpacked. Once all are read, `seen` has had every byte of the file.

    OSError where it cannot be read, UserError where it is no regular file or cannot be unpacked.
    """
    with open_given(path) as file:
        raw: Any = io.BufferedReader(_Seen(file, seen), 1 << 18)
        try:
            yield _unpacked(raw, packing_of(path))
            while raw.read(1 << 18):  # what a decompressor needed no more
                pass
        except _DAMAGED as error:
            raise _damaged(path, error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise _damaged(path, error) from error  # of a decompressor


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
