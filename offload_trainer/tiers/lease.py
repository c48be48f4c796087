"""A run's private directory on a drive: locked while the run lives, removed when it ends or has died.

DIR/offload-trainer/
    .lock                 held for an instant, while leases are made or cleared
    <lease>/.lock         held as long as its run lives; the kernel lets go of it even after kill -9
    <lease>/...           the run's own
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_trainer.errors import TrainerError


class DriveLease:
    """Private directory for one run under `drive`. Two runs on one drive never touch each other."""

    def __init__(self, drive: Path) -> None:
        root = drive / "offload-trainer"
        try:
            root.mkdir(exist_ok=True)
            with _locked(root / ".lock"):
                self.removed = _remove_dead(root)
                self.path = Path(tempfile.mkdtemp(prefix="run-", dir=root))
                self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainerError(f"{drive}: cannot make a private directory there: {error}") from error

    def close(self) -> None:
        """Remove the directory and let go of it. Calling it again does nothing."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> DriveLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_dead(root: Path) -> list[Path]:
    """Remove directories whose run is gone: nobody holds their lock. Call with the root's lock held."""
    removed = []
    for folder in sorted(root.glob("run-*")):
        try:
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = -1  # its run died between the directory and the lock
        try:
            if descriptor >= 0:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    return removed
