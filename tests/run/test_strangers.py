"""A test of another user who attacks a run of two ranks: none of their code runs, and no bit changes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import FAULTY, HELPERS, TINY, call, run_script, start

pytestmark = pytest.mark.slow

OTHER_USER = HELPERS / "other_user.py"
WORDS = [*TINY, "--engine", "tiered", "--steps", "6", "--save-every", "3", "train.eval_every=0", "--micro-batch", "1"]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root alone can")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(there: Path, running: object) -> None:
    until = time.monotonic() + 300
    while not there.exists() and time.monotonic() < until:
        assert running.poll() is None, "it ended too early"  # type: ignore[attr-defined]
        time.sleep(0.01)


@pytest.fixture
def open_directory() -> Iterator[str]:
    """Yield a directory where other users may write, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@AS_ROOT
def test_another_user_reaches_nothing_of_two_ranks(tmp_path: Path, open_directory: str) -> None:
    """No port is open, and garbage at every socket and access to memory and descriptors fail."""
    alone = call(*WORDS, "--accumulate", 2, output=tmp_path / "alone")
    output, go, told = tmp_path / "out", tmp_path / "go", tmp_path / "told"
    open_to_all = Path(open_directory)
    open_to_all.chmod(0o777)
    two = [FAULTY, f"pause~{go}@line=4", *WORDS, "--accumulate", 1, "--gpus", 2, "--output", output]
    run = start(*two, stdout=told, stderr=told, own=True)
    wait_for(output / "checkpoints/step-00000003/MANIFEST.json", run)
    pids = [run.pid, *children(run.pid)]
    assert len(pids) == 3, told.read_text()
    done = run_script(OTHER_USER, ",".join(map(str, pids)), open_to_all, own=True)
    go.touch()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert run.wait(300) == 0, told.read_text()
    assert found["tcp"] == []
    assert found["unix"] == 2  # one for each rank, so the attack found all sockets
    assert (found["told"], found["read"]) == ("", [])
    assert not list(open_to_all.iterdir())
    kept = ("step", "loss", "grad_norm")
    ours, theirs = (
        [[json.loads(line)[key] for key in kept] for line in (where / "metrics.jsonl").read_text().splitlines()]
        for where in (output, alone.output)
    )
    assert ours == theirs
    for path in (alone.output / "checkpoints/step-00000006").glob("*.safetensors"):
        assert (output / "checkpoints/step-00000006" / path.name).read_bytes() == path.read_bytes(), path.name
