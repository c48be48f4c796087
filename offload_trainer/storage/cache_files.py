"""The cache directory for tokenized data, measured rates and kernels, and the check that its files are this user's.

The cache (OFFLOAD_TRAINER_CACHE, data.cache) may be a directory where others can write. Their files must not become
training data, measured speeds or code that runs. The check uses the open descriptor, so that the file cannot be
exchanged between the check and the reading.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.safe_files import open_file
from offload_trainer.storage.owned_dirs import is_ours, user

MODE = 0o644  # a umask of 002 would let the group change files that `open_owned` reads back


def cache_directory() -> Path:
    """Return ``$OFFLOAD_TRAINER_CACHE``, ``$XDG_CACHE_HOME/offload-trainer`` or ``~/.cache/offload-trainer``.

    Raises UserError if none of them can be determined.
    """
    named, base = os.environ.get("OFFLOAD_TRAINER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "offload-trainer"
    except RuntimeError as error:
        raise UserError(f"no cache directory: {error} Set HOME, or name one with OFFLOAD_TRAINER_CACHE") from error


def open_owned(path: Path) -> int:
    """Open a file of the cache for reading.

    Raises ValueError if another user owns it or others may change it; otherwise raises as `open_file`.
    """
    descriptor = open_file(path)
    about = os.fstat(descriptor)
    if about.st_uid != 0 and not is_ours(about.st_uid, path.parent):
        wrong = f"it belongs to {user(about.st_uid)}, and is not trusted"
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"others may change it (mode {stat.S_IMODE(about.st_mode):o}; chmod go-w), and it is not trusted"
    else:
        return descriptor
    os.close(descriptor)
    raise ValueError(wrong)
