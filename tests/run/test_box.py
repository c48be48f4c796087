"""Tests under a cgroup's memory limit: runs that the plan allows succeed, and others are refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import LIMIT, ask, command, environment

MODEL = ["--model", "gpt2", "--seq-len", "64", "--micro-batch", "1", "--steps", "2", "train.eval_every=0"]
RUN = [*MODEL, "--save-every", "0", "--engine", "tiered", "placement.threads=1"]


def inside(box: Path, *words: object) -> subprocess.CompletedProcess[str]:
    script = f'echo $$ > {box}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "box", *command(*words)], capture_output=True, text=True, env=environment(), timeout=500
    )


@pytest.mark.box
def test_a_run_beyond_the_limit_is_refused_and_writes_nothing(box: Path, drive: Path, tmp_path: Path) -> None:
    output = tmp_path / "refused"
    done = inside(box, *RUN, "--nvme", drive, "--ram-fraction", "1", "--output", output)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "ram needs" in done.stderr
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.box
def test_a_planned_run_stays_under_the_limit(box: Path, drive: Path, tmp_path: Path) -> None:
    output = tmp_path / "runs"
    done = inside(box, *RUN, "--nvme", drive, "--output", output)  # auto chooses a placement that fits
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((output / "plan.json").read_text())
    assert plan["fits"]
    assert 0 < plan["tiers"]["ram"]["need"] <= plan["tiers"]["ram"]["have"] <= LIMIT
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert steps[-1]["host_rss_bytes"] <= LIMIT


def test_a_drive_with_too_little_room_is_refused(drive: Path, tmp_path: Path) -> None:
    words = ["--model", "gpt2-10b", "model.overrides.n_embd=16384", "--nvme", drive, "--save-every", "0"]
    done = ask(*words, "--ram-fraction", "0", "--output", tmp_path / "out")
    assert done.returncode == 2, done.stderr[-2000:]
    assert f" in {drive}" in done.stderr[done.stderr.index("this does not fit: ") :]
    assert not (tmp_path / "out").exists()
