"""Atomic, durable file and directory writes: after a crash the path has either its old content or its new one."""

import errno
import os
import re
import shutil
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, Crc32, exact_record, open_file, open_given, open_regular

_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.tmp")


@exact_record
class StoredFile:
    """Size in bytes and CRC-32 of one file of a checkpoint."""

    bytes: Count
    crc32: Crc32

    @classmethod
    def of(cls, path: Path) -> Self:
        return cls(path.stat().st_size, crc32_of(path))


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file, dropping it from the page cache so that it does not evict pages in use."""
    crc = 0
    with open(open_file(path, links=True), "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc


def write_text(path: Path, text: str, *, mode: int = 0o666, sync: bool = True) -> None:
    write_bytes(path, text.encode(), mode=mode, sync=sync)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Replace `path` atomically: readers see the old bytes or the new ones, also after a power cut.

    The umask is subtracted from `mode`. `sync`: False does not wait for the disk; a power cut may leave an empty file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # `_TEMPORARY` matches this name
    try:
        # left by a killed process with the same PID, or a link that somebody put there
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # the OSError of a write does not name the file
        raise
    if sync:
        sync_directory(path.parent)


def remove_abandoned(directory: Path) -> None:
    """Remove the temporary files in `directory` that processes killed during `write_bytes` have left.

    The caller ensures that no process on another machine writes there, since PIDs are checked on this machine only.
    """
    for path in directory.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and path.is_file() and not path.is_symlink() and not os.path.exists(f"/proc/{found[1]}"):
            path.unlink(missing_ok=True)


def open_to_append(path: Path) -> int:
    """Return a descriptor that appends to `path`, made if missing. Raises UserError for a link, pipe or device."""
    try:
        return open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EINVAL):  # ENXIO: a pipe without a reader
            raise UserError(f"{path}: a link or a pipe is not written to, only a regular file; move it away") from error
        raise


def make_directories(path: Path) -> None:
    """Create `path` and its missing parents, each synced to the disk. Raises OSError as `mkdir` does."""
    for place in (*reversed(path.parents), path):
        if not place.is_dir():
            place.mkdir(exist_ok=True)
            sync_directory(place.parent)


def sync_file(path: Path) -> None:
    """Sync the content of `path` to the disk. Do nothing if the file does not exist."""
    with suppress(FileNotFoundError), open(open_regular(path, os.O_RDONLY), "rb") as file:
        os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    """Sync a directory, its name, and all files and directories below it to the disk."""
    for path in directory.rglob("*"):
        sync_directory(path) if path.is_dir() else sync_file(path)
    sync_directory(directory)
    sync_directory(directory.parent)


def copy_tree(source: Path, destination: Path) -> None:
    """Copy the files below `source` into the new directory `destination` and sync them to the disk.

    Permissions come from the umask. Raises UserError for a link, a pipe or a device.
    """
    destination.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_symlink():
            raise UserError(f"{path} is a link, and what it points to does not belong there: not copied")
        if path.is_dir():
            copy_tree(path, destination / path.name)
            continue
        with open_given(path) as given, open(destination / path.name, "wb") as file:
            shutil.copyfileobj(given, file)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(destination)


def sync_directory(path: Path) -> None:
    """Sync a directory, so that renames and new names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_below(directory: Path) -> int:
    """Return the disk usage in bytes of the files below a directory; files removed meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(directory):  # os.walk skips a directory that is removed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
