"""Create what dead runs leave on a drive."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


@contextmanager
def dying_after(removals: int) -> Iterator[None]:
    """Interrupt the context, as a kill would, when it removes a file after so many."""
    unlink, numbers = os.unlink, count()

    def dying(*args: Any, **words: Any) -> None:
        if next(numbers) == removals:
            raise KeyboardInterrupt
        unlink(*args, **words)

    with patch.object(os, "unlink", dying), pytest.raises(KeyboardInterrupt):
        yield
