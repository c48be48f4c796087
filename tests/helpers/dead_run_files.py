"""Create what dead runs leave on a drive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload_trainer.storage.owned_dirs import ScratchDirectory

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
NOBODY = 65534
WHAT = "page files of"


def died(place: ScratchDirectory) -> Path:
    """Turn a scratch directory into one whose process was killed; return its path."""
    (place.path / "state").write_text("page files")
    place.leave()
    return place.path


def dead_lease(root: Path) -> Path:
    return died(ScratchDirectory(root / "run-0000dead", what=WHAT))
