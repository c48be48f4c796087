"""Tests of shared places (drives, run directories, caches): owner, mode, links, and locks on local and other drives."""

import errno
import fcntl
import json
import os
import pwd
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from dead_run_files import NOBODY, ROOT, dead_lease, died
from synthetic_checkpoints import save

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.engine import deepspeed as stock
from offload_trainer.machine import rate_cache
from offload_trainer.optim import kernel_cache
from offload_trainer.plan.machine import DriveFacts, MachineProfile
from offload_trainer.run import directory
from offload_trainer.run.checkpoint import reading
from offload_trainer.run.directory import Log, hold
from offload_trainer.storage import atomic_io, locks
from offload_trainer.storage.owned_dirs import ScratchDirectory, cache_directory, clear
from offload_trainer.storage.retention import bytes_that_go, complete_checkpoints, find_resume
from offload_trainer.storage.scratch_dir import dead_runs, is_alive, leased, root_of

# -- locks -------------------------------------------------------------------------------------------------------------

flock = fcntl.flock


def nfs(descriptor: int, operation: int) -> None:
    """Lock as NFS and CIFS do: byte-range locks need a writable descriptor for an exclusive lock."""
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    if (operation & fcntl.LOCK_EX and mode == os.O_RDONLY) or (operation & fcntl.LOCK_SH and mode == os.O_WRONLY):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, operation)


def refusing(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


FILESYSTEMS = {"local": flock, "nfs": nfs, "none": refusing(errno.ENOLCK)}


@pytest.fixture(params=FILESYSTEMS)
def filesystem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fcntl, "flock", FILESYSTEMS[request.param])
    return request.param


def test_missing_locks_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a silent lock daemon of NFS; Lustre without flock
        monkeypatch.setattr(fcntl, "flock", refusing(number))
        with locks.exclusive_lock(tmp_path / "turn", say=print) as (_, unlocked):
            assert unlocked


def test_drives(filesystem: str, tmp_path: Path) -> None:
    """Dead leases are removed and live ones stay where locks work; elsewhere all stay, which is reported."""
    works = filesystem != "none"
    root_of(tmp_path).mkdir()
    left = dead_lease(root_of(tmp_path))
    messages: list[str] = []
    assert dead_runs(tmp_path) == ([left] if works else [])
    with leased(tmp_path, say=messages.append) as one, leased(tmp_path, say=messages.append) as two:
        assert left.exists() != works
        assert one.exists()
        if works:
            assert is_alive(one)
        else:
            with pytest.raises(UserError, match=r"whether its run is alive cannot be known.*export its newest"):
                is_alive(one)
    assert not one.exists()  # its own process recognises it
    assert not two.exists()
    assert sum("locks do not work on" in line for line in messages) == (0 if works else 2)  # one for each lease


def test_checkpoints(filesystem: str, tmp_path: Path) -> None:
    works = filesystem != "none"
    messages: list[str] = []
    for step in (1, 2, 3, 3):  # a step that is saved twice replaces itself
        save(tmp_path, step, keep=2, say=messages.append)
    root = tmp_path / "checkpoints"
    assert not works or not list(root.glob(".*"))
    assert [path.name[-1] for path in complete_checkpoints(root)] == (["2", "3"] if works else ["1", "2", "3"])
    assert any("older checkpoints are not pruned: locks do not work there" in line for line in messages) != works
    oldest = complete_checkpoints(root)[0]
    with reading(oldest):
        save(tmp_path, 4, keep=1, say=messages.append)
        assert oldest.exists()
    save(tmp_path, 5, keep=1, say=messages.append)
    assert len(complete_checkpoints(root)) == (1 if works else 5)


def test_what_a_killed_save_leaves(filesystem: str, tmp_path: Path) -> None:
    """Without locks, a killed save's directory may belong to a live process, which is reported before training."""
    died(ScratchDirectory(tmp_path / ".step-00000004.tmp", what="the checkpoint being written,"))
    if filesystem != "none":
        clear(tmp_path / "step-00000004", what="the checkpoint being written,")
        assert list(tmp_path.iterdir()) == []
    else:
        with pytest.raises(TrainerError, match=r"is in the way of step-00000004 and stays.*If nobody needs it, remove"):
            clear(tmp_path / "step-00000004", what="the checkpoint being written,")


def test_run_directories(
    filesystem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory.time, "sleep", lambda _: None)
    output = tmp_path / "new" / "run"
    with ExitStack() as stack:
        assert hold(stack, output, Log(loud=True), create=False) == -1
        assert not output.exists()
    with ExitStack() as other, ExitStack() as stack:
        hold(other, output, Log(loud=True), create=True)
        if filesystem != "none":
            with pytest.raises(UserError, match="another run is using this directory"):
                hold(stack, output, Log(loud=True), create=False)
            assert capsys.readouterr().err == ""
        else:
            hold(stack, output, Log(loud=True), create=False)
            assert "A second run in this directory would not be noticed" in capsys.readouterr().err
    with ExitStack() as stack:
        assert hold(stack, output, Log(loud=True), create=False) >= 0


