"""Runs of the real command, each in a process of its own or in a fork that is as good: tests/forks.py."""

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

# An embedding larger than all else, and sizes that do not divide. One thread, since two tests run at a time.
TINY = [
    *("model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"),
    *("placement.threads=1", f"data.cache={tempfile.gettempdir()}/offload-trainer-tests"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="whole populations, where a part is tried otherwise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: one that begins last keeps a single worker busy at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What all those modules have made stays: no collection need walk it again."""
    gc.collect()
    gc.freeze()


# What this machine was timed at before must not decide what tests see.
os.environ["OFFLOAD_TRAINER_CACHE"] = f"{tempfile.gettempdir()}/offload-trainer-tests-cache"
# Nor which other files are run with a test's own.
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # several tests run at a time


@dataclass(frozen=True)
class Run:
    """A finished command."""

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
    """No launcher's variables leak in."""
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
    """A Python script with its words (`COMMAND`: ours), what it prints in files; in a fork unless it should be `own`.

    `stock`: it will import DeepSpeed, which a word may say too; where there is a GPU, not ahead of a fork. torchrun
    starts processes of its own.
    """
    words = list(map(str, argv))
    stock = stock or any(word.startswith(_STOCK) for word in words)
    if own or any(word.startswith(_RANKS) for word in words) or (stock and torch.cuda.is_available()):
        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            return subprocess.Popen([sys.executable, *words], stdout=out, stderr=err, env=environment(**extra))
    return forks(stock=stock).start(words, stdout=stdout, stderr=stderr, env=environment(**extra))


def run_script(*argv: object, own: bool = False, stock: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
    """The same, waited for, with `extra` in the environment; stdout and stderr apart."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        code = start(*argv, stdout=out, stderr=err, own=own, stock=stock, **extra).wait(500)
        return subprocess.CompletedProcess(list(argv), code, *(path.read_text(errors="replace") for path in (out, err)))


def call(*words: object, output: Path, check: bool = True) -> Run:
    """`offload-train WORDS --output OUTPUT`, waited for."""
    done = run_script(COMMAND, *words, "--output", output)
    run = Run(done.returncode, done.stdout + done.stderr, output)
    assert not check or run.code == 0, run.text[-4000:]
    return run


def ask(*words: object, own: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
    """`offload-train WORDS`, with `extra` in the environment; stdout and stderr apart."""
    return run_script(COMMAND, *words, own=own, **extra)


def call_and_kill(
    *words: object, output: Path, when: Callable[[list[str]], bool], number: int, hold: int | None = None
) -> Run:
    """The same, sent signal `number` as soon as `when(lines of metrics.jsonl)` holds.

    After step `hold` the run waits until that was done, however busy the machine is.
    """
    metrics = output / "metrics.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        told, go = Path(folder) / "told", Path(folder) / "go"
        argv = [COMMAND] if hold is None else [Path(__file__).with_name("allocation_trace.py"), hold, go]
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
    """Not one byte is left on its filesystem."""
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@pytest.fixture
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this test alone, for page files."""
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what the tests of a module make once."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings and norms of small models are moved as those of large ones are."""
    monkeypatch.setattr(layout, "SMALL", 0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all workers of pytest, for what only one of them should make: `in_turn`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Inside, no other worker makes `path`."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """Of this package, as an index has it; built once for all workers of pytest."""
    folder = shared / "wheel-and-source"
    with in_turn(folder):
        if not folder.exists():
            part = folder.with_name("wheel-being-built")
            wheel_in(part)
            part.rename(folder)
    (made,) = (folder / "wheel").glob("*.whl")
    return made


@pytest.fixture(autouse=True)
def own_products() -> Iterator[None]:
    """A run that replaces torch's 16-bit products does so for its whole process, where other tests follow."""
    yield
    products_of_torch()


def products_of_torch() -> None:
    if cpu_matmul._library is not None:
        cpu_matmul._library._destroy()
        cpu_matmul._library = None


KILL, INTERRUPT, TERMINATE = signal.SIGKILL, signal.SIGINT, signal.SIGTERM


LIMIT = 3 << 29  # bytes: 1.5 GiB


_boxes = count()


@pytest.fixture
def box() -> Iterator[Path]:
    """A memory cgroup with LIMIT; skipped where this user may not make one."""
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
    for _ in range(300):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"{folder} still has processes: {(folder / 'cgroup.procs').read_text().split()}")


def assert_same_run(run: Run, expected: Run) -> None:
    """Bit for bit: every step's loss, norm and rate, and the final masters and moments."""
    for key in ("step", "tokens", "loss", "grad_norm", "lr"):
        assert [step[key] for step in run.steps] == [step[key] for step in expected.steps], key
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        place = f"checkpoints/step-00000020/{kind}.safetensors"
        one, other = load_file(run.output / place), load_file(expected.output / place)
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), f"{kind} {name}"
