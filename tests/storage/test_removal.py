"""Tests of deletion: only what this program has made and marked is deleted, and no kill leaves what blocks a start."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from dead_run_files import NOBODY, ROOT, WHAT, dead_lease, died
from synthetic_checkpoints import save

from offload_trainer.common.errors import TrainerError
from offload_trainer.storage import owned_dirs, retention
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.manifest import MANIFEST
from offload_trainer.storage.owned_dirs import MARK, NotOwned, ScratchDirectory, clear, remove_dead, replacing
from offload_trainer.storage.retention import remove_leftovers
from offload_trainer.storage.scratch_dir import dead_runs, leased, named_in

HOUSE = Path(__file__).resolve().parents[2]

# -- the code --------------------------------------------------------------------------------------------------------

RECURSIVE = {"rmtree", "removedirs", "rmdir", "move", "renames", "TemporaryDirectory"}
SINGLE = {"unlink", "rename", "replace", "remove", "truncate", "ftruncate"}
SINGLE_FILES = {  # the calls of each module, and what they concern
    "data/tokenfile.py": {"unlink", "replace"},  # our temporary, a sidecar of other content; a finished token file
    "engine/deepspeed.py": {"unlink"},  # torch's build lock when no build runs
    "run/export.py": {"unlink"},  # the buffers' file in our workplace
    "hf.py": {"unlink", "replace"},  # weights of an earlier save, and of this one, where the Trainer saves
    "storage/retention.py": {"rename"},  # a checkpoint of ours is moved into a scratch directory, which is removed
    "run/checks.py": {"unlink"},  # the token by which nodes see that they share the run directory
    "run/directory.py": {"ftruncate"},  # the lock file that this run holds
    "storage/atomic_io.py": {"unlink", "replace"},  # our temporary, with our process's number; its new name
    "storage/host_memory.py": {"ftruncate"},  # memory without a name gets its size
    "storage/tensorfile.py": {"ftruncate"},  # a file just made gets its size; ranks write in it
    "run/loop.py": {"unlink"},  # the file `save`, which asks for a checkpoint by being there
}
# These remove directories made with mkdtemp or TemporaryDirectory; tests use tmp_path.
ELSEWHERE = {"damage.py", "kill_and_resume.py"}


def removals(path: Path) -> set[str]:
    """Return the names of a module's calls that remove, rename or truncate files."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, on = node.func.attr, getattr(node.func.value, "id", "")
            of_a_path = name == "replace" and len(node.args) == 1 and not node.keywords  # str.replace has two arguments
            if name not in ("replace", "remove", "move") or on in ("os", "shutil") or of_a_path:
                found.add(name)
    return found & (RECURSIVE | SINGLE)


def test_every_removal_is_known() -> None:
    package = HOUSE / "offload_trainer"
    found = {path.relative_to(package).as_posix(): removals(path) for path in package.rglob("*.py")}
    assert found.pop("storage/owned_dirs.py") & RECURSIVE == {"rmdir"}
    assert {name: calls for name, calls in found.items() if calls} == SINGLE_FILES
    for path in sorted(path for room in ("scripts", "benchmarks", "soak") for path in (HOUSE / room).glob("*.py")):
        assert path.name in ELSEWHERE or not removals(path) & RECURSIVE, f"{path.name} removes directories"
    for path in [*(HOUSE / "scripts").glob("*.sh"), *(HOUSE / "offload_trainer").rglob("*.sh")]:
        assert "rm -r" not in path.read_text(), path


# -- what a start removes on a drive -----------------------------------------------------------------------------------


def marked(place: Path, *, content: bytes = b"", link: str = "", beside: bool = False) -> None:
    place.mkdir()
    if link:
        (place / MARK).symlink_to(link)
    else:
        (place / MARK).write_bytes(content)
    if beside:
        (place / "notes").touch()


def dead(place: Path, *, what: str = WHAT, name: str = "", locks: bool = True) -> Path:
    """Make what a dead process left at `place`, perhaps made under another name, or where there were no locks."""
    left = died(ScratchDirectory(place.with_name(name or place.name), what=what)).rename(place)
    if not locks:
        (place / MARK).write_bytes(owned_dirs._content(f"{what} (no locks here)", place.name))
    return left


def anothers(place: Path, *, whole: bool = True) -> None:
    for path in (dead(place), *place.iterdir()) if whole else (dead(place) / MARK,):
        os.chown(path, NOBODY, NOBODY)


STAYS: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "a file beside an empty mark, as in a run directory": partial(marked, beside=True),
    "a word in the mark": partial(marked, content=b"mine"),
    "a dangling link as mark": partial(marked, link="/nowhere"),
    "a dead lease's mark as mark": lambda place: marked(place, link=str(dead_lease(place.parent.parent) / MARK)),
    "a link to a dead lease": lambda place: place.symlink_to(dead_lease(place.parent.parent)),
    "a lease that was renamed": partial(dead, name="run-00000001"),
    "a workplace for something else": partial(dead, what="the export to"),
    "a lease made where there were no locks": partial(dead, locks=False),
    "another user's": anothers,
    "another user's mark": partial(anothers, whole=False),
}


