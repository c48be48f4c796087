"""File locks that are safe in directories where other users write, and on network filesystems.

On NFS and CIFS an exclusive lock needs a writable descriptor (flock(2)). Filesystems without locks report ENOLCK,
ENOSYS or EOPNOTSUPP, raised here as `NoLocks`. It is then unknown which other processes are active, so the caller must
not delete anything.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from offload_trainer.common.errors import TrainerError
from offload_trainer.common.safe_files import open_regular

_AGAIN, _SILENT = 0.05, 20  # seconds between attempts, and attempts before a message


class NoLocks(TrainerError):
    """The filesystem does not support locks."""


def open_lock(path: Path, *, create: bool = False, directory: int | None = None) -> int:
    """Return a descriptor of a lock file, opened for writing too where this user may. Raises as `open_regular`."""
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        return open_regular(path, flags, directory=directory)
    except OSError as error:
        if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return open_regular(path, os.O_RDONLY | os.O_NOFOLLOW, directory=directory)


def try_lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file without waiting. Raises BlockingIOError if another process holds the lock, and NoLocks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise NoLocks(f"locks do not work there: {error.strerror}") from error
        raise


@contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Hold a shared lock on the existing file `path` in this context. Raises as `open_lock` and `try_lock` do."""
    with open(open_lock(path)) as file:
        try_lock(file.fileno(), shared=True)
        yield


@contextmanager
def exclusive_lock(
    path: Path, *, say: Callable[[str], None], patience: float = 60.0
) -> Iterator[tuple[int, NoLocks | None]]:
    """Hold an exclusive lock on the file `path`, created if missing.

    Yields its descriptor, and the reason if the filesystem does not support locks, so that it is not locked. Waits at
    most `patience` seconds, reporting the wait through `say`, and then raises TrainerError.
    """
    unlocked = None
    with open(open_lock(path, create=True)) as file:
        for attempt in count():
            try:
                try_lock(file.fileno())
            except NoLocks as error:
                unlocked = error
            except BlockingIOError:
                if attempt * _AGAIN >= patience:
                    raise TrainerError(
                        f"{path}: another process has held this lock for {patience:.0f} s; fuser names it"
                    ) from None
                if attempt == _SILENT:
                    say(f"waiting for {path}, which another process holds; for at most {patience:.0f} s")
                time.sleep(_AGAIN)
                continue
            break
        yield file.fileno(), unlocked
