"""Detection of the dtype of raw token files without a sidecar, as nanoGPT and others write them.

scan        one pass over the file -> the CRC-32 of each block, and the largest value at each 16-bit place of 8 bytes
bare_dtype  the result             -> uint16 or uint32, or UserError if they cannot be told apart
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from offload_trainer.errors import TrainerError, UserError

BLOCK = 1 << 20  # bytes covered by one CRC-32
_CHUNK = 16 * BLOCK
_PAGE = 4096  # values
# The upper half of an id is at most this in every vocabulary of up to 2^20 ids.
_UPPER = 15
_TELLING = 32  # number of uint32 ids from which the pattern is not a coincidence
_FOREIGN = {
    b"\x93NUMPY": "NumPy's .npy: write its ids alone: numpy.load(FILE).tofile('ids.bin')",
    b"PK\x03\x04": "a zip archive (torch.save, .npz): write its ids alone, as uint16 or uint32",
    b"\x1f\x8b": "gzip: decompress it",
    b"PAR1": "parquet: its tokens or text must be written out",
    (20240520).to_bytes(4, "little"): "llm.c's, with a header of 1024 bytes: tail -c +1025 FILE > ids.bin",
    (20240801).to_bytes(4, "little"): "llm.c's, with a header of 1024 bytes: tail -c +1025 FILE > ids.bin",
}


class Scan(NamedTuple):
    """Result of one pass over a file."""

    sums: tuple[int, ...]  # CRC-32 of each BLOCK bytes
    lanes: tuple[int, int, int, int]  # the largest 16-bit value at each place of every 8 bytes
    largest32: int  # the largest 32-bit value


def scan(path: Path, file: BinaryIO, *, size: int) -> Scan:
    """Read all of `file` (`size` bytes, a multiple of 2). Raises TrainerError if it cannot be read to its end."""
    sums: list[int] = []
    lanes = np.zeros(4, dtype=np.uint16)
    largest = seen = 0
    file.seek(0)
    while seen < size:
        data = file.read(min(_CHUNK, size - seen))
        if not data or (len(data) % BLOCK and seen + len(data) != size):
            raise TrainerError(
                f"{path}: {size} bytes were expected, but only {seen + len(data)} can be read; start again"
            )
        seen += len(data)
        sums += (zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))
        halves = np.frombuffer(data, dtype="<u2")
        lanes = np.maximum(lanes, _largest_at_each_place(halves))
        largest = max(largest, int(np.frombuffer(data, dtype="<u4", count=len(data) // 4).max(initial=0)))
    first, second, third, fourth = map(int, lanes)
    return Scan(tuple(sums), (first, second, third, fourth), largest)


def _largest_at_each_place(halves: np.ndarray) -> np.ndarray:
    """Return the largest value at each place of every four.

    Rows of 4096 values are reduced first, so that the reduction is vectorised.
    """
    whole = len(halves) // _PAGE * _PAGE
    rest = np.zeros(_PAGE, dtype=np.uint16)
    rest[: len(halves) - whole] = halves[whole:]
    page = halves[:whole].reshape(-1, _PAGE).max(axis=0, initial=0)
    largest: np.ndarray = np.maximum(page, rest).reshape(-1, 4).max(axis=0)
    return largest


def bare_dtype(path: Path, found: Scan, *, size: int) -> str:
    """Return whether the ids of a file without a sidecar are uint16 or uint32.

    The upper halves of uint32 ids are 0 to 15, and they are every second 16-bit value of the file. In a file of uint16,
    every second value is an id like its neighbours. Raises UserError if the values fit both, or look like 64-bit ids.
    """
    low, high = max(found.lanes[0::2]), max(found.lanes[1::2])
    say = "choose with data.token_dtype=uint16 or uint32"
    if size % 8 == 0 and size // 8 >= _TELLING and found.lanes[2] == found.lanes[3] == 0 < max(found.lanes):
        raise UserError(
            f"{path}: looks like ids of 64 bits (four bytes of every eight are 0), but only uint16 and uint32 are "
            f"supported: numpy.fromfile(FILE, 'int64').astype('uint32').tofile('ids.bin'); or {say}"
        )
    if size % 4 or high > _UPPER or (high > 0 and low <= _UPPER):
        return "uint16"
    if high == low == 0 or size // 4 < _TELLING:
        raise UserError(f"{path}: its {size} bytes could be 16-bit or 32-bit ids: {say}")
    return "uint32"


def refuse_foreign(path: Path, head: bytes) -> None:
    """Raise UserError for a file that begins with the magic bytes of another format."""
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            told = what.replace("FILE", str(path))
            raise UserError(f"{path}: not raw ids, but {told} (data.token_dtype=uint16 or uint32 reads it anyway)")