@pytest.mark.parametrize("case", STAYS)
def test_directories_that_no_lease_created_stay(case: str, tmp_path: Path) -> None:
    """The plan does not count them as free, a lease leaves them, and they cannot be removed as a dead one's."""
    if case.startswith("another") and os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    place = tmp_path / "offload-trainer/run-0123abcd"
    place.parent.mkdir()
    STAYS[case](place)
    before = sorted(tmp_path.rglob("*"))
    assert dead_runs(tmp_path) == []
    messages: list[str] = []
    with leased(tmp_path, say=messages.append):
        assert os.path.lexists(place)
    assert messages == []
    with pytest.raises(NotOwned):
        remove_dead(place, what=WHAT)
    assert sorted(tmp_path.rglob("*")) == before


# -- the one function --------------------------------------------------------------------------------------------------


def test_no_link_is_followed_and_nothing_outside_or_in_use_is_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "work").write_text("precious")
    with ScratchDirectory(tmp_path / "place", what="a test in") as place:
        (place.path / "link").symlink_to(outside)
        (place.path / "below").mkdir()
        (place.path / "below/link").symlink_to(outside / "work")
        (place.path / "below/dangling").symlink_to(tmp_path / "nowhere")
        with pytest.raises(BlockingIOError):
            remove_dead(place.path, what="a test in")
    with pytest.raises(FileNotFoundError):
        remove_dead(place.path, what="a test in")
    assert (outside / "work").read_text() == "precious"


@ROOT
def test_a_filesystem_that_is_mounted_within_stays(tmp_path: Path) -> None:
    messages: list[str] = []
    place = ScratchDirectory(tmp_path / "place", what="a test in", say=messages.append)
    (place.path / "mounted").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place.path / "mounted")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (place.path / "mounted/work").write_text("precious")
        place.close()
        assert (place.path / "mounted/work").read_text() == "precious"
        assert "another filesystem is mounted there" in messages[0]
    finally:
        subprocess.run(["umount", "-l", place.path / "mounted"], check=True)
    remove_dead(place.path, what="a test in")
    assert not place.path.exists()


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


@pytest.mark.parametrize("removals", range(5))
def test_an_interrupted_removal_is_repeated(removals: int, tmp_path: Path) -> None:
    """A removal that was killed is completed later, since the mark is removed last."""
    place = ScratchDirectory(tmp_path / "place", what="a test in")
    for name in "abcd":
        (place.path / name).write_text(name)
    with dying_after(removals):
        place.close()
    remove_dead(place.path, what="a test in")
    assert not place.path.exists()


def test_an_exchange_that_was_killed_is_undone(tmp_path: Path) -> None:
    """A directory that a killed exchange left in the workplace, where it is alone for an instant, is restored."""
    final = tmp_path / "hf"
    place = ScratchDirectory(owned_dirs.workplace_of(final), what="the export to")
    (place.path / owned_dirs._REPLACED).mkdir()
    (place.path / owned_dirs._REPLACED / "weights").write_text("whole")
    died(place)
    with pytest.raises(ZeroDivisionError), replacing(final, what="the export to"):
        1 / 0  # noqa: B018
    assert (final / "weights").read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [final]


def test_an_export_keeps_a_users_directory(tmp_path: Path) -> None:
    mine = tmp_path / ".hf.tmp"
    mine.mkdir()
    (mine / "work").write_text("precious")
    with pytest.raises(TrainerError, match=r"\.hf\.tmp is in the way of hf and stays.*this program did not make it"):
        clear(tmp_path / "hf", what="the export to")
    with (
        ScratchDirectory(tmp_path / ".x.tmp", what="the export to"),
        pytest.raises(TrainerError, match="another process is writing x there"),
    ):
        clear(tmp_path / "x", what="the export to")
    assert (mine / "work").read_text() == "precious"


# -- kills while directories are made, removed or listed ---------------------------------------------------------------


def test_an_empty_directory_blocks_no_start(tmp_path: Path) -> None:
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
def test_an_interrupted_replacement_loses_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_killed_removal_of_a_checkpoint_is_completed_and_nothing_else_removed(tmp_path: Path) -> None:
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
    (root / ".step-00000007.pruned").mkdir()
    (root / ".step-00000007.pruned/work").write_text("precious")
    remove_leftovers(root)
    assert sorted(root.iterdir()) == [root / ".step-00000007.pruned", newest]
    (root / ".step-00000008.tmp").symlink_to(tmp_path)
    with pytest.raises(TrainerError, match=r"\.step-00000008\.tmp is in the way of step-00000008 and stays: it is a"):
        remove_leftovers(root)


_KEEP_AND_DIE = """
import os, sys
from pathlib import Path
from offload_trainer.storage import scratch_dir
folder, writes = Path(sys.argv[1]), iter(range(int(sys.argv[2])))
leases = [scratch_dir.leased(folder / name) for name in ("one", "two")]
folders = [lease.__enter__() for lease in leases]
write = scratch_dir.write_text
scratch_dir.write_text = lambda *given: os.kill(os.getpid(), 9) if next(writes, None) is None else write(*given)
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


def test_no_place_for_a_lease() -> None:
    with pytest.raises(TrainerError, match="cannot make a private directory"):
        leased(Path("/proc")).__enter__()
