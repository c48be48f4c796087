"""Tests of drive leases and scratch directories: kills while they are made, removed or listed, and full disks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dead_run_files import dying_after
from synthetic_checkpoints import save

from offload_trainer.errors import TrainerError
from offload_trainer.storage import retention
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.manifest import MANIFEST
from offload_trainer.storage.owned_dirs import ScratchDirectory, replacing
from offload_trainer.storage.retention import remove_leftovers
from offload_trainer.storage.scratch_dir import dead_runs, hold, leased, named_in, wait_for_ranks


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
    with leased(tmp_path / "drive") as lease:
        assert list(dead.parent.iterdir()) == [lease]


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
    with leased(tmp_path):
        assert left.exists() == (moment not in ("os.fsync", "os.rename"))
    assert ScratchDirectory(root / "run-0123abcd", what="page files of").path.exists()


@pytest.mark.parametrize("name", ["export", "my~export", "x~0123abcd"])
def test_an_interrupted_replacement_leaves_what_was_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between the two renames, such as a second signal's, loses no directory, whatever its name."""
    final = tmp_path / name
    for content in ("first", "second"):
        with replacing(final, what="the export to") as new:
            new.mkdir()
            (new / content).touch()
    rename = os.rename

    def interrupted(old: Path, new: Path) -> None:
        if Path(old).name == "new":
            raise KeyboardInterrupt
        rename(old, new)

    with pytest.raises(KeyboardInterrupt), replacing(final, what="the export to") as new:  # noqa: PT012 - as a run
        new.mkdir()
        monkeypatch.setattr(os, "rename", interrupted)
    assert list(tmp_path.iterdir()) == [final]
    assert list(final.iterdir()) == [final / "second"]


def test_a_killed_removal_of_a_checkpoint_is_completed(tmp_path: Path) -> None:
    """Its manifest, which lists its files, goes last. A file that a user has added keeps it."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    root = newest.parent
    with dying_after(2):
        retention.prune(root, keep=1)
    (hidden,) = root.glob(".*")
    assert retention.bytes_that_go(root) > bytes_below(newest)
    (hidden / "mine").touch()
    remove_leftovers(root)
    assert {"mine", MANIFEST} < {path.name for path in hidden.iterdir()}
    (hidden / "mine").unlink()
    remove_leftovers(root)
    assert list(root.iterdir()) == [newest]


_KEEP_AND_DIE = """
import os, sys
from pathlib import Path
from offload_trainer.storage import scratch_dir
folder, left = Path(sys.argv[1]), int(sys.argv[2])
leases = [scratch_dir.leased(folder / name) for name in ("one", "two")]
folders = [lease.__enter__() for lease in leases]
write = scratch_dir.write_text
def written(path, text):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    write(path, text)
scratch_dir.write_text = written
scratch_dir.write_list(folder / "pages", folders)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("writes", range(5))
def test_a_list_cut_short_names_no_directory_that_another_run_removes(writes: int, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    listed = tmp_path / "pages"
    assert subprocess.run([sys.executable, "-c", _KEEP_AND_DIE, str(tmp_path), str(writes)]).returncode == -9
    with leased(tmp_path / "one"), leased(tmp_path / "two"):
        named = named_in(listed)
        assert all(folder.is_dir() for folder in named)
    assert len(named) == (2 if writes == 4 else 0)
    if not named:  # their run removes them when it starts again
        for name in ("one", "two"):
            with leased(tmp_path / name, listed=listed) as mine:
                assert list(mine.parent.iterdir()) == [mine]


def test_a_directory_is_free_once_no_rank_holds_it(tmp_path: Path) -> None:
    with leased(tmp_path) as lease:
        ranks = [hold(lease), hold(lease)]
        for rank in ranks:
            with pytest.raises(TrainerError, match=r"\.ranks: another process has held this lock"):
                wait_for_ranks(lease, say=print, patience=0)
            os.close(rank)
        wait_for_ranks(lease, say=print, patience=0)


def test_no_place_for_a_lease() -> None:
    with pytest.raises(TrainerError, match="cannot make a private directory"):
        leased(Path("/proc")).__enter__()
