"""Tests of the file for Slurm, and of a job that a real Slurm preempts three times."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from commands import FAULTY, HELPERS, TINY, Run, assert_same_run, call, environment

from offload_trainer import cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BATCH = (ROOT / "configs/slurm.sbatch").read_text()
STOPPED = 128 + signal.SIGTERM


# -- Slurm: the batch file with stand-ins ------------------------------------------------------------------------------

# Runs the command of srun once for each rank, one after the other; $ENDS also tells the batch shell to end.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && count=${1#--ntasks=}
  shift
done
for ((rank = 0; rank < count; rank++)); do SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@"; done
[ -z "$ENDS" ] || kill -TERM $PPID
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo one; echo two; else echo "$@" >>requeued; fi
"""
TRAIN = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR ${#OFFLOAD_TRAINER_SECRET} $*" >>ranks
"""


def of_batch_file(name: str) -> str:
    """Return the value of an option of sbatch in the batch file, without its comment."""
    (value,) = re.findall(rf"^#SBATCH --{name}=(\S+)", BATCH, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize(
    ("code", "ends", "requeued"), [(0, "", False), (2, "", False), (STOPPED, "", True), (STOPPED, "yes", False)]
)
def test_the_batch_file_requeues_only_preempted_jobs(code: int, ends: str, requeued: bool, tmp_path: Path) -> None:
    """A warned job is requeued; one that has finished or failed, or that Slurm ends itself, is not."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("offload-train", TRAIN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nodes", "SLURM_CPUS_PER_TASK": "1"}
    env = environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SLURM_NTASKS_PER_NODE="2", **job)
    env |= {"CODE": str(code), "ENDS": ends}
    words = ["--data", "a b.jsonl"]
    done = subprocess.run(["bash", ROOT / "configs/slurm.sbatch", *words], cwd=tmp_path, env=env)
    assert done.returncode == code
    ranks = [f"{rank} {rank % 2} 4 2 one 64 --data a b.jsonl train.stop_within=100" for rank in range(4)]
    assert (tmp_path / "ranks").read_text().splitlines() == ranks
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 123\n"


def test_the_batch_file_warns_in_time() -> None:
    (within,) = re.findall(r"^STOP_WITHIN=(\d+)$", BATCH, re.MULTILINE)
    name, _, seconds = of_batch_file("signal").partition("@")
    assert name == "TERM"
    assert int(within) < int(seconds)


# -- Slurm: a real one -------------------------------------------------------------------------------------------------

EVERY, PREEMPTIONS = 5, 3
STEPS = 20  # assert_same_run compares this checkpoint
DROPOUT = [f"model.overrides.{name}=0.1" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
WORDS = [*TINY, *DROPOUT, "--steps", str(STEPS), "--save-every", "100", "train.eval_every=0"]


def until(condition: Callable[[], bool], told: Callable[[], str], *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.05)


def free_ports() -> int:
    """Return the first of two neighbouring ports that are free."""
    for port in range(20000, 30000, 2):
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("", port))
            other.bind(("", port + 1))
            return port
    raise AssertionError("no two neighbouring ports are free")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a Slurm of one node; skip the test if that is impossible here."""
    if os.getuid() or not shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("Slurm is started by root, from Debian's packages: apt-get install slurm-wlm")
    script, folder = HELPERS / "slurm_one_node.sh", tmp_path / "slurm"
    subprocess.run([script, "start", folder], check=True, env=os.environ | {"PORT": str(free_ports())})
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    try:
        yield
    finally:
        subprocess.run([script, "stop", folder], check=True)


def submit(*words: object, folder: Path, **extra: str) -> str:
    """Submit a job; return its number."""
    argv = ["sbatch", "--parsable", *map(str, words)]
    done = subprocess.run(argv, cwd=folder, env=environment(**extra), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def facts(job: str) -> dict[str, str]:
    """Return what Slurm says about a job."""
    words = ["scontrol", "--oneliner", "show", "job", job]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return dict(word.partition("=")[::2] for word in printed.split())


@pytest.mark.usefixtures("slurm")
def test_a_job_preempted_three_times_has_the_bits_of_a_run_left_alone(tmp_path: Path) -> None:
    """Each start pauses after five more steps until its ranks have been warned, then saves and is requeued."""
    whole = call(*WORDS, "--gpus", "2", output=tmp_path / "whole")
    assert cli.main(["cp", "slurm", str(tmp_path)]) == 0
    batch = tmp_path / "slurm.sbatch"
    batch.write_text(re.sub(r"^#SBATCH --gpus-per-node=.*\n", "", BATCH, flags=re.MULTILINE))  # there are none here
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/offload-train"
    command.write_text(
        f"#!/bin/sh\nstart=${{SLURM_RESTART_COUNT:-0}}\nexec {sys.executable} {FAULTY} "
        f'"pause~{tmp_path}/warned-$start@line=$(({EVERY} * (start + 1)))" "$@"\n'
    )
    command.chmod(0o755)
    (tmp_path / f"warned-{PREEMPTIONS}").touch()  # the last start trains to the end
    output, log = tmp_path / "out", tmp_path / "log"
    metrics = output / "metrics.jsonl"
    shape = ["--ntasks-per-node=2", "--cpus-per-task=1", f"--output={log}"]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    job = submit(*shape, batch, *WORDS, "--output", output, folder=tmp_path, PATH=path)

    def told() -> str:
        return f"{facts(job)}\n{log.read_text() if log.exists() else ''}"

    for number in range(PREEMPTIONS):
        steps = EVERY * (number + 1)
        until(lambda: metrics.exists() and metrics.read_text().count("\n") == steps, told)  # noqa: B023
        submit("--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true", folder=tmp_path)
        until(lambda: log.read_text().count("SIGTERM: finishing this step") == number + 1, told)  # noqa: B023
        (tmp_path / f"warned-{number}").touch()
        until(lambda: facts(job)["Restarts"] == str(number + 1), told)  # noqa: B023
    until(lambda: facts(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), told)
    text = log.read_text()
    assert (facts(job)["JobState"], facts(job)["ExitCode"]) == ("COMPLETED", "0:0"), text
    stops = [int(step) for step in re.findall(r"stopped after step (\d+), everything saved", text)]
    assert stops == [EVERY, 2 * EVERY, 3 * EVERY]
    assert_same_run(Run(0, text, output), whole)
