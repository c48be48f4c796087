"""Token files: nanoGPT's ``.bin`` (raw little-endian ids, nothing else) and a JSON sidecar about them.

    TokenWriter   ids -> NAME.bin.<random>.tmp -> fsync -> NAME.bin, then NAME.bin.json in the same way
    TokenFile     NAME.bin + NAME.bin.json -> stretches of ids, each block compared with its sum when first read

The sidecar comes last, so a pair either is complete or has no sidecar, whenever the process is killed. Ids are read,
not memory-mapped: a file that is cut short under a mapping kills the process without a word.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.tiers.durable import sync_directory
from offload_trainer.units import format_bytes

NANOGPT = "no sidecar: read as uint16, as nanoGPT writes them"
_SCAN_TOKENS = 1 << 24
_BLOCK = 1 << 20  # bytes that have one CRC-32 in the sidecar


def sidecar_path(path: Path) -> Path:
    """``NAME.bin`` -> ``NAME.bin.json``."""
    return path.with_name(path.name + ".json")


def is_complete(path: Path) -> bool:
    """Whether a writer finished `path`: the sidecar is its last act."""
    return path.exists() and sidecar_path(path).exists()


def id_dtype(vocabulary: int) -> np.dtype:
    """The narrowest of uint16 and uint32 (little-endian) that holds the ids below `vocabulary`."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Ids of uint16 or uint32 in a file. What the file does not say is None."""

    path: Path
    file: BinaryIO
    dtype: np.dtype
    tokens: int
    text_bytes: int | None  # UTF-8 bytes of the text, end-of-text not counted
    tokenizer: str | None  # fingerprint
    vocabulary: int | None
    end_of_text: int | None
    sums: tuple[int, ...] = ()  # CRC-32 of each _BLOCK bytes; () where no sidecar has them
    assumed: str | None = None  # what no sidecar vouches for
    _checked: set[int] = field(default_factory=set, repr=False)  # blocks that were compared with their sums

    def __len__(self) -> int:
        return self.tokens

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Open a token file; nothing is read yet.

        Raises UserError: an unreadable sidecar, no tokens, a size that is not what the sidecar says or that
        is not whole ids.
        """
        sidecar = sidecar_path(path)
        fields = _read_sidecar(sidecar) if sidecar.exists() else {}
        dtype = np.dtype(str(fields.get("dtype", "uint16"))).newbyteorder("<")
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise UserError(f"{path}: {size} bytes are not one or more whole {dtype.name} ids; make the file again")
        tokens = size // dtype.itemsize
        if fields and fields["tokens"] != tokens:
            raise UserError(
                f"{path}: {sidecar.name} says {fields['tokens']} {dtype.name} ids, and the file holds "
                f"{tokens} ({size} bytes); delete both and make them again"
            )
        return cls(
            path=path,
            file=open(path, "rb", buffering=0),
            dtype=dtype,
            tokens=tokens,
            text_bytes=fields.get("text_bytes"),
            tokenizer=fields.get("tokenizer"),
            vocabulary=fields.get("vocabulary"),
            end_of_text=fields.get("end_of_text"),
            sums=tuple(fields.get("crc32", ())),
            assumed=None if fields else NANOGPT,
        )

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from `start` on, in the file's dtype.

        Raises TrainerError where the file was cut short since it was opened, or holds other bytes than were written.
        """
        assert 0 <= start <= start + count <= self.tokens, (start, count, self.tokens)
        first, last = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        if self.sums:
            for block in range(first // _BLOCK, -(-last // _BLOCK)):
                self._check(block)
        return np.frombuffer(self._bytes(first, last - first), dtype=self.dtype)

    def _check(self, block: int) -> None:
        if block in self._checked:
            return
        start = block * _BLOCK
        crc = zlib.crc32(self._bytes(start, min(_BLOCK, self.tokens * self.dtype.itemsize - start)))
        if block >= len(self.sums) or crc != self.sums[block]:
            raise TrainerError(
                f"{self.path}: the block at byte {start} is not what was written (CRC-32 {crc}); delete the file and "
                "its sidecar, and the same command makes them again"
            )
        self._checked.add(block)

    def _bytes(self, start: int, count: int) -> bytes:
        try:
            data = os.pread(self.file.fileno(), count, start)
        except OSError as error:
            raise TrainerError(f"{self.path}: {count} bytes at {start} cannot be read: {error.strerror}") from error
        if len(data) != count:
            size = self.tokens * self.dtype.itemsize
            raise TrainerError(
                f"{self.path}: cut short: {count} bytes at {start} wanted, {len(data)} are left of {size} bytes; make "
                "it again, and the same command goes on from the newest checkpoint"
            )
        return data

    def largest_id(self) -> int:
        """Read all of it, 16 M ids at a time."""
        starts = range(0, self.tokens, _SCAN_TOKENS)
        return max(int(self.read(i, min(_SCAN_TOKENS, self.tokens - i)).max()) for i in starts)


def _read_sidecar(path: Path) -> dict:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); delete it and its .bin and make them again") from error
    wrong = not isinstance(fields, dict) or fields.get("dtype") not in ("uint16", "uint32")
    if wrong or not isinstance(fields.get("tokens"), int):
        raise UserError(f"{path} needs at least a dtype (uint16 or uint32) and tokens (a count); correct or delete it")
    return fields


