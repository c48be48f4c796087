"""Readers and writers of safetensors files that work in pieces, so that a file may be larger than memory.

Also here: dtypes by their names, and the check for invalid values on saving, exporting and loading.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open

from offload_trainer.common.errors import TrainerError, UserError, reason
from offload_trainer.common.safe_files import open_given
from offload_trainer.storage.atomic_io import StoredFile

# Torch dtypes by their names in configurations, plans and this package's files
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int16": torch.int16,
    "uint8": torch.uint8,
}
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
_COMPARED = 1 << 24  # elements compared at a time


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of one tensor in a file."""

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
class Piece:
    """Bytes [start, start + bytes) of a file, with their CRC-32 as computed when they were written."""

    start: int
    bytes: int
    crc32: int


def file_of(pieces: Iterable[Piece]) -> StoredFile:
    """Return the size and CRC-32 of the file that `pieces`, from one or several writers, make up without gaps."""
    size = crc = 0
    for piece in sorted((piece for piece in pieces if piece.bytes), key=lambda piece: piece.start):
        assert piece.start == size, f"{piece} follows byte {size}"
        size, crc = size + piece.bytes, combined(crc, piece.crc32, piece.bytes)
    return StoredFile(size, crc)


class PlacedWriter:
    """A writer of tensors, or parts of them, at their offsets. Raises TrainerError if the disk refuses.

    Other processes and nodes may write the rest at the same time, after one has called `make`; `whole`: all is written
    here, from the header on.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry], *, whole: bool = False) -> None:
        self.path, self._whole = path, whole
        self._entries = {entry.name: entry for entry in entries}
        _, self._starts, self._size = _laid_out(entries)
        self._pieces = [self.make(path, entries)] if whole else []
        self._written = self._passed = 0
        self._file = _opened(path, os.O_WRONLY)  # write-only: over NFS the client then sends only these bytes

    @staticmethod
    def make(path: Path, entries: Sequence[TensorEntry]) -> Piece:
        """Create the file with its header and its full size, and return the header's piece."""
        header, _, size = _laid_out(entries)
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            try:
                write_all(file.fileno(), memoryview(header), 0)
                os.ftruncate(file.fileno(), size)
                os.fsync(file.fileno())
            except OSError as error:
                raise _full(path, error, written=0) from error
        return Piece(0, len(header), zlib.crc32(header))

    def put(self, name: str, start: int, stretch: torch.Tensor) -> None:
        """Write elements of a tensor from index `start` on, from any device and layout, in the entry's dtype."""
        entry, stretch = self._entries[name], stretch.detach().cpu().contiguous().reshape(-1)
        assert entry.dtype == stretch.dtype, f"{entry} expected, {stretch.dtype} given"
        assert 0 <= start <= start + stretch.numel() <= entry.numel, f"{stretch.numel()} at {start} given for {entry}"
        if not stretch.numel():
            return
        data, offset = stretch.view(torch.uint8).numpy().data, self._starts[name] + start * entry.dtype.itemsize
        try:
            write_all(self._file.fileno(), data, offset)
            self._written += len(data)
            if self._written - self._passed >= 64 << 20:  # cached writes would evict data that is needed again
                os.fdatasync(self._file.fileno())
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                self._passed = self._written
        except OSError as error:
            self._file.close()
            raise _full(self.path, error, written=self._written) from error
        last = self._pieces[-1] if self._pieces else Piece(offset, 0, 0)
        if last.start + last.bytes == offset:
            self._pieces[-1:] = [Piece(last.start, last.bytes + len(data), zlib.crc32(data, last.crc32))]
        else:
            self._pieces.append(Piece(offset, len(data), zlib.crc32(data)))

    def close(self) -> list[Piece]:
        """Sync and close the file. Returns the written pieces in order of writing; consecutive ones are merged."""
        written = sum(piece.bytes for piece in self._pieces)
        assert not self._whole or written == self._size, f"{written} of {self._size} bytes were written"
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise _full(self.path, error, written=self._written) from error
        return self._pieces


def _opened(path: Path, flags: int) -> BinaryIO:
    try:
        return os.fdopen(os.open(path, flags | os.O_CLOEXEC, 0o666), "wb", buffering=0)
    except OSError as error:
        raise TrainerError(f"{path}: cannot be written: {reason(error)}") from error


