"""Tests of drive leases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_trainer.errors import TrainerError
from offload_trainer.storage.scratch_dir import DriveLease, hold, named_in, wait_for_ranks

_KEEP_AND_DIE = """
import os, sys
from pathlib import Path
from offload_trainer.storage import scratch_dir
folder, left = Path(sys.argv[1]), int(sys.argv[2])
leases = [scratch_dir.DriveLease(folder / name) for name in ("one", "two")]
write = scratch_dir.write_text
def written(path, text):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    write(path, text)
scratch_dir.write_text = written
scratch_dir.write_list(folder / "pages", [lease.path for lease in leases])
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("writes", range(5))
def test_a_list_cut_short_names_no_directory_that_another_run_removes(writes: int, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    listed = tmp_path / "pages"
    assert subprocess.run([sys.executable, "-c", _KEEP_AND_DIE, str(tmp_path), str(writes)]).returncode == -9
    with DriveLease(tmp_path / "one"), DriveLease(tmp_path / "two"):
        named = named_in(listed)
        assert [folder.is_dir() for folder in named] == [True] * len(named)
    assert len(named) == (2 if writes == 4 else 0)
    if not named:  # their run removes them when it starts again
        for name in ("one", "two"):
            with DriveLease(tmp_path / name, listed=listed) as mine:
                assert list(mine.path.parent.iterdir()) == [mine.path]


def test_a_directory_is_free_once_no_rank_holds_it(tmp_path: Path) -> None:
    with DriveLease(tmp_path) as lease:
        ranks = [hold(lease.path), hold(lease.path)]
        for rank in ranks:
            with pytest.raises(TrainerError, match=r"\.ranks: another process has held this lock"):
                wait_for_ranks(lease.path, say=print, patience=0)
            os.close(rank)
        wait_for_ranks(lease.path, say=print, patience=0)


def test_no_place_for_a_lease() -> None:
    with pytest.raises(TrainerError, match="cannot make a private directory"):
        DriveLease(Path("/proc"))
