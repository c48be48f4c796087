"""Tests of the file for Slurm, with stand-ins for Slurm's programs; test_ends.py has runs that are told to stop."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from commands import environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BATCH = (ROOT / "configs/slurm.sbatch").read_text()
STOPPED = 128 + signal.SIGTERM


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
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $*" >>ranks
"""


@pytest.mark.parametrize(
    ("code", "ends", "requeued"), [(0, "", False), (2, "", False), (STOPPED, "", True), (STOPPED, "yes", False)]
)
def test_the_batch_file_requeues_only_preempted_jobs(code: int, ends: str, requeued: bool, tmp_path: Path) -> None:
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
    ranks = [f"{rank} {rank % 2} 4 2 one --data a b.jsonl train.stop_within=100" for rank in range(4)]
    assert (tmp_path / "ranks").read_text().splitlines() == ranks
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 123\n"


def test_the_batch_file_warns_in_time() -> None:
    (within,) = re.findall(r"^STOP_WITHIN=(\d+)$", BATCH, re.MULTILINE)
    (seconds,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)\b", BATCH, re.MULTILINE)
    assert int(within) < int(seconds)
