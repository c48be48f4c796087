"""Files and directories that a crash leaves either as they were or as they are meant to be."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
from functools import partial
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.safe_files import open_given

_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.tmp")
REPLACED = "replaced"  # in a workplace: what stood under the final name, where two names cannot be exchanged


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode(), mode=mode)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` at once: readers see the old bytes or the new, also after a power cut.

    `mode`: its permissions, of which the user's umask takes some away.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # _TEMPORARY finds it
    try:
        temporary.unlink(missing_ok=True)  # a process of this number was killed here, or somebody has put a link there
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write says only what is wrong
        raise
    sync_directory(path.parent)


def remove_abandoned(directory: Path) -> None:
    """Remove the temporary files that processes which were killed within `write_bytes` have left in `directory`.

    The caller sees to it that no process of another machine writes there.
    """
    for path in directory.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and path.is_file() and not path.is_symlink() and not _is_alive(int(found[1])):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Return whether a process of this number runs here, whoever's it is."""
    return os.path.exists(f"/proc/{process}")


def open_to_append(path: Path) -> int:
    """Return a descriptor that appends to `path`, made if it is missing. UserError for a link, a pipe or a device."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise UserError(f"{path}: a link or a pipe is not written to; move it away") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: not a regular file, and not written to; move it away")
    return descriptor


def make_directories(path: Path) -> None:
    """`path` and what is missing above it, each of them on the disk when this returns. OSError as mkdir's."""
    missing = []
    for place in (path, *path.parents):
        if place.is_dir():
            break
        missing.append(place)
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        sync_directory(place.parent)


def sync_file(path: Path) -> None:
    """Make what was written to it last; nothing where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_tree(source: Path, destination: Path) -> None:
    """Copy the files below `source` into the new directory `destination`, which is on the disk when this returns.

    Modes are the user's umask's. UserError for a link, a pipe or a device.
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


def put_in_place(new: Path, final: Path) -> None:
    """Give `new`, which is in a workplace (`removal.replacing`), its final name, also over another directory.

    At no moment is there none where the filesystem can exchange two names; elsewhere the old one is, for an instant,
    only in the workplace, and goes back from there after a kill. What was replaced is left in the workplace.
    """
    if not final.exists():
        os.rename(new, final)
    elif not exchange(new, final):
        os.rename(final, new.with_name(REPLACED))
        os.rename(new, final)
    sync_directory(final.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; False, and nothing done, where the filesystem cannot (renameat2(2), RENAME_EXCHANGE)."""
    library = ctypes.CDLL(None, use_errno=True)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if not hasattr(library, "renameat2"):
        return False
    return bool(library.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


def sync_directory(path: Path) -> None:
    """Make renames and new names inside `path` last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_below(directory: Path) -> int:
    """Bytes that the files below a directory take on their drive; files that go meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(directory):  # which passes over a directory that goes
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total
