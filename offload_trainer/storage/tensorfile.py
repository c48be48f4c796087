"""Safetensors files read and written a stretch at a time, so that a file may be larger than memory.

The format is eight bytes of length, a JSON header with every tensor's dtype, shape and place, then the bytes
(https://huggingface.co/docs/safetensors). Sizes are known beforehand, so the header is written first. Any
safetensors library reads the result. What is valid is that library's decision; the bytes are read with pread, since the
pages of its mapping count as the process's own memory until the file is closed.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.safe_files import open_file
from offload_trainer.storage.crc import combined

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_COMPARED = 1 << 24  # elements
_PASSING = 64 << 20  # bytes after which what was written is on the disk and leaves the page cache


@dataclass(frozen=True)
class TensorEntry:
    """What a file holds under one name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: its size, and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Piece:
    """Bytes [start, start + bytes) of a file as they were written, and their CRC-32."""

    start: int
    bytes: int
    crc32: int


def file_of(pieces: Iterable[Piece]) -> WrittenFile:
    """The file that `pieces`, whoever wrote them, make together: each of its bytes is in one of them."""
    size = crc = 0
    for piece in sorted((piece for piece in pieces if piece.bytes), key=lambda piece: piece.start):
        assert piece.start == size, f"{piece} follows byte {size}"
        size, crc = size + piece.bytes, combined(crc, piece.crc32, piece.bytes)
    return WrittenFile(size, crc)


class PlacedWriter:
    """Write stretches of a file's tensors at their places. Others may write the rest meanwhile, on other nodes too.

    `make` has written the header, and the file has its size. TrainerError where the disk refuses.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self.path = path
        self._entries = {entry.name: entry for entry in entries}
        _, self._starts, _ = _laid_out(entries, {})
        self._pieces: list[Piece] = []
        self._written = self._passed = 0
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # not for reading: NFS then sends these bytes alone
            self._file = os.fdopen(opened, "wb", buffering=0)
        except OSError as error:
            raise TrainerError(f"{path}: cannot be written: {reason(error)}") from error

    @staticmethod
    def make(path: Path, entries: Sequence[TensorEntry]) -> Piece:
        """The file with its header and room for all tensors; returns the header's piece."""
        header, _, size = _laid_out(entries, {})
        try:
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(header), 0)
                os.ftruncate(file.fileno(), size)
                os.fsync(file.fileno())
        except OSError as error:
            raise _full(path, error, written=0) from error
        return Piece(0, len(header), zlib.crc32(header))

    def put(self, name: str, start: int, stretch: torch.Tensor) -> None:
        """The elements of a tensor from `start` on: 1-D, contiguous, on the CPU, in the entry's dtype."""
        entry = self._entries[name]
        assert entry.dtype == stretch.dtype, f"{entry} expected, {stretch.dtype} given"
        assert 0 <= start <= start + stretch.numel() <= entry.numel, f"{stretch.numel()} at {start} given for {entry}"
        if not stretch.numel():
            return
        data, offset = stretch.view(torch.uint8).numpy().data, self._starts[name] + start * entry.dtype.itemsize
        try:
            _write_all(self._file.fileno(), data, offset)
            self._written += len(data)
            if self._written - self._passed >= _PASSING:
                self._pass()
        except OSError as error:
            self._file.close()
            raise _full(self.path, error, written=self._written) from error
        last = self._pieces[-1] if self._pieces else Piece(offset, 0, 0)
        if last.start + last.bytes == offset:
            self._pieces[-1:] = [Piece(last.start, last.bytes + len(data), zlib.crc32(data, last.crc32))]
        else:
            self._pieces.append(Piece(offset, len(data), zlib.crc32(data)))

    def _pass(self) -> None:
        """Bring it to the disk and out of the page cache, where it would push out what is needed again."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._passed = self._written

    def close(self) -> list[Piece]:
        """What was written, on the disk when this returns: pieces that do not touch each other, as they were put."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise _full(self.path, error, written=self._written) from error
        return self._pieces


