"""One small record that is replaced at once: whatever moment a kill or a power cut chooses, the old or the new is read.

    slot 0   number, bytes, CRC-32, content ...      the record with the larger number that is whole is the one
    slot 1   the same                                the other slot is written next

Slots lie in a file of fixed size whose blocks are there from the start, so writing one and `fdatasync` need no other
change on the disk: a name that is replaced would take two entries of the filesystem's journal each time. A slot that a
kill or a power cut has torn fails its CRC-32, and the other one is of the record before.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from offload_trainer.safe_files import file_bytes
from offload_trainer.storage.atomic_io import sync_directory

_HEAD = struct.Struct("<QQI")  # number, bytes of the content, CRC-32 of both and the content
_BLOCK = 4096


class Record:
    """A file at `path` for records of at most `most` bytes."""

    def __init__(self, path: Path, *, most: int) -> None:
        """What was there stays the record until the next one. OSError; ValueError where it has another size."""
        self._slot = _slot(most)
        found = _newest(_read(path, self._slot), self._slot) if path.exists() else None
        self._number = found[0] if found else 0
        self.is_new = found is None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        if found is None:
            os.posix_fallocate(self._descriptor, 0, 2 * self._slot)
            os.fsync(self._descriptor)
            sync_directory(path.parent)

    def write(self, content: bytes, *, lasting: bool) -> None:
        """Replace the record; after a kill it is this or the one before; if `lasting`, after a power cut too."""
        number = self._number + 1
        head = struct.pack("<QQ", number, len(content))
        data = head + struct.pack("<I", zlib.crc32(head + content)) + content
        assert len(data) <= self._slot, f"{len(content)} bytes in a slot of {self._slot}"
        done, start = 0, number % 2 * self._slot
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], start + done)
        if lasting:
            os.fdatasync(self._descriptor)
        self._number = number

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_record(path: Path, *, most: int) -> bytes:
    """Return the newest record that is whole. ValueError where there is none, FileNotFoundError."""
    data = _read(path, _slot(most))
    found = _newest(data, _slot(most))
    if found is None:
        raise ValueError(f"neither of its two slots is whole{'' if any(data) else ': it holds zeros alone'}")
    return found[1]


def torn_slot(path: Path, *, most: int) -> bool:
    """Return whether one of the two slots holds something, but no record: a kill or the drive has damaged it."""
    slot, data = _slot(most), _read(path, _slot(most))
    return any(_content(data, start, slot) is None and any(data[start : start + slot]) for start in (0, slot))


def _slot(most: int) -> int:
    """Bytes of a slot, in whole blocks, so that writing one never touches a block of the other."""
    return -(-(_HEAD.size + most) // _BLOCK) * _BLOCK


def _read(path: Path, slot: int) -> bytes:
    data = file_bytes(path, most=2 * slot)
    if len(data) not in (0, 2 * slot):
        raise ValueError(f"it has {len(data)} bytes, and two slots have {2 * slot}")
    return data


def _newest(data: bytes, slot: int) -> tuple[int, bytes] | None:
    """Return number and content of the newest record that is whole."""
    return max(filter(None, (_content(data, start, slot) for start in range(0, len(data), slot))), default=None)


def _content(data: bytes, start: int, slot: int) -> tuple[int, bytes] | None:
    """Return number and content of the record in the slot at `start`, if it is whole."""
    number, size, crc = _HEAD.unpack_from(data, start)
    content = data[start + _HEAD.size :][:size]
    fits = size <= slot - _HEAD.size and number and number % 2 * slot == start
    return (number, content) if fits and zlib.crc32(data[start:][:16] + content) == crc else None
