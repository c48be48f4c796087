"""Files of the cache that are believed: those of this user or of root that nobody else may change.

The cache (OFFLOAD_TRAINER_CACHE, data.cache) may be a directory in which others write too. What they put there must not
become training data, a measured speed or code that runs. The descriptor is looked at, so that nothing can be exchanged
between the look and the reading.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from offload_trainer.safe_files import open_file
from offload_trainer.storage.owned_dirs import is_ours, user

MODE = 0o644  # of what is written for this: a umask of 002 would let the group change it


def open_owned(path: Path) -> int:
    """Open a file of the cache for reading. ValueError where others may have written it; else as `open_file`."""
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
