"""Tests of `--epochs N`: its number of steps, equality with `--steps`, and resumed runs."""

import json
import math
from pathlib import Path

import pytest
import yaml
from commands import KILL, TINY, Run, assert_same_run, call, faulty

pytestmark = pytest.mark.slow

TEXT = "it was the best of times, it was the worst of times, and it was an age of small rows. " * 60
WORDS = [*TINY, "--micro-batch", "3", "--accumulate", "2", "train.eval_every=0", "--save-every", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def position(run: Run) -> int:
    newest = sorted((run.output / "checkpoints").glob("step-*"))[-1]
    return json.loads((newest / "state.json").read_text())["data_position"]


def test_epochs_make_the_steps_that_visit_the_rows(text: Path, tmp_path: Path) -> None:
    """A run by epochs equals the run with as many steps, and no fewer steps visit all rows, also when it goes on."""
    words = [*WORDS, "--data", text]
    run = call(*words, "--epochs", "1.5", output=tmp_path / "epochs")
    rows, steps = int(run.text.split(" rows to train on")[0].rpartition(" ")[2]), len(run.steps)
    assert rows % 6
    assert 6 * (steps - 1) < 1.5 * rows <= 6 * steps == position(run)
    assert f"epochs: 1.5 of {rows} rows, 6 rows a step: {steps} steps" in run.text
    kept = yaml.safe_load((run.output / "config.yaml").read_text())["train"]
    assert (kept["steps"], kept["epochs"]) == (steps, "auto")
    same = call(*words, "--steps", steps, output=tmp_path / "steps")
    assert_same_run(run, same)
    more = call(*words, "--accumulate", "3", "--epochs", "2", output=run.output)
    assert len(more.steps) == steps + math.ceil((2 * rows - 6 * steps) / 9)
    assert 2 * rows <= position(more) < 2 * rows + 9


def test_a_killed_run_ends_where_it_would_have_ended(text: Path, tmp_path: Path, drive: Path) -> None:
    words = [*WORDS, "--data", text, "--epochs", "1"]
    words += ["--nvme", drive, "--ram-fraction", "0", "tiered.state_copies=2", "--save-every", "0"]
    whole = call(*words, output=tmp_path / "whole")
    killed = tmp_path / "killed"
    assert faulty("kill@line=4", *words, output=killed).code == -KILL
    again = call(*words, output=killed)
    assert "resuming from the page files" in again.text
    assert_same_run(again, whole)
    assert "done" in call(*words, output=killed).text
