"""Directories of the program outside a run."""

from __future__ import annotations

import os
from pathlib import Path

from offload_trainer.errors import UserError


def cache_directory() -> Path:
    """``$OFFLOAD_TRAINER_CACHE``, ``$XDG_CACHE_HOME/offload-trainer``, or ``~/.cache/offload-trainer``.

    UserError where none of them is known.
    """
    named, base = os.environ.get("OFFLOAD_TRAINER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "offload-trainer"
    except RuntimeError as error:
        raise UserError(f"no cache directory: {error} Set HOME, or name one with OFFLOAD_TRAINER_CACHE") from error