class TokenWriter:
    """Stream ids into `path`. As a context manager it commits at the end, or, on any exception, leaves
    nothing.

    Raises TrainerError where the drive does not take them, with what was written and what is free.
    """

    def __init__(self, path: Path, *, tokenizer: str | None, vocabulary: int, end_of_text: int | None = None) -> None:
        self.path = path
        self.tokens = 0
        self.text_bytes: int | None = None  # set by whoever counts them, before the end
        self._tokenizer, self._vocabulary, self._end_of_text = tokenizer, vocabulary, end_of_text
        self._dtype = id_dtype(vocabulary)
        self._sums: list[int] = []
        self._block = b""  # what the next sum is of
        self._file: BinaryIO

    def __enter__(self) -> TokenWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_temporary(self.path)
        except OSError as error:
            raise UserError(
                f"cannot write in {self.path.parent}: {error.strerror}; choose another directory with data.cache=DIR"
            ) from error
        return self

    def write(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append ids, each below `vocabulary`."""
        data = np.asarray(ids, dtype=self._dtype).tobytes()
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from error
        self.tokens += len(ids)
        self._block += data
        while len(self._block) >= _BLOCK:
            self._sums.append(zlib.crc32(self._block[:_BLOCK]))
            self._block = self._block[_BLOCK:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._commit()
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            _discard(self._file)

    def _commit(self) -> None:
        fields = {
            "dtype": self._dtype.name,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "tokenizer": self._tokenizer,
            "vocabulary": self._vocabulary,
            "end_of_text": self._end_of_text,
            "crc32": self._sums + ([zlib.crc32(self._block)] if self._block else []),  # of each MiB
        }
        content = (json.dumps(fields) + "\n").encode()
        sidecar = sidecar_path(self.path)
        # A sidecar of other content must not stand beside the new ids even for a moment. An equal one may:
        # that is another process preparing the same text, which must not lose its finished pair.
        if sidecar.exists() and sidecar.read_bytes() != content:
            sidecar.unlink()
        _publish(self._file, self.path)
        temporary = _open_temporary(sidecar)
        try:
            temporary.write(content)
            _publish(temporary, sidecar)
        finally:
            _discard(temporary)

    def _failed(self, error: OSError) -> TrainerError:
        _discard(self._file)  # before looking at what is free
        written = self.tokens * self._dtype.itemsize
        free = shutil.disk_usage(self.path.parent).free
        what = "the drive is full" if error.errno == errno.ENOSPC else f"writing failed ({error.strerror})"
        return TrainerError(
            f"{what}: {self.path.parent} took {format_bytes(written)} of tokens and has "
            f"{format_bytes(free)} free now that the unfinished file is removed; a token takes "
            f"{self._dtype.itemsize} bytes. Free space there, or choose another directory with data.cache=DIR"
        )


def _open_temporary(path: Path) -> BinaryIO:
    """A new file beside `path`, its own for each process, so that renaming it is atomic."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp").open("xb")


def _publish(file: BinaryIO, path: Path) -> None:
    """Make `file`, and then its name `path`, last through a power cut."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    sync_directory(path.parent)


def _discard(file: BinaryIO) -> None:
    """Close, and remove unless it was published."""
    try:
        file.close()
    except OSError:
        pass  # a full drive refuses the last flush as well, and its error is already on its way
    Path(file.name).unlink(missing_ok=True)
