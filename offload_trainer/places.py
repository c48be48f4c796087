"""Directories of the program outside a run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$OFFLOAD_TRAINER_CACHE``, ``$XDG_CACHE_HOME/offload-trainer``, or ``~/.cache/offload-trainer``."""
    named = os.environ.get("OFFLOAD_TRAINER_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "offload-trainer"
