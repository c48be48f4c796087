"""Run commands in forks of a process that has imported the libraries once: importing is most of a small run's time.

    forks = Forks()             # Forks(stock=True): DeepSpeed is imported too
    process = forks.start([script, words...], stdout=path, stderr=path, env=...)   # as subprocess.Popen

The parent computes nothing and has one thread, so a fork is as good as a new process. The environment, directory,
umask and files are set before anything runs, the script runs as `__main__`, and exit codes and signals are real.

Four things differ. Libraries have already read their environment (OpenMP has 1 thread except for torch's own,
HF_HUB_OFFLINE is 1). Startup takes no time. All forks of one parent share the hash salt. conftest starts a new process
for tests to which that matters, and for torchrun. DeepSpeed's kernels are loaded in each fork, with its number of
threads. Activations of a model that another process of the test run has counted are not counted again.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

COMMAND = str(Path(__file__).resolve().parents[2] / "offload_trainer" / "__main__.py")


class Forks:
    """A handle on the parent process, from which a test starts forks."""

    def __init__(self, *, stock: bool = False) -> None:
        offline = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        words = [sys.executable, __file__, *["stock"] * stock]
        self._parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=offline)
        self._folder = tempfile.TemporaryDirectory()  # has a file with the exit code of each fork that has ended
        self._count = itertools.count()
        atexit.register(self.close)

    def start(self, argv: list[str], *, stdout: Path, stderr: Path, env: dict[str, str]) -> Fork:
        assert self._parent.stdin
        assert self._parent.stdout
        umask = os.umask(0)
        os.umask(umask)
        code = Path(self._folder.name) / str(next(self._count))
        wish = {"argv": argv, "files": [str(stdout), str(stderr)], "env": env, "cwd": str(Path.cwd())}
        self._parent.stdin.write(json.dumps(wish | {"umask": umask, "code": str(code)}).encode() + b"\n")
        self._parent.stdin.flush()
        return Fork(int(self._parent.stdout.readline()), code)

    def close(self) -> None:
        assert self._parent.stdin
        self._parent.stdin.close()
        self._parent.wait(300)
        self._folder.cleanup()


class Fork:
    """A forked command with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# -- in the parent ---------------------------------------------------------------------------------------------------


def serve() -> list[str] | None:
    """Fork for each request on stdin, tell its pid, and write its exit code to the request's file.

    Return the command's words in each fork, and None in the parent when stdin ends.
    """
    told = os.dup(1)
    os.dup2(2, 1)
    _load_libraries()
    gc.collect()
    # Without this, each fork would copy all of it in its last garbage collection, which takes most of a second.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks that wait for a command
    while line := sys.stdin.buffer.readline():
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in a fork"
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wish = json.loads(line)
        if not (pid := os.fork()):
            os.close(told)
            return _become(wish)
        os.write(told, f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        Path(f"{wish['code']}.part").write_text(str(code))
        os.replace(f"{wish['code']}.part", wish["code"])
        os._exit(0)
    return None


def _load_libraries() -> None:
    from offload_trainer.run.process_setup import quieten

    quieten()
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401
    from counted_once import counted_once

    import offload_trainer.engine.tiered
    import offload_trainer.run.export
    import offload_trainer.run.loop
    import offload_trainer.run.train

    offload_trainer.model.shape.count_activations = counted_once
    if "stock" not in sys.argv:
        return
    # DeepSpeed for a CPU, with py-cpuinfo's answer, which takes a second each time and never changes.
    os.environ["DS_ACCELERATOR"] = "cpu"
    import cpuinfo
    import deepspeed.ops.adam
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - DeepSpeed checks every optimizer against it

    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def _become(wish: dict[str, Any]) -> list[str]:
    """Apply the request's files, environment, directory and umask to this fork; return the command's words."""
    import numpy

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.umask(wish["umask"])
    for number, path in enumerate(wish["files"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(wish["env"])
    time.tzset()
    os.chdir(wish["cwd"])
    tempfile.tempdir = None
    random.seed()
    numpy.random.seed()
    words: list[str] = wish["argv"]
    return words


if __name__ == "__main__":
    sys.argv = serve() or sys.exit()
    if sys.argv[0] == COMMAND:
        sys.path[0] = str(Path.cwd())
    else:
        # The script's directory must precede this one, since it may import its own helpers.
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
