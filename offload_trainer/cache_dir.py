"""Location of the cache directory, which holds tokenized data and measured transfer rates across runs."""

from __future__ import annotations

import os
from pathlib import Path

from offload_trainer.errors import UserError


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