def _laid_out(entries: Sequence[TensorEntry], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """A file's beginning, before its data; the byte at which each tensor starts; the bytes of the whole file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    starts, offset = {}, 0
    for entry in entries:
        starts[entry.name] = offset
        header[entry.name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + at for name, at in starts.items()}, first + offset


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _full(path: Path, error: OSError, *, written: int) -> TrainerError:
    return TrainerError(
        f"{path}: {reason(error, path.parent)} after {written} bytes; free space on that disk and run again"
    )


class TensorFileWriter:
    """Write the tensors of `entries`, in that order, then `close` it. TrainerError where the disk refuses."""

    def __init__(self, path: Path, entries: list[TensorEntry], *, metadata: dict[str, str] | None = None) -> None:
        header, _, _ = _laid_out(entries, metadata or {})
        self.path = path
        self._entries = deque(entries)
        self._given = 0  # elements of the first of them
        self._crc = 0
        self._written = self._passed = 0
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise TrainerError(f"{path}: cannot be written: {reason(error)}") from error
        self._put(header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor whole, from any device and layout."""
        self.append(name, tensor.detach().to("cpu").contiguous().reshape(-1))

    def append(self, name: str, stretch: torch.Tensor) -> None:
        """Write the next elements of a tensor: 1-D, contiguous, on the CPU, in the entry's dtype."""
        while self._entries[0].name != name:
            self._end_tensor()
        self._given += stretch.numel()
        entry = self._entries[0]
        assert entry.dtype == stretch.dtype, f"{entry} expected, {stretch.dtype} given"
        assert self._given <= entry.numel, f"{self._given} elements given for {entry}"
        if stretch.numel():
            self._put(stretch.view(torch.uint8).numpy().data)

    def _end_tensor(self) -> None:
        entry = self._entries.popleft()
        assert self._given == entry.numel, f"{self._given} elements given for {entry}"
        self._given = 0

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                done = self._file.write(view)
                self._crc = zlib.crc32(view[:done], self._crc)
                self._written += done
                view = view[done:]
            if self._written - self._passed >= _PASSING:
                self._pass()
        except OSError as error:
            self._file.close()
            raise _full(self.path, error, written=self._written) from error

    def _pass(self) -> None:
        """Bring it to the disk and out of the page cache, where it would push out what is needed again."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), self._passed, self._written - self._passed, os.POSIX_FADV_DONTNEED)
        self._passed = self._written

    def close(self) -> WrittenFile:
        """Finish: every entry must have been written. The bytes are on the disk when this returns."""
        while self._entries:
            self._end_tensor()
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise TrainerError(f"{self.path}: {reason(error, self.path.parent)} after {self._written} bytes") from error
        return WrittenFile(self._written, self._crc)


class TensorFileReader:
    """The tensors of one file, whole or in part. As a context manager it closes the file.

    Raises UserError for a file that is not there, not whole, or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(open_file(path, links=True), "rb", buffering=0)  # noqa: SIM115 - closed by `close`
            with safe_open(path, framework="pt"):
                pass  # sizes, places and names fit each other and the file
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} is not a whole safetensors file: {error}") from error
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        header.pop("__metadata__", None)
        unknown = {name: about["dtype"] for name, about in header.items() if about["dtype"] not in _NAMES}
        if unknown:
            name, dtype = next(iter(unknown.items()))
            raise UserError(
                f"{path}: {len(unknown)} tensors are in {dtype} (the first: {name}), which is not read here"
            )
        self.entries = {
            name: TensorEntry(name, _NAMES[about["dtype"]], tuple(about["shape"])) for name, about in header.items()
        }
        self._starts = {name: 8 + length + about["data_offsets"][0] for name, about in header.items()}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, in its dtype and shape, in memory of its own."""
        entry = self.entries[name]
        return self.read_part(name, 0, entry.numel).view(entry.shape)

    def read_part(self, name: str, start: int, count: int) -> torch.Tensor:
        """`count` elements from `start` on, counted through the whole tensor: 1-D, in its dtype."""
        entry = self.entries[name]
        assert 0 <= start <= start + count <= entry.numel, (entry, start, count)
        out = torch.empty(count, dtype=entry.dtype)
        if count:
            self._fill(out.view(torch.uint8).numpy().data, self._starts[name] + start * entry.dtype.itemsize)
        return out

    def same(self, name: str, other: TensorFileReader, theirs: str) -> bool:
        """Whether a tensor here holds the values of another file's, 16 M elements at a time."""
        ours, their = self.entries[name], other.entries[theirs]
        return ours.shape == their.shape and all(
            torch.equal(self.read_part(name, start, count), other.read_part(theirs, start, count))
            for start in range(0, ours.numel, _COMPARED)
            for count in [min(_COMPARED, ours.numel - start)]
        )

    def _fill(self, view: memoryview, offset: int) -> None:
        size = len(view)
        done = 0
        while done < size:
            try:
                moved = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise TrainerError(f"{self.path}: {size} bytes at {offset} cannot be read: {error.strerror}") from error
            if moved == 0:
                raise TrainerError(f"{self.path}: {size} bytes at {offset} cannot be read: it was cut short")
            done += moved
        os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TensorFileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
