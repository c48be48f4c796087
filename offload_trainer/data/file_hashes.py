"""Hashes of text files, remembered from one run to the next and recomputed when a file may have changed.

A file is read again unless its size, modification times, inode and device equal the remembered ones and it had not
changed for two seconds when it was hashed: a second change within one clock tick would leave the same times. The
inode's ctime is compared too, since no program can set it back.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.safe_files import file_bytes, open_given, parsed
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.trusted_files import MODE, open_owned
from offload_trainer.units import format_bytes

_SETTLED_NS = 2 * 10**9
_LONG = 10**9  # bytes whose reading takes seconds
_BLOCK = 1 << 24


def new_sum() -> Any:
    """Return an empty hash object; call its `update` with bytes, then `hexdigest`."""
    return hashlib.blake2b(digest_size=16)


def source_sums(sources: Sequence[Path], *, memory: Path, say: Callable[[str], None]) -> list[str]:
    """Return the hash of each file. `memory` is the file that caches hashes between runs; losing it costs only time.

    Raises UserError for a file that cannot be read.
    """
    known = _remembered(memory)
    about = {str(source.resolve()): _state(source) for source in sources}
    fresh = {path: state for path, state in about.items() if not _is_known(known.get(path), state)}
    total = sum(state["size"] for state in fresh.values())
    if total >= _LONG:
        say(f"reading {format_bytes(total)} of text to check whether it was tokenised before")
    for path in fresh:
        at = time.time_ns()
        about[path] |= {"sum": _sum(Path(path)), "at": at}
    about |= {path: known[path] for path in about.keys() - fresh.keys()}
    if fresh:
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_text(memory, json.dumps(about), mode=MODE)
        except OSError:
            pass  # without the cache the hashes are computed again next time
    return [about[str(source.resolve())]["sum"] for source in sources]


def _is_known(then: Any, now: dict[str, int]) -> bool:
    """Return whether a remembered hash still belongs to this file."""
    if not isinstance(then, dict) or not isinstance(then.get("sum"), str) or not isinstance(then.get("at"), int):
        return False
    alike = all(then.get(key) == value for key, value in now.items())
    return alike and then["at"] - max(now["mtime_ns"], now["ctime_ns"]) > _SETTLED_NS


def _state(source: Path) -> dict[str, Any]:
    found = source.stat()
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }


def _sum(path: Path) -> str:
    found = new_sum()
    try:
        with open_given(path) as file:
            while block := file.read(_BLOCK):
                found.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return str(found.hexdigest())


def _remembered(memory: Path) -> dict[str, Any]:
    """Return the remembered hashes, or nothing if they cannot be read."""
    try:
        return parsed(file_bytes(memory, opener=open_owned), dict[str, Any])
    except (FileNotFoundError, ValueError):
        return {}
