"""Tests of kills between making and marking a directory, and between the last two steps of removing one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_trainer.retention import remove_leftovers
from offload_trainer.storage.owned_dirs import MARK, NotOwned, ScratchDirectory, remove_dead, replacing
from offload_trainer.storage.scratch_dir import DriveLease, dead_runs


def test_an_empty_directory_blocks_no_start(tmp_path: Path) -> None:
    """A directory left so blocks no export to the same place, save of the same step, or lease on the same drive."""
    (tmp_path / ".export.tmp").mkdir()
    with replacing(tmp_path / "export", what="the export to") as new:
        new.mkdir()
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / ".step-00000002.tmp").mkdir(parents=True)
    (checkpoints / ".step-00000001.pruned").mkdir()
    remove_leftovers(checkpoints)
    assert not list(checkpoints.iterdir())
    dead = tmp_path / "drive/offload-trainer/run-0123abcd"
    dead.mkdir(parents=True)
    assert dead_runs(tmp_path / "drive") == [dead]
    with DriveLease(tmp_path / "drive") as lease:
        assert lease.removed == [dead]
        assert list(dead.parent.iterdir()) == [lease.path]


@pytest.mark.parametrize("moment", ["open_lock", "try_lock", "os.write", "os.fsync", "os.rename"])
def test_a_kill_while_a_directory_is_made(moment: str, tmp_path: Path) -> None:
    """Its name is free. What is left is removed, or stays under a name that blocks nothing if it is not marked yet."""
    root = tmp_path / "offload-trainer"
    code = f"""
import os, pathlib
from offload_trainer.storage import owned_dirs
def killed(*args, **words): os.kill(os.getpid(), 9)
{"" if "." in moment else "owned_dirs."}{moment} = killed
owned_dirs.ScratchDirectory(pathlib.Path({str(root)!r}) / "run-0123abcd", what="page files of")
"""
    root.mkdir()
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    (left,) = root.iterdir()
    assert left.name.startswith("run-0123abcd~")
    with DriveLease(tmp_path) as lease:
        assert lease.removed == ([left] if moment in ("os.fsync", "os.rename") else [])
    assert ScratchDirectory(root / "run-0123abcd", what="page files of").path.exists()


@pytest.mark.parametrize("what", ["a file beside it", "a word in the mark", "a link for a mark", "a link", "a file"])
def test_directories_that_may_be_a_users_stay(what: str, tmp_path: Path) -> None:
    place = tmp_path / ".export.tmp"
    if what == "a link":
        (tmp_path / "theirs").mkdir()
        place.symlink_to("theirs")
    elif what == "a file":
        place.touch()
    else:
        place.mkdir()
        (place / MARK).touch()
    if what == "a file beside it":
        (place / "notes").touch()
    elif what == "a word in the mark":
        (place / MARK).write_text("mine")
    elif what == "a link for a mark":
        (place / MARK).unlink()
        (place / MARK).symlink_to("/nowhere")
    with pytest.raises(NotOwned):
        remove_dead(place, what="the export to")
    assert os.path.lexists(place)
