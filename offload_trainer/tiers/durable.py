"""Files and directories that a crash leaves either as they were or as they are meant to be."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace `path` at once: readers see the old text or the new, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


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
