"""Runs of the real command in processes of their own, since DeepSpeed keeps state for the life of a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# An embedding larger than all else, and sizes that do not divide. One thread, since two tests run at a time.
TINY = [
    *("model.overrides.n_layer=2", "model.overrides.n_embd=96", "--seq-len", "32", "--micro-batch", "2"),
    *("placement.threads=1", f"data.cache={tempfile.gettempdir()}/offload-trainer-tests"),
]


# What this machine was timed at before must not decide what tests see.
os.environ["OFFLOAD_TRAINER_CACHE"] = f"{tempfile.gettempdir()}/offload-trainer-tests-cache"


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
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    } | extra


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "offload_trainer", *map(str, words)]


def call(*words: object, output: Path, check: bool = True) -> Run:
    """`offload-train WORDS --output OUTPUT`, waited for."""
    done = subprocess.run(
        command(*words, "--output", output), capture_output=True, text=True, env=environment(), timeout=500
    )
    run = Run(done.returncode, done.stdout + done.stderr, output)
    assert not check or run.code == 0, run.text[-4000:]
    return run


def ask(*words: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """`offload-train WORDS`, with `extra` in the environment; stdout and stderr apart."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, env=environment(**extra), timeout=500, check=False
    )


def call_and_kill(*words: object, output: Path, when: Callable[[list[str]], bool], number: int) -> Run:
    """The same, sent signal `number` as soon as `when(lines of metrics.jsonl)` holds."""
    metrics = output / "metrics.jsonl"
    with subprocess.Popen(
        command(*words, "--output", output),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and when(metrics.read_text().splitlines()):
                process.send_signal(number)
                break
            time.sleep(0.005)
        text, _ = process.communicate(timeout=300)
    assert process.returncode is not None
    return Run(process.returncode, text, output)


def fill(directory: Path) -> None:
    """Not one byte is left on its filesystem."""
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on a real drive: /tmp may be a tmpfs, which has no O_DIRECT."""
    return tmp_path_factory.mktemp("drive")


KILL, INTERRUPT, TERMINATE = signal.SIGKILL, signal.SIGINT, signal.SIGTERM
