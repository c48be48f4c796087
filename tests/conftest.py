"""Fixtures, and functions that run the real command in a separate process or in an equivalent fork (tests/forks.py)."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from forks import COMMAND, Fork, Forks
from safetensors.torch import load_file
from wheels import wheel_in

import offload_trainer.plan.tiered.layout as layout
from offload_trainer.engine import cpu_matmul

# The model's embedding is larger than all else, and its sizes do not divide evenly. It uses one thread, since two tests
# run at the same time.
TINY = [
    *("model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"),
    *("placement.threads=1", f"data.cache={tempfile.gettempdir()}/offload-trainer-tests"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="whole populations, where a part is tried otherwise")
    parser.addoption("--all", action="store_true", help="tests marked slow too, and every case of the large matrices")
    text = "seed of random trials, and of the sample of the large matrices without --all"
    parser.addoption("--seed", type=int, default=0, help=text)


_SAMPLED = ("engine", "library", "model", "offload", "optim", "plan", "run")  # directories of tests that train
_SAMPLE, _LEAST = 3, 4  # one case in so many of each test that has more than so many


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the slowest tests first: one that starts last leaves all but one worker idle at the end.

    Without --all, leave out slow tests, and all but a sample of the cases of each large matrix. Nothing is left out if
    single tests or a marker are named.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("--all") or config.option.markexpr or any("::" in word for word in config.args):
        return
    by_test: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault((item.path, getattr(item, "originalname", None) or item.name), []).append(item)
    left_out = {item for item in items if item.get_closest_marker("slow")}
    for (path, _), cases in by_test.items():
        if len(cases) > _LEAST and path.parent.name in _SAMPLED:
            drawn = sorted(cases, key=lambda item: zlib.crc32(f"{config.getoption('--seed')} {item.nodeid}".encode()))
            left_out.update(drawn[-(-len(cases) // _SAMPLE) :])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of tests that try random cases; `make test-all` uses another one each day."""
    return int(pytestconfig.getoption("--seed"))


def pytest_collection_finish() -> None:
    """Freeze the objects of all collected modules, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()


# Earlier timings of this machine must not affect the tests.
os.environ["OFFLOAD_TRAINER_CACHE"] = f"{tempfile.gettempdir()}/offload-trainer-tests-cache"
# Tests must not contact the Hugging Face hub.
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # Several tests run at the same time.


@dataclass(frozen=True)
class Run:
    """The result of a finished command: exit code, combined output, and run directory."""

    code: int
    text: str
    output: Path

    @property
    def steps(self) -> list[dict]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


def environment(**extra: str) -> dict[str, str]:
    """Return the environment without a launcher's variables, plus `extra`."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    } | extra


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "offload_trainer", *map(str, words)]


_STOCK = ("deepspeed", "tiered.io=async_io")
_RANKS = ("--gpus", "placement.gpus")


@cache
def forks(*, stock: bool) -> Forks:
    return Forks(stock=stock)


def start(
    *argv: object, stdout: Path, stderr: Path, own: bool = False, stock: bool = False, **extra: str
) -> Fork | subprocess.Popen[bytes]:
    """Start a Python script (`COMMAND` for ours) with its output in files; in a fork unless `own` asks for a new
    process.

    `stock` says that the script imports DeepSpeed, as some of its words also imply. On a GPU such a script is never
    forked.
    torchrun always gets a new process, since it starts its ranks from there.
    """
    words = list(map(str, argv))
    stock = stock or any(word.startswith(_STOCK) for word in words)
    if own or any(word.startswith(_RANKS) for word in words) or (stock and torch.cuda.is_available()):
        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            return subprocess.Popen([sys.executable, *words], stdout=out, stderr=err, env=environment(**extra))
    return forks(stock=stock).start(words, stdout=stdout, stderr=stderr, env=environment(**extra))


def run_script(*argv: object, own: bool = False, stock: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a script as `start` does and wait for it, with `extra` in the environment; return stdout and stderr
    separately.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        code = start(*argv, stdout=out, stderr=err, own=own, stock=stock, **extra).wait(500)
        return subprocess.CompletedProcess(list(argv), code, *(path.read_text(errors="replace") for path in (out, err)))


def call(*words: object, output: Path, check: bool = True) -> Run:
    """Run `offload-train WORDS --output OUTPUT` and wait for it. With `check`, assert that it succeeds."""
    done = run_script(COMMAND, *words, "--output", output)
    run = Run(done.returncode, done.stdout + done.stderr, output)
    assert not check or run.code == 0, run.text[-4000:]
    return run


def ask(*words: object, own: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `offload-train WORDS` with `extra` in the environment; return stdout and stderr separately."""
    return run_script(COMMAND, *words, own=own, **extra)


def call_and_kill(
    *words: object, output: Path, when: Callable[[list[str]], bool], number: int, hold: int | None = None
) -> Run:
    """Run the command and send it signal `number` as soon as `when(lines of metrics.jsonl)` is true.

    With `hold`, the run pauses after step `hold` until the signal was sent, so that a busy machine changes nothing.
    """
    metrics = output / "metrics.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        told, go = Path(folder) / "told", Path(folder) / "go"
        argv = [COMMAND] if hold is None else [Path(__file__).with_name("paused_run.py"), hold, go]
        process = start(*argv, *words, "--output", output, stdout=told, stderr=told)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and when(metrics.read_text().splitlines()):
                process.send_signal(number)
                break
            time.sleep(0.005)
        go.touch()
        return Run(process.wait(300), told.read_text(errors="replace"), output)


def fill(directory: Path) -> None:
    """Fill the filesystem of `directory` to its last byte."""
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


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
    monkeypatch.setattr(layout, "SMALL", 0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for all pytest-xdist workers, for files that only one of them should create
    (see `in_turn`).
    """
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold a file lock, so that only one worker at a time creates `path`."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """Return the package's wheel; it is built once for all pytest workers."""
    folder = shared / "wheel-and-source"
    with in_turn(folder):
        if not folder.exists():
            part = folder.with_name("wheel-being-built")
            wheel_in(part)
            part.rename(folder)
    (made,) = (folder / "wheel").glob("*.whl")
    return made


_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo what a command that ran in this process set for it: torch's 16-bit products, and its place among ranks."""
    before = {name: os.environ[name] for name in _LAUNCHED if name in os.environ}
    yield
    products_of_torch()
    for name in _LAUNCHED:
        os.environ.pop(name, None)
    os.environ.update(before)


def products_of_torch() -> None:
    if cpu_matmul._library is not None:
        cpu_matmul._library._destroy()
        cpu_matmul._library = None


KILL, INTERRUPT, TERMINATE = signal.SIGKILL, signal.SIGINT, signal.SIGTERM


LIMIT = 3 << 29  # bytes (1.5 GiB)


_boxes = count()


@pytest.fixture
def box() -> Iterator[Path]:
    """Yield a memory cgroup limited to LIMIT; skip the test if this user may not create one."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"offload-trainer-test-{os.getpid()}-{next(_boxes)}"
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


def assert_same_run(run: Run, expected: Run) -> None:
    """Assert identical steps, tokens, losses, norms and rates, and identical final masters and moments, bit for bit."""
    for key in ("step", "tokens", "loss", "grad_norm", "lr"):
        assert [step[key] for step in run.steps] == [step[key] for step in expected.steps], key
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        place = f"checkpoints/step-00000020/{kind}.safetensors"
        one, other = load_file(run.output / place), load_file(expected.output / place)
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), f"{kind} {name}"