def test_waiting_for_a_lock_is_reported_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_SILENT", 1)
    messages: list[str] = []
    with locks.exclusive_lock(tmp_path / "turn", say=messages.append):
        second = locks.exclusive_lock(tmp_path / "turn", say=messages.append, patience=0)
        with pytest.raises(TrainerError, match="turn: another process has held this lock for 0 s"):
            second.__enter__()
        assert messages == []
    descriptor = locks.open_lock(tmp_path / "turn")
    locks.try_lock(descriptor)

    def hear(line: str) -> None:
        messages.append(line)
        os.close(descriptor)

    with locks.exclusive_lock(tmp_path / "turn", say=hear):
        assert "turn, which another process holds; for at most 60 s" in messages[0]


# -- owners and links on a drive ---------------------------------------------------------------------------------------


THINGS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link": lambda path: (THINGS["directory"](path.with_name("elsewhere")), path.symlink_to("elsewhere")),
    "file": Path.touch,
    "directory": lambda path: (path.mkdir(), dead_lease(path)),
}


@pytest.mark.parametrize(
    ("owner", "thing"),
    [*(("yours", thing) for thing in THINGS if thing != "directory")]
    + [pytest.param("another user", thing, marks=ROOT) for thing in THINGS],
)
def test_something_else_that_has_the_name_on_the_drive_is_left_alone(owner: str, thing: str, tmp_path: Path) -> None:
    root = tmp_path / "offload-trainer"
    THINGS[thing](root)
    if owner != "yours":
        os.chown(root, NOBODY, NOBODY, follow_symlinks=False)
    before = sorted(tmp_path.rglob("*"))
    what = "a directory" if thing == "directory" else "a link or a file"
    for ask in (dead_runs, lambda drive: leased(drive).__enter__()):
        with pytest.raises(UserError, match=rf"{root} is {what} of {owner}.*move it away, or name another directory"):
            ask(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_only_removed_directories_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root_of(tmp_path).mkdir()
    left = dead_lease(root_of(tmp_path))

    def refused(name: object, **words: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)

    messages: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refused)
        lease = leased(tmp_path, say=messages.append)
        lease.__enter__()
    assert messages == [f"note: {left}, which a dead run left, stays: Operation not permitted: state"]
    lease.__exit__(None, None, None)


