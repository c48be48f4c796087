"""File locks that are safe in directories where other users write, and on network filesystems.

No link is followed, only regular files are opened, and every wait has a limit. On NFS and CIFS an exclusive lock needs
a writable descriptor (flock(2)). Filesystems without locks report ENOLCK, ENOSYS or EOPNOTSUPP, raised here as
`NoLocks`. After `NoLocks` it is unknown which other processes are active, so the caller must not delete anything.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_trainer.errors import TrainerError

_MISSING = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_PATIENCE = 60.0  # seconds to wait for a lock that other processes hold briefly
_SILENCE = 1.0  # seconds of waiting before a message


class NoLocks(TrainerError):
    """Raised when the filesystem does not support locks."""


def open_lock(path: Path, *, create: bool = False, directory: int | None = None) -> int:
    """Return a descriptor of a lock file, opened for writing too where this user may.

    `path` is relative to the descriptor `directory` if one is passed. Raises OSError for a link, a pipe or anything
    else that is not a regular file.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o666, dir_fd=directory)
    except OSError as error:
        if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        descriptor = os.open(path, flags | os.O_RDONLY, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file without waiting.

    Raises BlockingIOError if another process holds the lock, NoLocks if the filesystem does not support locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _MISSING:
            raise NoLocks(f"locks do not work there: {error.strerror}") from error
        raise


@contextmanager
def exclusive_lock(path: Path, *, say: Callable[[str], None], patience: float = _PATIENCE) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, created if missing, for the duration of the context.

    Waits at most `patience` seconds, reporting the wait through `say`, and then raises TrainerError. Raises NoLocks as
    `try_lock` does.
    """
    descriptor = open_lock(path, create=True)
    start, reported = time.monotonic(), False
    try:
        while True:
            try:
                try_lock(descriptor)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
            if waited > patience:
                raise TrainerError(f"{path}: another process has held this lock for {patience:.0f} s; fuser names it")
            if waited > _SILENCE and not reported:
                say(f"waiting for {path}, which another process holds; for at most {patience:.0f} s")
                reported = True
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
