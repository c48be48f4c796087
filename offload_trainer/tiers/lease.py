"""A run's private directory on a drive: locked while the run lives, removed when it ends or has died.

DIR/offload-trainer/
    .lock                 held for an instant, while leases are made or cleared
    <lease>/.lock         held as long as its run lives; the kernel lets go of it even after kill -9
    <lease>/...           the run's own
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
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
                self.removed = [folder for folder in dead_runs(drive) if _remove(folder)]
                self.path = root / f"run-{secrets.token_hex(4)}"
                self.path.mkdir()
                self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # whoever looks at it holds it for an instant
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


def dead_runs(drive: Path) -> list[Path]:
    """Private directories under `drive` whose run is gone: the next lease there removes them."""
    return [folder for folder in sorted((drive / "offload-trainer").glob("run-*")) if not is_alive(folder)]


def is_alive(folder: Path) -> bool:
    """Whether the run that a private directory belongs to lives: it holds the lock."""
    try:
        with _held(folder, fcntl.LOCK_SH):
            return False
    except FileNotFoundError:
        return False  # its run died between the directory and the lock
    except OSError:
        return True  # or another user's, of which nothing can be said


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Inside, no other run removes this directory of a dead one. OSError where its run lives."""
    with _held(folder, fcntl.LOCK_SH):
        yield


def _remove(folder: Path) -> bool:
    """Remove a dead run's directory, unless it is being read. Call with the root's lock held."""
    try:
        with _held(folder, fcntl.LOCK_EX):
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    return True


@contextmanager
def _held(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