# -- locks that are no locks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", ["pipe", "link", "directory"])
def test_a_run_directory_whose_lock_is_none(thing: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    THINGS[thing](tmp_path / "out/.lock")
    with ExitStack() as stack, pytest.raises(UserError, match=r"\.lock cannot be a run's lock: .*; move it away"):
        hold(stack, tmp_path / "out", Log(loud=False), create=False)


def test_a_place_on_a_drive_that_is_not_mounted(tmp_path: Path) -> None:
    """A link to an unmounted place is an error, and no new run starts over possible checkpoints."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "checkpoints").symlink_to(tmp_path / "mnt/checkpoints")
    for wish in ("auto", "never"):
        with pytest.raises(UserError, match=r"is a link to .*mnt/checkpoints, which does not exist: is its drive"):
            find_resume(wish, output=output)
    (tmp_path / "run").symlink_to(tmp_path / "mnt/run")
    with pytest.raises(UserError, match=r"run is a link to .*mnt/run, which does not exist"):
        find_resume("auto", output=tmp_path / "run")
    (tmp_path / "mnt/checkpoints").mkdir(parents=True)
    assert find_resume("auto", output=output) is None


@ROOT
def test_another_users_checkpoints_are_not_counted_as_free(tmp_path: Path) -> None:
    messages: list[str] = []
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9, say=messages.append)
    root = tmp_path / "checkpoints"
    whole = bytes_that_go(root)
    for path in (root / "step-00000001", *(root / "step-00000001").rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    assert 0 < bytes_that_go(root) < whole
    save(tmp_path, 4, keep=1, say=messages.append)
    assert [path.name for path in complete_checkpoints(root)] == ["step-00000001", "step-00000004"]
    assert any("step-00000001 is not pruned" in line for line in messages)


# -- power cuts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order of syncs and renames."""
    order: list[str] = []

    def note(name: str, told: Callable[..., str]) -> None:
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, **words: (order.append(told(*given)), call(*given, **words))[1])

    note("fsync", lambda descriptor: f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
    note("rename", lambda _, new: f"name {new}")
    note("replace", lambda _, new: f"name {new}")
    return order


def test_what_is_on_the_disk_first(synced: list[str], tmp_path: Path) -> None:
    """Metrics and new parents are, and a file that is replaced is whole at any moment."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    final = save(tmp_path, 1)
    assert synced.index(f"sync {tmp_path}/metrics.jsonl") < synced.index(f"name {final}")
    synced.clear()
    with ExitStack() as stack:
        hold(stack, tmp_path / "a/b/c", Log(loud=False), create=True)
        assert synced[:3] == [f"sync {tmp_path}", f"sync {tmp_path}/a", f"sync {tmp_path}/a/b"]
    atomic_io.write_text(tmp_path / "x", "old")
    synced.clear()
    atomic_io.write_text(tmp_path / "x", "new")
    assert [line.split()[0] for line in synced] == ["sync", "name", "sync"]
    assert synced[2] == f"sync {tmp_path}"
    # a link in place of the temporary file is not followed
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f".x.{os.getpid()}.tmp").symlink_to("precious")
    atomic_io.write_text(tmp_path / "x", "newest")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "x").read_text() == "newest"


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Path, int]]:
    """Return a function that builds a kernel in a cache of its own; it returns its path and inode, new if built."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')

    def built() -> tuple[Path, int]:
        library = kernel_cache.built(source, flags=("-shared", "-fPIC"))
        return library, library.stat().st_ino

    return built


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda library: os.truncate(library, 1000),
    "a flipped bit": lambda library: library.write_bytes(library.read_bytes().replace(b"\x7fELF", b"\x7fELG", 1)),
    "without its sum": lambda library: library.with_name("small.so.sha256").unlink(),
    "a link": lambda library: (library.rename(library.with_name("y")), library.symlink_to("y")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_kernel_is_built_again(damage: str, build: Callable[[], tuple[Path, int]]) -> None:
    """A truncated shared library would end the process with SIGBUS."""
    library, inode = build()
    whole = library.read_bytes()
    assert build() == (library, inode)
    DAMAGE[damage](library)
    assert build()[1] != inode
    assert library.read_bytes() == whole


def test_kernels_are_cached_where_only_this_user_writes(
    filesystem: str, build: Callable[[], tuple[Path, int]], synced: list[str], tmp_path: Path
) -> None:
    library, _ = build()
    assert library.is_relative_to(tmp_path / "cache/kernels")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (library.parent, library.parent.parent)] == [0o700, 0o700]
    assert f"name {library}" in synced  # after its bytes are on the disk
    assert synced[synced.index(f"name {library}") - 1].startswith(f"sync {library.parent}/.small.so.")
    os.chmod(library.parent, 0o777)
    build()
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@ROOT
def test_kernels_of_other_users_are_not_loaded(build: Callable[[], tuple[Path, int]], tmp_path: Path) -> None:
    (library, before), cache = build(), tmp_path / "cache"
    os.chown(library, NOBODY, NOBODY)
    again = build()
    assert again[1] != before
    for place in (library.parent, library.parent.parent, cache):
        os.chown(place, NOBODY, NOBODY)
        with pytest.raises(TrainerError, match=r"belongs to another user.*OFFLOAD_TRAINER_CACHE"):
            build()
        os.chown(place, 0, 0)
    cache.rename(tmp_path / "planted")
    cache.symlink_to("planted")
    with pytest.raises(TrainerError, match="is a link"):
        build()
    cache.unlink()
    (tmp_path / "planted").rename(cache)
    os.chmod(tmp_path, 0o777)
    with pytest.raises(TrainerError, match="anybody may change"):
        build()
    os.chmod(tmp_path, 0o1777)
    assert build() == again


@pytest.mark.slow
def test_rates_stored_concurrently_are_all_kept(
    filesystem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """Each thread opens the lock separately, as a process would."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "new" / "cache"))
    machine = MachineProfile(gpu=None, gpu_bytes=0, ram_bytes=1, cores=1, drives=(), output=DriveFacts("/", 1, "ext4"))
    rate_cache.keep_rates(machine)
    assert f"sync {tmp_path}/new" in synced
    assert synced[synced.index(f"name {rate_cache.cache_file()}") - 1].startswith("sync ")

    def work(name: str) -> None:
        for number in range(5):
            rate_cache.keep_free(replace(machine, gpu=f"{name}.{number}", gpu_bytes=100), more=1)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    threads = threads if filesystem != "none" else threads[:1]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [key for key in json.loads(rate_cache.cache_file().read_text()) if key.startswith("kept free of")]
    assert len(kept) == (20 if filesystem != "none" else 5)


def test_caches_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` and `bench` continue without the directory of torch's extensions."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file/extensions"))
    assert not stock.is_built("async_io")
    with pytest.raises(TrainerError, match=r"cpu_adam could not be built: Not a directory.*TORCH_EXTENSIONS_DIR"):
        stock._load(SimpleNamespace(name="cpu_adam"))
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(UserError, match=r"machine\.json: rates cannot be saved there.*OFFLOAD_TRAINER_CACHE"):
        rate_cache.refuse_unwritable()
    for name in ("OFFLOAD_TRAINER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(UserError, match=r"no cache directory.*Set HOME, or name one with OFFLOAD_TRAINER_CACHE"):
        cache_directory()


@pytest.mark.slow
def test_builds_of_extensions_take_turns(filesystem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait forever for a killed build's lock. Without locks its process may be alive, and it stays."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(stock, "_build_directory", lambda build: tmp_path / build)
    removed: list[Path] = []
    monkeypatch.setattr(stock, "remove_stale_lock", removed.append)
    for name in ("cpu_adam", "async_io"):
        assert stock._load(SimpleNamespace(name=name, load=lambda verbose: "op")) == "op"
    builds = ["cpu_adam", "async_io", "pin_memory"] if filesystem != "none" else []
    assert removed == [tmp_path / name for name in builds]
