"""Run commands in forks of a process that has imported the libraries once: importing is most of a small run's time.

    forks = Forks()             # Forks(stock=True): DeepSpeed is imported too
    process = forks.start([script, words...], stdout=path, stderr=path, env=..., cwd=...)   # as subprocess.Popen

The parent computes nothing and has one thread, so a fork is as good as a new process. The environment, directory,
umask and files are set before anything runs, the script runs as `__main__`, and exit codes and signals are real.

Three things differ. Libraries have already read their environment (OpenMP has 1 thread except for torch's own,
HF_HUB_OFFLINE is 1). Startup takes no time. All forks of one parent share the hash salt. conftest starts a new process
for tests to which that matters, and for torchrun. DeepSpeed's kernels are loaded in each fork, with its number of
threads.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import selectors
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
        self._parent = subprocess.Popen(
            [sys.executable, __file__, *["stock"] * stock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=offline
        )
        self._codes: dict[int, int] = {}
        atexit.register(self.close)

    def start(
        self, argv: list[str], *, stdout: Path, stderr: Path, env: dict[str, str], cwd: Path | None = None
    ) -> Fork:
        assert self._parent.stdin
        umask = os.umask(0)
        os.umask(umask)
        files = [str(stdout), str(stderr)]
        wish = {"argv": argv, "files": files, "env": env, "cwd": str(cwd or Path.cwd()), "umask": umask}
        self._parent.stdin.write(json.dumps(wish).encode() + b"\n")
        self._parent.stdin.flush()
        while (said := self._hear(None)) and "started" not in said:
            pass
        return Fork(said["started"], self)

    def code(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit code as Popen does, waiting up to `timeout` seconds; None if the process is still running."""
        until = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if until is None else until - time.monotonic()
            if not self._hear(left) and left is not None and left <= 0:
                return None
        return self._codes[pid]

    def _hear(self, timeout: float | None) -> dict[str, Any]:
        """Return the parent's next message, or {} if none arrives in time."""
        assert self._parent.stdout
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._parent.stdout, selectors.EVENT_READ)
            if not waiting.select(timeout):
                return {}
        line = bytearray()
        while not line.endswith(b"\n"):  # Read byte by byte: a buffer would hide lines from the selector.
            byte = os.read(self._parent.stdout.fileno(), 1)
            assert byte, "the parent of the forks has ended"
            line += byte
        said = json.loads(line)
        if "started" in said:
            self._codes.pop(said["started"], None)  # Drop the exit code of an earlier process with the same pid.
        if "ended" in said:
            self._codes[said["ended"]] = said["code"]
        return said

    def close(self) -> None:
        assert self._parent.stdin
        self._parent.stdin.close()
        self._parent.wait(300)


class Fork:
    """A forked command with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, pid: int, forks: Forks) -> None:
        self.pid, self._forks = pid, forks
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.code(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._forks.code(self.pid, timeout)
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# -- in the parent ---------------------------------------------------------------------------------------------------


def serve() -> list[str] | None:
    """Fork for each request on stdin and report each exit.

    Return the command's words in each fork, and None in the parent when stdin ends.
    """
    told = os.dup(1)
    os.dup2(2, 1)
    _load_libraries()
    gc.collect()
    # Without this, each fork would copy all of it in its last garbage collection, which takes most of a second.
    gc.freeze()
    children: dict[int, int] = {}  # pidfd -> pid
    with selectors.DefaultSelector() as waiting:
        waiting.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fd in children:
                    pid = children.pop(key.fd)
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    os.write(told, json.dumps({"ended": pid, "code": code}).encode() + b"\n")
                    continue
                line = sys.stdin.buffer.readline()
                if not line:
                    return None
                assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in a fork"
                pid = os.fork()
                if not pid:
                    for descriptor in (told, *children):
                        os.close(descriptor)
                    return _become(json.loads(line))
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                waiting.register(descriptor, selectors.EVENT_READ)
                os.write(told, json.dumps({"started": pid}).encode() + b"\n")


def _load_libraries() -> None:
    from offload_trainer.run.process_setup import quieten

    quieten()
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import offload_trainer.engine.tiered
    import offload_trainer.export.directory
    import offload_trainer.run.train
    import offload_trainer.trainer  # noqa: F401

    if "stock" in sys.argv:
        _load_deepspeed()


def _load_deepspeed() -> None:
    """Import DeepSpeed for a CPU. Cache py-cpuinfo's answer, which takes a second each time and never changes."""
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
