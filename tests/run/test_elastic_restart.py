"""Tests of torchrun's restarts: killed ranks resume the run, and a run whose torchrun is told to stop ends.

The results have the bits of a run left alone.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import FAULTY, TINY, Run, assert_same_run, call, start
from forked_ranks import held_port

pytestmark = pytest.mark.slow

WORDS = [*TINY, "--engine", "tiered", "--optimizer", "nvme", "--steps", 20, "--save-every", 3, "train.eval_every=0"]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    """Return the run of one rank, left alone."""
    (folder / "drive").mkdir()
    return call(*WORDS, "--accumulate", 2, "--nvme", folder / "drive", output=folder / "alone")


def torchrun(
    *words: object,
    folder: Path,
    script: Sequence[object] = ("-m", "offload_trainer", "train"),
    meanwhile: Callable[[Path, subprocess.Popen[bytes]], None] = lambda *_: None,
) -> tuple[int, str]:
    """Run two ranks under torchrun; return its exit code and all that was printed.

    `meanwhile` is called with the file of what is printed and torchrun, once the ranks are being started.
    """
    drive = folder / "drive"
    drive.mkdir(parents=True)
    bound, port = held_port()
    launch = ["-m", "torch.distributed.run", "--nnodes", 1, "--nproc-per-node", 2, "--max-restarts", 3]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port]
    told = folder / "told"
    with bound:
        argv = [*launch, *script, *WORDS, "--accumulate", 1, "--nvme", drive, *words]
        process = start(*argv, stdout=told, stderr=told, own=True, CUDA_VISIBLE_DEVICES="")
        meanwhile(told, process)
        code = process.wait(400)
    assert not list(drive.glob("offload-trainer/run-*"))
    return code, told.read_text(errors="replace")


def test_killed_ranks_are_restarted(alone: Run, seed: int, tmp_path: Path) -> None:
    """A rank is killed three times: before a random step, before a random write of an update, and in a save."""
    dice, output = random.Random(seed), tmp_path / "out"
    faults = f"{dice.randrange(2)}:kill@step={dice.randrange(2, 9)}"
    faults += f",{dice.randrange(2)}:kill@page={dice.randrange(1, 10)},0:kill@manifest"
    code, text = torchrun("--output", output, folder=tmp_path / "nodes", script=[FAULTY, faults])
    assert code == 0, f"{faults}: {text[-6000:]}"
    assert text.count("failed (exitcode: -9)") == 3, text[-6000:]
    assert_same_run(Run(0, text, output), alone)


def test_a_run_whose_torchrun_is_told_to_stop_is_not_restarted(alone: Run, tmp_path: Path) -> None:
    """torchrun ends with the run, which has saved its step; the same command resumes."""
    go, output = tmp_path / "go", tmp_path / "out"
    metrics, words = output / "metrics.jsonl", ["--output", output]

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < until, what
            time.sleep(0.02)

    def stop(told: Path, torchrun: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, "five steps")
        torchrun.terminate()
        wait_for(lambda: "finishing this step" in told.read_text(errors="replace"), "SIGTERM")
        go.touch()

    held = [FAULTY, f"pause~{go}@line=5"]  # rank 0 waits there for the signal
    code, text = torchrun(*words, folder=tmp_path / "first", script=held, meanwhile=stop)
    assert code == 1, text[-6000:]
    assert text.count("stopped after step") == 1  # no rank was started again
    assert "stopped after step 5, everything saved; the same command resumes from there" in text
    assert (output / "checkpoints/step-00000005/MANIFEST.json").exists()
    code, text = torchrun(*words, folder=tmp_path / "again")
    assert code == 0, text[-6000:]
    assert_same_run(Run(0, text, output), alone)
