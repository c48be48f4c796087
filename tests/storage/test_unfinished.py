"""Tests of kills between making and marking a directory, and between the last two steps of removing one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from offload_trainer.retention import WORK, remove_leftovers
from offload_trainer.storage import owned_dirs
from offload_trainer.storage.locks import try_lock
from offload_trainer.storage.owned_dirs import MARK, NotOwned, is_unfinished, remove_dead, replacing
from offload_trainer.storage.scratch_dir import DriveLease, dead_runs


def leave(path: Path, how: str) -> Path:
    path.mkdir(parents=True)
    if how == "an empty mark":
        (path / MARK).touch()
    return path


@pytest.mark.parametrize("how", ["nothing", "an empty mark"])
def test_an_unfinished_directory_blocks_no_start(how: str, tmp_path: Path) -> None:
    """A directory left so blocks no export to the same place, save of the same step, or lease on the same drive."""
    leave(tmp_path / ".export.tmp", how)
    with replacing(tmp_path / "export", what="the export to") as new:
        new.mkdir()
    checkpoints = tmp_path / "checkpoints"
    leave(checkpoints / ".step-00000002.tmp", how)
    (checkpoints / ".step-00000001.pruned").mkdir()  # killed after removing its manifest
    remove_leftovers(checkpoints)
    assert not list(checkpoints.iterdir())
    dead = leave(tmp_path / "drive/offload-trainer/run-0123abcd", how)
    assert dead_runs(tmp_path / "drive") == [dead]
    with DriveLease(tmp_path / "drive") as lease:
        assert lease.removed == [dead]
        assert list(dead.parent.iterdir()) == [lease.path]


@pytest.mark.parametrize("what", ["a file beside it", "a word in the mark", "a link for a mark", "a link", "a file"])
def test_directories_that_may_be_a_users_stay(what: str, tmp_path: Path) -> None:
    place = tmp_path / ".export.tmp"
    if what == "a link":
        leave(tmp_path / "theirs", "nothing")
        place.symlink_to("theirs")
    elif what == "a file":
        place.touch()
    else:
        leave(place, "an empty mark")
    if what == "a file beside it":
        (place / "notes").touch()
    elif what == "a word in the mark":
        (place / MARK).write_text("mine")
    elif what == "a link for a mark":
        (place / MARK).unlink()
        (place / MARK).symlink_to("/nowhere")
    assert not is_unfinished(place)
    with pytest.raises(NotOwned):
        remove_dead(place, what="the export to")
    assert os.path.lexists(place)


def test_a_directory_that_is_being_created_stays(tmp_path: Path) -> None:
    place = leave(tmp_path / ".step-00000002.tmp", "an empty mark")
    with open(place / MARK) as maker:
        fcntl.flock(maker, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            remove_dead(place, what=WORK)
    assert place.exists()


@pytest.mark.parametrize("when", ["before its mark", "before its lock"])
def test_a_lease_that_is_taken_for_dead_while_it_is_made(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another start removes a lease while it is made, it is made again."""
    taken = []

    def meanwhile(place: Path) -> None:
        if not taken:
            taken.append(place)
            monkeypatch.setattr(owned_dirs, "try_lock", try_lock)
            assert owned_dirs.remove_unfinished(place)
            monkeypatch.setattr(owned_dirs, "try_lock", locked)

    def locked(descriptor: int, *, shared: bool = False) -> None:
        if when == "before its lock":
            meanwhile(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent)
        try_lock(descriptor, shared=shared)

    def opened(path: Path, *, create: bool = False) -> int:
        if create and when == "before its mark":
            meanwhile(path.parent)
        return open_lock(path, create=create)

    open_lock = owned_dirs.open_lock
    monkeypatch.setattr(owned_dirs, "try_lock", locked)
    monkeypatch.setattr(owned_dirs, "open_lock", opened)
    with DriveLease(tmp_path) as lease:
        assert len(taken) == 1
        assert lease.path != taken[0]
        assert sorted((tmp_path / "offload-trainer").iterdir()) == [lease.path]
    assert not list((tmp_path / "offload-trainer").iterdir())
