"""Tests of stops with a deadline (`train.stop_within`)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import TINY, call, faulty

from offload_trainer import trainer
from offload_trainer.trainer import TimeToSave

WORDS = [*TINY, "--steps", 6, "--save-every", 2, "train.eval_every=0"]


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir() if path.name.startswith("step-"))


@pytest.mark.slow
def test_a_stop_that_does_not_fit_ends_at_once_and_resumes(tmp_path: Path) -> None:
    """A deadline that is too short for a save leaves the last checkpoint; a long one is kept to. Both resume."""
    whole = call(*WORDS, output=tmp_path / "whole")
    for within, saved, told in ((0.5, 2, "stopped at once, unsaved"), (600, 3, "everything saved")):
        words = [*WORDS, f"train.stop_within={within}"]
        output = tmp_path / f"within-{within}"
        run = faulty(f"pause~{output}/checkpoints/step-00000002/MANIFEST.json+TERM@line=3", *words, output=output)
        assert run.code == 128 + signal.SIGTERM, run.text
        assert told in run.text
        assert checkpoints(output)[-1] == f"step-{saved:08d}"
        assert "train.stop_within=0.5" in run.text or within == 600
        again = call(*words, output=output)
        assert f"step {saved}" in again.text
        assert again.losses == whole.losses


def test_what_is_left_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    left = TimeToSave(step=None, save=4.0)
    left.begin("step", validates=True)
    assert left.seconds is None  # nobody knows the seconds of a first step
    now[0] = 10.0
    left.begin("validation")
    now[0] = 13.0
    left.begin("save")
    assert left.seconds == 4.0
    now[0] = 15.0
    assert left.seconds == 2.0
    left.begin("step", validates=True)
    now[0] = 16.0
    assert left.seconds == 9 + 3 + 4
    left.save = 6.0
    now[0] = 26.0  # the step takes longer than the one before
    assert left.seconds == 0 + 3 + 6
    left.begin("save")
    left.begin("step", validates=False)
    assert left.seconds == 11 + 6  # the longest of the latest steps
