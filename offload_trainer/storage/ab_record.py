"""A small record in a file of two alternating slots, which survives a kill or a power cut at any moment.

    slot 0   number, bytes, CRC-32, content ...      the valid slot with the larger number is the current record
    slot 1   the same                                the next write goes to the other slot

The file has a fixed size and its blocks are allocated when it is created. Writing a slot and `fdatasync` therefore
change nothing else on the disk; replacing a file by renaming would cost two filesystem journal entries each time. A
slot torn by a kill or a power cut fails its CRC-32, and the reader falls back to the previous record in the other slot.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from offload_trainer.safe_files import file_bytes
from offload_trainer.storage.atomic_io import sync_directory

_HEAD = struct.Struct("<QQI")  # record number, content size in bytes, CRC-32 of number, size and content
_BLOCK = 4096


class Record:
    """A writer of records of at most `most` bytes to the file at `path`."""

    def __init__(self, path: Path, *, most: int) -> None:
        """Open or create the file. A record already in it stays current until the next `write`.

        Raises OSError, and ValueError if an existing file has another size.
        """
        self._slot = _slot(most)
        found = _newest(_read(path, self._slot), self._slot) if path.exists() else None
        self._number = found[0] if found else 0
        self.is_new = found is None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        if found is None:
            os.posix_fallocate(self._descriptor, 0, 2 * self._slot)
            os.fsync(self._descriptor)
            sync_directory(path.parent)

    def write(self, content: bytes) -> None:
        """Replace the record. After a kill or a power cut, readers find this record or the previous one."""
        number = self._number + 1
        head = struct.pack("<QQ", number, len(content))
        data = head + struct.pack("<I", zlib.crc32(head + content)) + content
        assert len(data) <= self._slot, f"{len(content)} bytes in a slot of {self._slot}"
        done, start = 0, number % 2 * self._slot
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], start + done)
        os.fdatasync(self._descriptor)
        self._number = number

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_record(path: Path, *, most: int) -> bytes:
    """Return the newest valid record.

    Raises ValueError if neither slot is valid, and FileNotFoundError.
    """
    data = _read(path, _slot(most))
    found = _newest(data, _slot(most))
    if found is None:
        raise ValueError(f"neither of its two slots is whole{'' if any(data) else ': it holds zeros alone'}")
    return found[1]


def torn_slot(path: Path, *, most: int) -> bool:
    """Return whether a slot holds data but no valid record, that is, whether a kill or the drive damaged it."""
    slot, data = _slot(most), _read(path, _slot(most))
    return any(_content(data, start, slot) is None and any(data[start : start + slot]) for start in (0, slot))


def _slot(most: int) -> int:
    """Return the size of a slot in bytes: whole blocks, so that writing one slot never touches a block of the other."""
    return -(-(_HEAD.size + most) // _BLOCK) * _BLOCK


def _read(path: Path, slot: int) -> bytes:
    data = file_bytes(path, most=2 * slot)
    if len(data) not in (0, 2 * slot):
        raise ValueError(f"it has {len(data)} bytes, and two slots have {2 * slot}")
    return data


def _newest(data: bytes, slot: int) -> tuple[int, bytes] | None:
    """Return the number and the content of the newest valid record, or None."""
    return max(filter(None, (_content(data, start, slot) for start in range(0, len(data), slot))), default=None)


def _content(data: bytes, start: int, slot: int) -> tuple[int, bytes] | None:
    """Return the number and the content of the record in the slot at byte `start`, or None if it is not valid."""
    number, size, crc = _HEAD.unpack_from(data, start)
    content = data[start + _HEAD.size :][:size]
    fits = size <= slot - _HEAD.size and number and number % 2 * slot == start
    return (number, content) if fits and zlib.crc32(data[start:][:16] + content) == crc else None
