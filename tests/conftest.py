"""Fixtures, and the choice of tests: those of a quick run unless --all is given."""

import gc
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# Threads that wait give up their core: commands of two tests have more threads than two cores run, and each waited for
# the others' turns. A training command took 50 s so, and takes 14 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["COLUMNS"] = "100"  # the same width in every terminal
gc.disable()  # enabled again after test collection, a third of whose time garbage collection would take


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="whole populations, where a part is tried otherwise")
    parser.addoption("--all", action="store_true", help="tests that take minutes too, and every case of the matrices")
    text = "seed of random trials, and of the cases of matrices without --all"
    parser.addoption("--seed", type=int, default=0, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory of `counted_once` for all processes; those with tests import `commands` before anything else.

    pytest-xdist's first process has none; without torch it starts its workers 3 seconds sooner.
    """
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker:
        counts = TemporaryDirectory()
        config.add_cleanup(counts.cleanup)
        os.environ["TEST_RUN_COUNTS"] = counts.name
    if is_worker or not config.getoption("numprocesses", None):
        import commands  # noqa: F401


_NOT_QUICK = ("slow", "ops", "box", "network")  # markers of tests that only --all runs
_SAMPLED = ("engine", "export", "library", "model", "offload", "optim", "plan", "run")  # directories that train
# Each case is a mechanism.
_WHOLE = ("test_pairs.py", "test_schedules.py", "test_rank_bytes.py", "test_speculative_update.py")
_ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow", re.MULTILINE)


def _is_quick(config: pytest.Config) -> bool:
    """Return whether to leave out slow tests: neither --all, nor a marker, a test or a file is named."""
    return not (config.getoption("--all") or config.option.markexpr or any(".py" in word for word in config.args))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose tests are all slow: collecting takes a tenth of a quick run."""
    all_slow = collection_path.suffix == ".py" and _is_quick(config) and _ALL_SLOW.search(collection_path.read_text())
    return True if all_slow else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the slowest tests first, so that no worker idles at the end.

    In a quick run, leave out tests of `_NOT_QUICK`, and all but one case of each test that trains; --seed chooses it.
    """
    items.sort(key=_seconds, reverse=True)
    if not _is_quick(config):
        return
    by_test: dict[tuple[Path, str], list[pytest.Item]] = {}
    left_out = {item for item in items if any(map(item.get_closest_marker, _NOT_QUICK))}
    for item in items:
        if item not in left_out and item.path.parent.name in _SAMPLED and item.path.name not in _WHOLE:
            by_test.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for cases in by_test.values():
        drawn = sorted(cases, key=lambda item: zlib.crc32(f"{config.getoption('--seed')} {item.nodeid}".encode()))
        left_out.update(drawn[1:])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _seconds(item: pytest.Item) -> float:
    """Return the seconds in a test's marker: 1 for a slow one that names none, 0 for a quick one."""
    marker = item.get_closest_marker("slow")
    return float((*marker.args, 1)[0]) if marker else 0.0


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of tests that try random cases; `make test-all` uses another one each day."""
    return int(pytestconfig.getoption("--seed"))


def pytest_collection_finish() -> None:
    """Freeze the objects of all collected modules, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for page files that only this test uses."""
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for what the tests of one module create once."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload embeddings and norms of small models too, as those of large models are."""
    import offload_trainer.plan.tiered.layout as layout

    monkeypatch.setattr(layout, "SMALL", 0)


@pytest.fixture
def counted_once() -> Iterator[None]:
    """Take the counts of activations of tiny models that any process of this test run has made."""
    from counted_once import cached_counts

    with cached_counts():
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for all pytest-xdist workers, for files that only one should create (see `FileLock`)."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo what a test, or a command in this process, sets: kernel, 16-bit products, threads, dtype, environment."""
    import torch

    from offload_trainer.engine import cpu_matmul
    from offload_trainer.optim import kernels

    kernels._checked_native.cache_clear()
    before, threads = dict(os.environ), torch.get_num_threads()
    yield
    if cpu_matmul._library is not None:
        cpu_matmul._library._destroy()
        cpu_matmul._library = None
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    for name in {*os.environ} - {*before}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture
def box() -> Iterator[Path]:
    """Yield a memory cgroup limited to LIMIT; skip the test if this user may not create one."""
    from commands import LIMIT

    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"offload-trainer-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if v1.is_dir() else "memory.max"
    try:
        folder.mkdir()
        (folder / name).write_text(str(LIMIT))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    for _ in range(3000):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"{folder} still has processes: {(folder / 'cgroup.procs').read_text().split()}")
