"""Tests of deletion: one function deletes, and only what this program has made and marked.

`test_every_removal_is_known` walks the code. A table here lists every removal, rename and replacement of a file.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from dead_run_files import NOBODY, ROOT, WHAT, dead_lease, died

from offload_trainer.errors import TrainerError
from offload_trainer.storage import owned_dirs
from offload_trainer.storage.owned_dirs import (
    MARK,
    NotOwned,
    ScratchDirectory,
    clear,
    remove_dead,
    replacing,
)
from offload_trainer.storage.scratch_dir import DriveLease, dead_runs

HOUSE = Path(__file__).resolve().parents[2]

# -- the code --------------------------------------------------------------------------------------------------------

RECURSIVE = {"rmtree", "removedirs", "rmdir", "move", "renames", "TemporaryDirectory"}
SINGLE = {"unlink", "rename", "replace", "remove", "truncate", "ftruncate"}
THE_ONE = "offload_trainer/storage/owned_dirs.py"
SINGLE_FILES = {
    ("offload_trainer/data/tokenfile.py", "unlink"): "our temporary, and a sidecar of other content beside new ids",
    ("offload_trainer/data/tokenfile.py", "replace"): "a finished token file takes its name",
    ("offload_trainer/hf.py", "unlink"): "weights of an earlier save into the directory that the Trainer names",
    ("offload_trainer/hf.py", "replace"): "weights of a save that the Trainer asked for take their names",
    ("offload_trainer/engine/op_builder.py", "unlink"): "torch's build lock, behind which nobody works",
    ("offload_trainer/export/directory.py", "unlink"): "the buffers' file in our workplace",
    (
        "offload_trainer/run/checks.py",
        "unlink",
    ): "the token by which nodes see that they share the run directory",
    (
        "offload_trainer/retention.py",
        "rename",
    ): "a checkpoint of ours is moved into a scratch directory, which is removed",
    ("offload_trainer/run/directory.py", "ftruncate"): "the lock file that this run holds",
    ("offload_trainer/storage/host_memory.py", "ftruncate"): "memory without a name gets its size",
    (
        "offload_trainer/storage/tensorfile.py",
        "ftruncate",
    ): "a file just made gets its size; ranks write in it",
    ("offload_trainer/storage/atomic_io.py", "unlink"): "our temporary, by a name with our process's number",
    ("offload_trainer/storage/atomic_io.py", "replace"): "the one atomic replacement of a file",
    ("offload_trainer/storage/atomic_io.py", "rename"): "what is finished takes its name",
    ("offload_trainer/trainer.py", "unlink"): "the file `save`, which asks for a checkpoint by being there",
}
# These remove directories made with mkdtemp or TemporaryDirectory; tests use tmp_path.
ELSEWHERE = {
    "build_release.py",
    "damage.py",
    "kill_and_resume.py",
}


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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from shutil import rmtree", "rmtree"),
        ("import shutil\nshutil.rmtree('x')", "rmtree"),
        ("import shutil\nshutil.move('x', 'y')", "move"),
        ("import os\nos.remove('x')", "remove"),
        ("'a'.replace('b', 'c'); [1].remove(1); file.move(1)", None),
    ],
)
def test_the_search_finds_removals(text: str, name: str | None, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert removals(tmp_path / "x.py") == ({name} if name else set())


def test_every_removal_is_known() -> None:
    """Recursive removals use `removal`, and single files that are unlinked, renamed or replaced are in the table."""
    seen = set()
    for path in sorted((HOUSE / "offload_trainer").rglob("*.py")):
        name = path.relative_to(HOUSE).as_posix()
        for call in removals(path) if name != THE_ONE else ():
            assert call not in RECURSIVE, f"{name}: {call}: directories are removed by {THE_ONE}"
            assert (name, call) in SINGLE_FILES, f"{name}: {call}: why? Name it in the table, or use durable.write_text"
            seen.add((name, call))
    assert seen == set(SINGLE_FILES), "the table names what is not there"
    assert removals(HOUSE / THE_ONE) & RECURSIVE == {"rmdir"}
    for path in sorted(path for room in ("scripts", "benchmarks", "soak") for path in (HOUSE / room).glob("*.py")):
        assert path.name in ELSEWHERE or not removals(path) & RECURSIVE, f"{path.name} removes directories"
    for path in [*(HOUSE / "scripts").glob("*.sh"), *(HOUSE / "offload_trainer").rglob("*.sh")]:
        assert "rm -r" not in path.read_text(), path


# -- what a start removes on a drive -----------------------------------------------------------------------------------


def run_directory(root: Path, name: str) -> Path:
    """Make a user's finished run directory, with an empty .lock that no process holds."""
    run = root / name
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    (run / "checkpoints/step-00000002/MANIFEST.json").write_text("{}")
    (run / ".lock").touch()
    return run


