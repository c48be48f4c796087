"""Run commands in forks of a process that has imported the libraries once: importing is most of a small run's time.

The parent is a fork server of `multiprocessing`. It computes nothing and has one thread, so a fork is as good as a new
process: the environment, directory, umask and files are set before anything runs, the script runs as `__main__`, and
exit codes and signals are real. But libraries have already read their environment (OpenMP has 1 thread except for
torch's own, HF_HUB_OFFLINE is 1), startup takes no time, all forks share the hash salt, and activations of a model that
another process of the test run has counted are not counted again. Tests to which that matters start a new process.
"""

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import time
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

COMMAND = str(Path(__file__).resolve().parents[2] / "offload_trainer" / "__main__.py")
_OURS = [f"offload_trainer.{name}" for name in ("engine.tiered", "run.export", "run.loop", "run.train")]
_LIBRARIES = ["transformers.models.gpt2.modeling_gpt2", *_OURS, "counted_once"]
_DEEPSPEED = ["deepspeed.ops.adam", "deepspeed.runtime.zero.muon.muon_optimizer"]  # of these it checks every optimizer


@cache
def _server(*, stock: bool) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_LIBRARIES, *_DEEPSPEED * stock, "fork_server"])
    given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
    given |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with patch.dict(os.environ, given, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
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
