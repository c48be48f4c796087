"""Run commands and scripts, mostly in forks of a process that has imported the libraries, and read what they leave.

Importing is most of a small run's time. Unlike a new process, a fork has libraries that have already read their
environment, the hash salt of all forks, and `cached_counts`. Tests to which that matters start a new process.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from safetensors.torch import load_file

HELPERS = Path(__file__).resolve().parent
FAULTY = HELPERS / "run_with_fault.py"
COMMAND = str(HELPERS.parents[1] / "offload_trainer" / "__main__.py")
# The model's embedding is larger than all else, and its sizes do not divide evenly. It uses one thread, since two tests
# run at the same time.
TINY = [
    *("model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"),
    *("placement.threads=1", f"data.cache={tempfile.gettempdir()}/offload-trainer-tests"),
]
os.environ["OFFLOAD_TRAINER_CACHE"] = f"{tempfile.gettempdir()}/offload-trainer-tests-cache"  # no earlier timings
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # Several tests run at the same time.
KILL = signal.SIGKILL
LIMIT = 3 << 29  # bytes (1.5 GiB)
_OURS = [f"offload_trainer.{name}" for name in ("engine.tiered", "run.export", "run.loop", "run.train")]


@cache
def _server(*, stock: bool) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    libraries = ["transformers.models.gpt2.modeling_gpt2", *_OURS, "counted_once"]
    if stock:  # it checks every optimizer by these
        libraries += ["deepspeed.ops.adam", "deepspeed.runtime.zero.muon.muon_optimizer"]
    server.set_forkserver_preload([*libraries, "commands"])
    given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
    given |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with patch.dict(os.environ, given), patch.object(tempfile, "tempdir", "/tmp"):  # a socket's path must be short
        server.ensure_running()
    return server


class Fork(ForkServerProcess):
    """A forked script with its words, with the part of subprocess.Popen's interface that tests use."""

    _start_method = None  # The script's own processes start as they do in a new process.

    def __init__(self, argv: list[str], *, stdout: Path, stderr: Path, env: dict[str, str], stock: bool) -> None:
        """Start the script. `stock`: its parent has imported DeepSpeed, for a CPU."""
        super().__init__()
        os.umask(umask := os.umask(0))
        self._given = argv, (os.devnull, stdout, stderr), env, umask
        with patch.object(forkserver, "connect_to_new_process", _server(stock=stock).connect_to_new_process):
            self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self._given[0], timeout or 0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None and self.pid:
            os.kill(self.pid, number)

    def run(self) -> None:
        """Run the script in the fork."""
        from counted_once import cached_counts

        assert {*_OURS} <= sys.modules.keys(), "the fork server has not imported the package"
        gc.freeze()  # Otherwise the last garbage collection would copy all of it, which takes most of a second.
        cached_counts().start()
        sys.argv, files, env, umask = self._given
        os.umask(umask)
        for number, path in enumerate(files):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        tempfile.tempdir = None
        sys.path.insert(0, str(Path.cwd() if sys.argv[0] == COMMAND else Path(sys.argv[0]).parent))
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            atexit._run_exitfuncs()


if "deepspeed" in sys.modules:  # py-cpuinfo takes a second for an answer that never changes
    import cpuinfo

    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


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
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {key: value for key, value in os.environ.items() if key not in dropped} | extra


def fresh_environment(place: Path) -> dict[str, str]:
    """Create an environment in `place`/venv with the libraries of this one; return its processes' variables."""
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    # Python's bundled setuptools is too old to build the project.
    drop = [str(place / "venv/bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
    subprocess.run(drop, check=True)
    (site,) = (place / "venv/lib").glob("python3*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = f"{place}/venv/bin:/usr/local/bin:/usr/bin:/bin"
    given = environment(PATH=path, HOME=str(place), OFFLOAD_TRAINER_CACHE=str(place / "cache"))
    # The build requirements are installed, so nothing is downloaded.
    given |= {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in given.items() if name not in ("PYTHONPATH", "CXX")}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "offload_trainer", *map(str, words)]


def start(
    *argv: object, stdout: Path, stderr: Path, own: bool = False, stock: bool = False, **extra: str
) -> Fork | subprocess.Popen[bytes]:
    """Start a script in a fork, or with `own` in a new process. `stock`: it imports DeepSpeed, as some words imply."""
    words, there = list(map(str, argv)), environment(**extra)
    stock = stock or any(word.startswith("deepspeed") for word in words)
    launches = any(word.startswith(("--gpus", "placement.gpus")) for word in words)  # torchrun starts ranks from there
    if own or launches or (stock and torch.cuda.is_available()):
        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            return subprocess.Popen([sys.executable, *words], stdout=out, stderr=err, env=there)
    return Fork(words, stdout=stdout, stderr=stderr, env=there, stock=stock)


def run_script(*argv: object, own: bool = False, stock: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a script as `start` does, with `extra` in the environment; return its code, stdout and stderr."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        code = start(*argv, stdout=out, stderr=err, own=own, stock=stock, **extra).wait(500)
        return subprocess.CompletedProcess(list(argv), code, *(path.read_text(errors="replace") for path in (out, err)))


ask = partial(run_script, COMMAND)  # `offload-train WORDS`


def call(*words: object, output: Path, check: bool = True) -> Run:
    """Run `offload-train WORDS --output OUTPUT` and wait for it. With `check`, assert that it succeeds."""
    done = ask(*words, "--output", output)
    run = Run(done.returncode, done.stdout + done.stderr, output)
    assert not check or run.code == 0, run.text[-4000:]
    return run


def faulty(fault: str, *words: object, output: Path | None = None, **extra: str) -> Run:
    """Run the command, in which a fault of run_with_fault.py happens, with `extra` in the environment."""
    named = [] if output is None else ["--output", output]
    done = run_script(FAULTY, fault, *words, *named, **extra)
    return Run(done.returncode, done.stdout + done.stderr, output or Path())


def everything(folder: Path) -> dict[Path, bytes]:
    """Return all that is in a directory: the content of each file, and of each directory nothing."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def results(output: Path) -> dict[str, Any]:
    """Return what runs are compared by: numbers in lines, and `tensors` and `state` of checkpoints and exports."""
    found: dict[str, Any] = {"tensors": {}, "state": {}}
    for name, keys in (
        ("metrics", ("step", "tokens", "loss", "grad_norm", "lr", "loss_scale", "skipped")),
        ("evaluations", ("step", "validation_loss")),
    ):
        lines = map(json.loads, (output / f"{name}.jsonl").read_text().splitlines())
        found[name] = [[line[key] for key in keys] for line in lines]
    newest = sorted((output / "checkpoints").glob("step-*"))[-1:]
    for path in filter(Path.exists, (place / name for place in newest for name in ("engine.json", "state.json"))):
        found["state"][path.name] = json.loads(path.read_text())
    places = [*newest, output / "exported"]
    for path in (path for place in places for path in place.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            bits = crc32(tensor.reshape(-1).view(torch.uint8).numpy())
            found["tensors"][path.parent.name, path.stem, name] = (tensor.dtype, tensor.shape, bits)
    return found


def assert_same_run(run: Run, expected: Run) -> None:
    """Assert identical numbers of all steps, and bit-identical state or weights at the end."""
    ours, right = results(run.output), results(expected.output)
    assert ours["metrics"] == right["metrics"]
    assert ours["tensors"] == right["tensors"] != {}