def an_export(root: Path) -> Path:
    (root / "run-0badcafe").mkdir()
    (root / "run-0badcafe/model.safetensors").write_text("weights")
    return root / "run-0badcafe"


def renamed(root: Path) -> Path:
    return dead_lease(root).rename(root / "run-00000001")


def other_mark(root: Path) -> Path:
    return died(ScratchDirectory(root / "run-0000dead", what="the export to"))


def linked(root: Path) -> Path:
    elsewhere = dead_lease(root.parent)
    (root / "run-0000dead").symlink_to(elsewhere)
    return elsewhere


def linked_mark(root: Path) -> Path:
    run = run_directory(root, "run-0000dead")
    elsewhere = dead_lease(root.parent)
    (run / MARK).unlink()
    (run / MARK).symlink_to(elsewhere / MARK)
    return run


def without_locks(root: Path) -> Path:
    lease = dead_lease(root)
    (lease / MARK).write_bytes(owned_dirs._content(f"{WHAT} (no locks here)", lease.name))
    return lease


def anothers(root: Path) -> Path:
    lease = dead_lease(root)
    for path in (lease, *lease.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    return lease


def anothers_mark(root: Path) -> Path:
    lease = dead_lease(root)
    os.chown(lease / MARK, NOBODY, NOBODY)
    return lease


STAYS: dict[str, Callable[[Path], Path]] = {
    "a run directory with a lease's name": lambda root: run_directory(root, "run-0123abcd"),
    "an export": an_export,
    "a lease that was renamed": renamed,
    "a workplace for something else": other_mark,
    "a link to a dead lease": linked,
    "a link as mark": linked_mark,
    "a lease made where there were no locks": without_locks,
    "another user's": anothers,
    "another user's mark": anothers_mark,
}


@pytest.mark.parametrize("case", STAYS)
def test_directories_that_no_lease_created_stay(case: str, tmp_path: Path) -> None:
    """A directory that a lease did not make stays, and the plan does not count it as free."""
    if case.startswith("another") and os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    root = tmp_path / "offload-trainer"
    root.mkdir()
    kept = STAYS[case](root)
    before = sorted(path for path in kept.rglob("*"))
    assert before
    assert dead_runs(tmp_path) == []
    messages: list[str] = []
    with DriveLease(tmp_path, say=messages.append) as lease:
        assert lease.removed == []
    assert sorted(path for path in kept.rglob("*")) == before
    assert messages == []


# -- the one function --------------------------------------------------------------------------------------------------


def test_no_link_is_followed_and_nothing_outside_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "work").write_text("precious")
    with ScratchDirectory(tmp_path / "place", what="a test in") as place:
        (place.path / "link").symlink_to(outside)
        (place.path / "below").mkdir()
        (place.path / "below/link").symlink_to(outside / "work")
        (place.path / "below/dangling").symlink_to(tmp_path / "nowhere")
    assert not place.path.exists()
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


def test_an_interrupted_removal_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that was killed is completed later, since the mark is removed last."""
    unlink, left = os.unlink, 0

    def dying(*args: object, **words: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        unlink(*args, **words)  # type: ignore[arg-type]

    for left_alone in range(6):
        place = ScratchDirectory(tmp_path / "place", what="a test in")
        for name in "abcd":
            (place.path / name).write_text(name)
        monkeypatch.setattr(os, "unlink", dying)
        left = left_alone
        if left_alone < 5:
            with pytest.raises(KeyboardInterrupt):
                place.close()
            monkeypatch.setattr(os, "unlink", unlink)
            remove_dead(place.path, what="a test in")
        else:
            place.close()
        assert not place.path.exists()


def test_directories_in_use_are_not_removed(tmp_path: Path) -> None:
    with ScratchDirectory(tmp_path / "place", what="a test in") as place, pytest.raises(BlockingIOError):
        remove_dead(place.path, what="a test in")
    with pytest.raises(FileNotFoundError):
        remove_dead(tmp_path / "place", what="a test in")
    (tmp_path / "work").touch()
    with pytest.raises(NotOwned):
        remove_dead(tmp_path, what="a test in")


def test_an_exchange_that_was_killed_is_undone(tmp_path: Path) -> None:
    """A directory that a killed exchange left in the workplace, where it is alone for an instant, is restored."""
    final = tmp_path / "hf"
    place = ScratchDirectory(owned_dirs.workplace_of(final), what="the export to")
    (place.path / owned_dirs.REPLACED).mkdir()
    (place.path / owned_dirs.REPLACED / "weights").write_text("whole")
    died(place)
    with pytest.raises(ZeroDivisionError), replacing(final, what="the export to"):
        1 / 0  # noqa: B018
    assert (final / "weights").read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [final]


def test_an_export_keeps_a_users_directory(tmp_path: Path) -> None:
    """An export keeps a user's `.NAME.tmp` and reports it."""
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
