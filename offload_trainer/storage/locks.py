"""Locks on files that may lie where others write too, or on a filesystem of a network.

No link is followed, nothing but a regular file is opened, and nothing waits without an end. On NFS and CIFS an
exclusive lock wants a descriptor that may write (flock(2)); filesystems without locks say ENOLCK or ENOSYS, which is
`NoLocks` here: where it comes, nobody knows who else is at work, and nothing may be deleted.
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
_PATIENCE = 60.0  # seconds for a lock that others hold for an instant
_SILENCE = 1.0  # seconds of waiting without a word


class NoLocks(TrainerError):
    """The filesystem has no locks."""


def open_lock(path: Path, *, create: bool = False, directory: int | None = None) -> int:
    """A descriptor of a lock file, for reading and writing where this user may; `path` is relative to `directory`.

    OSError where it is a link, a pipe or anything else that is no regular file.
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


def take(descriptor: int, *, shared: bool = False) -> None:
    """Lock it at once. BlockingIOError where another process has it, NoLocks where the filesystem has none."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _MISSING:
            raise NoLocks(f"locks do not work there: {error.strerror}") from error
        raise


@contextmanager
def turn(path: Path, *, say: Callable[[str], None], patience: float = _PATIENCE) -> Iterator[None]:
    """Inside, no other process is inside for the same `path`, a lock file that is made if it is missing.

    Waits at most `patience` seconds, saying for what; then TrainerError. NoLocks as `take`.
    """
    descriptor = open_lock(path, create=True)
    start, told = time.monotonic(), False
    try:
        while True:
            try:
                take(descriptor)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
            if waited > patience:
                raise TrainerError(f"{path}: another process has held this lock for {patience:.0f} s; fuser names it")
            if waited > _SILENCE and not told:
                say(f"waiting for {path}, which another process holds; for at most {patience:.0f} s")
                told = True
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
