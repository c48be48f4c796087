"""Tests that the lock of a killed build does not make later runs wait forever."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from offload_trainer.engine import op_builder
from offload_trainer.engine.op_builder import remove_stale_lock

pytestmark = pytest.mark.slow


def test_a_lock_without_a_running_build_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is removed after the patience has passed, and not before."""
    now, looks = iter(range(100)), []
    monkeypatch.setattr(op_builder, "_someone_works_in", lambda place: looks.append(place))
    monkeypatch.setattr(op_builder, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    (tmp_path / "lock").touch()
    remove_stale_lock(tmp_path, patience=20)
    assert not (tmp_path / "lock").exists()
    assert len(looks) == 21


def test_the_locks_of_all_builds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading async_io also builds pin_memory, and would wait forever for its lock."""
    monkeypatch.setattr(op_builder, "_build_directory", lambda build: tmp_path / build)
    removed: list[Path] = []
    monkeypatch.setattr(op_builder, "remove_stale_lock", removed.append)
    for name in ("cpu_adam", "async_io"):
        op_builder._load(SimpleNamespace(name=name, load=lambda verbose: None))
    assert removed == [tmp_path / name for name in ("cpu_adam", "async_io", "pin_memory")]


def test_a_running_build_keeps_its_lock(tmp_path: Path) -> None:
    """The running build removes its lock itself, which would fail if the lock were gone."""
    (tmp_path / "lock").touch()
    script = "sleep 1.5; rm lock"
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path) as build:
        remove_stale_lock(tmp_path, patience=0.3)
        assert build.wait() == 0