def _laid_out(entries: Sequence[TensorEntry]) -> tuple[bytes, dict[str, int], int]:
    """Return the file's header bytes, the byte offset at which each tensor starts, and the size of the whole file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, offset = {}, 0
    for entry in entries:
        starts[entry.name] = offset
        dtype, ends = SAFETENSORS_DTYPES[entry.dtype], [offset, offset + entry.bytes]
        header[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": ends}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pad so that the data is aligned to 8 bytes
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + at for name, at in starts.items()}, first + offset


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to a file at `offset`."""
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _full(path: Path, error: OSError, *, written: int) -> TrainerError:
    return TrainerError(f"{path}: {reason(error)} after {written} bytes; free space on that disk and run again")


class TensorFileReader:
    """A reader of one safetensors file, by tensor or by part. As a context manager it closes the file on exit.

    The safetensors library validates the file; the data is read with pread, because pages of the library's mapping
    would count as this process's memory until the file is closed. Raises UserError for a file that is missing,
    incomplete or not safetensors, or that holds an unsupported dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_given(path)
        try:
            with safe_open(path, framework="pt"):
                pass  # safe_open checks that sizes, offsets and names fit each other and the file
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} is not a whole safetensors file: {error}") from error
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        header.pop("__metadata__", None)
        if others := {name: about["dtype"] for name, about in header.items() if about["dtype"] not in _NAMES}:
            name, dtype = next(iter(others.items()))
            raise UserError(f"{path}: {len(others)} tensors are in {dtype} (the first: {name}), which is not read here")
        self.entries = {
            name: TensorEntry(name, _NAMES[about["dtype"]], tuple(about["shape"])) for name, about in header.items()
        }
        self._starts = {name: 8 + length + about["data_offsets"][0] for name, about in header.items()}

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor, in its dtype and shape, into new memory."""
        entry = self.entries[name]
        return self.read_part(name, 0, entry.numel).view(entry.shape)

    def read_part(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read `count` elements from `start` on in the flattened tensor, as a 1-D tensor in its dtype."""
        entry = self.entries[name]
        assert 0 <= start <= start + count <= entry.numel, (entry, start, count)
        out = torch.empty(count, dtype=entry.dtype)
        view, offset, done = out.view(torch.uint8).numpy().data, self._starts[name] + start * entry.dtype.itemsize, 0
        size = len(view)
        while done < size:
            try:
                moved = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise TrainerError(f"{self.path}: {size} bytes at {offset} cannot be read: {error.strerror}") from error
            if moved == 0:
                raise TrainerError(f"{self.path}: {size} bytes at {offset} cannot be read: it was cut short")
            done += moved
        os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
        return out

    def same(self, name: str, other: Self, theirs: str) -> bool:
        """Return whether a tensor equals one of another file, comparing 16 M elements at a time."""
        ours, their = self.entries[name], other.entries[theirs]
        return ours.shape == their.shape and all(
            torch.equal(self.read_part(name, start, count), other.read_part(theirs, start, count))
            for start in range(0, ours.numel, _COMPARED)
            for count in [min(_COMPARED, ours.numel - start)]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


_ONE = 1 << 31  # polynomials as numbers: bit 31 is x^0, bit 0 is x^31, as in the CRC itself


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A followed by B, given the CRC-32 of each and the length of B in bytes.

    Python's zlib lacks crc32_combine (M. Adler, crc32.c, 2020). A CRC is a polynomial over GF(2) modulo x^32 + x^26 +
    ... + 1. Appending n bytes multiplies it by x^(8 * n), which is a product of the squares x^(2^k).
    """
    for number, power in enumerate(_POWERS):
        if length >> number & 1:
            first = _product(power, first)
    return first ^ second


def _product(one: int, other: int) -> int:
    result, bit = 0, _ONE
    while bit:
        if one & bit:
            result ^= other
        bit >>= 1
        other = other >> 1 ^ (0xEDB88320 if other & 1 else 0)  # the polynomial
    return result


# x^8 and its squares, x^(8 * 2^k)
_POWERS = list(accumulate(range(63), lambda power, _: _product(power, power), initial=_ONE >> 8))


def describe_invalid_values(values: torch.Tensor, *, signed: bool = True) -> str | None:
    """Describe the invalid elements of `values` (a CPU tensor); return None if all are valid. Integer codes always are.

    `signed=False` is for squares or largest magnitudes, which must not be negative: the next update takes their square
    root or scales by them. The check is one pass at reading speed that allocates nothing: `aminmax` propagates NaN.
    """
    if not values.numel() or not values.is_floating_point():
        return None
    least, greatest = torch.aminmax(values)
    if least.isfinite() and greatest.isfinite() and (signed or least >= 0):
        return None
    wrong = ~values.isfinite()
    if not signed:
        wrong |= values < 0
    what = "NaN or infinite" if signed else "NaN, infinite or negative"
    return f"{int(wrong.sum())} of {values.numel()} values are {what}"
