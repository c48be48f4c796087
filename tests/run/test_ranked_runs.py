"""Tests of commands with several ranks that end early: which rank reports why, and the rerun that resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAULTY, TINY, call
from forked_ranks import call_ranks

from offload_trainer.checkpoint import complete_checkpoints, read_manifest

pytestmark = pytest.mark.slow

FOUR = [*TINY, "--engine", "tiered", "--steps", 6, "--save-every", 2, "train.eval_every=0", "--micro-batch", "1"]


def test_a_disk_that_is_full_for_one_rank(tmp_path: Path) -> None:
    """A full disk is reported by its rank alone, and no partial file gets its final name.

    A rerun with another number of ranks has the bits of one rank.
    """
    alone = call(*FOUR, "--accumulate", 6, output=tmp_path / "alone")
    ended = call_ranks(*FOUR, "--accumulate", 2, output=tmp_path / "out", script=[FAULTY, "1:broken@put=2"])
    assert [run.code for run in ended] == [1, 1, 1]
    printed = [[line for line in run.text.splitlines() if line.startswith("offload-train")] for run in ended]
    assert [len(lines) for lines in printed] == [0, 1, 0], printed
    assert "exp_avg.safetensors: No space left on device" in printed[1][0]
    assert "No space left on device" in (tmp_path / "out/log.txt").read_text().splitlines()[-1]
    checkpoints = tmp_path / "out/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    two = call_ranks(*FOUR, "--accumulate", 3, output=tmp_path / "out", count=2)
    assert [run.code for run in two] == [0, 0], two
    assert "resumed from" in two[0].text
    assert "while training went on" in two[0].text
    kept = ("step", "loss", "grad_norm")
    ours, theirs = ([{key: step[key] for key in kept} for step in run.steps] for run in (two[0], alone))
    assert ours[-4:] == theirs[-4:]
    ours, theirs = (complete_checkpoints(run.output / "checkpoints")[-1] for run in (two[0], alone))
    read_manifest(ours)
    for path in theirs.glob("*.safetensors"):
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name


def test_ranks_of_different_commands_do_not_begin(tmp_path: Path) -> None:
    ended = call_ranks(*FOUR, output=tmp_path / "out", count=2, last=["--lr", "0.25"])
    assert [run.code for run in ended] == [2, 2]
    assert "optim.lr: rank 1 has 0.25, rank 0 has" in ended[0].text.replace("rank 0 0", "rank 0 has 0")
    assert not ended[1].text
    assert not (tmp_path / "out").exists()
