"""MANIFEST.json: what a checkpoint consists of. A directory without one, or of which it does not hold, is none."""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import with_config

from offload_trainer.errors import UserError
from offload_trainer.safe_files import EXACT, LENIENT, Count, Crc32, FileName, Steps, as_kind, open_file, read_back

FORMAT = 2
MANIFEST = "MANIFEST.json"
_NEEDED = {"state.json", "engine.json", "run.json", "master.safetensors"}


@with_config(EXACT)
@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    bytes: Count
    crc32: Crc32


@with_config(LENIENT)
@dataclass(frozen=True)
class Manifest:
    """What a MANIFEST.json says; the versions in it are for people."""

    format: Count
    step: Steps
    identity: dict[str, Any]
    layout: dict[str, Any]
    files: dict[FileName, StoredFile]


def checked_manifest(checkpoint: Path, *, moments: bool, fix: str) -> Manifest:
    """The manifest, its files checked against it: existence, size and CRC-32, those of moments if they matter.

    Raises UserError with the file, the number that does not match, and `fix`.
    """
    told = read_back(checkpoint / MANIFEST, dict[str, Any], fix=fix)
    if told.get("format") != FORMAT and isinstance(told.get("format"), int):
        raise UserError(f"{checkpoint}: written in format {told['format']}, this version reads {FORMAT}")
    try:
        manifest = as_kind(told, Manifest)
        if unnamed := _NEEDED - manifest.files.keys():
            raise ValueError(f"{', '.join(sorted(unnamed))} is not named")
    except ValueError as error:
        raise UserError(f"{checkpoint} is damaged: {MANIFEST}: {error}. {fix}") from error
    for name, expected in manifest.files.items():
        if moments or not name.startswith("exp_avg"):
            wrong = _difference(checkpoint, name, expected)
            if wrong:
                raise UserError(f"{checkpoint} is damaged: {wrong}. {fix}")
    return manifest


def _difference(checkpoint: Path, name: str, expected: StoredFile) -> str | None:
    """How a file is not what the manifest says; None where it is."""
    path = checkpoint / name
    try:
        if not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"the manifest names {name}, which lies outside"
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            return f"{name} is not a file"
        if about.st_size != expected.bytes:
            return f"{name} has {about.st_size} bytes, the manifest says {expected.bytes}"
        found = crc32_of(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circle of links
        return f"{name} cannot be read: {getattr(error, 'strerror', error)}"
    return None if found == expected.crc32 else f"{name} has CRC-32 {found}, the manifest says {expected.crc32}"


def crc32_of(path: Path) -> int:
    """Of a whole file, which does not stay in the page cache: it would push out what is needed again."""
    crc = 0
    with open(open_file(path, links=True), "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc
