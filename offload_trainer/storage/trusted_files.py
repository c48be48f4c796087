"""Checks that a cache file was written by this user or root and that no other user can change it.

The cache (OFFLOAD_TRAINER_CACHE, data.cache) may be a directory where others can write. Their files must not become
training data, measured speeds or code that runs. The check uses the open descriptor, so that the file cannot be
exchanged between the check and the reading.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from offload_trainer.safe_files import open_file
from offload_trainer.storage.owned_dirs import is_ours, user

MODE = 0o644  # a umask of 002 would let the group change files that `open_owned` reads back


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
