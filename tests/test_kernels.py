"""A build that was killed must not make every later run wait forever."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from offload_trainer.engine.kernels import remove_stale_lock


def test_a_lock_that_nobody_builds_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    start = time.monotonic()
    remove_stale_lock(tmp_path, patience=0.5)
    assert not (tmp_path / "lock").exists()
    assert time.monotonic() - start >= 0.5


def test_a_living_build_keeps_its_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    script = "sleep 1.5; rm lock"
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path) as build:
        start = time.monotonic()
        remove_stale_lock(tmp_path, patience=0.3)
        assert time.monotonic() - start > 1.2  # it waited for the build, which removed the lock itself
        assert build.wait() == 0
