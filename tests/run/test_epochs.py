"""Tests of `--epochs N`: its number of steps, equality with `--steps`, and resumed runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from commands import KILL, TINY, Run, ask, call, call_and_kill

TEXT = "it was the best of times, it was the worst of times, and it was an age of small rows. " * 60
WORDS = [*TINY, "--micro-batch", "3", "--accumulate", "2", "train.eval_every=0", "--save-every", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def rows_of(run: Run) -> int:
    """Return the number of training rows that the run reports."""
    return int(run.text.split(" rows to train on")[0].rpartition(" ")[2])


def position(run: Run) -> int:
    """Return the number of rows visited by the newest checkpoint."""
    newest = sorted((run.output / "checkpoints").glob("step-*"))[-1]
    return json.loads((newest / "state.json").read_text())["data_position"]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", ["0.5", "1.5"])
def test_epochs_make_the_steps_that_visit_the_rows(epochs: str, text: Path, tmp_path: Path) -> None:
    """A run by epochs equals the run with as many steps, schedule included, and no fewer steps visit all rows."""
    run = call(*WORDS, "--data", text, "--epochs", epochs, output=tmp_path / "epochs")
    rows, steps = rows_of(run), len(run.steps)
    assert rows % 6
    assert 6 * (steps - 1) < float(epochs) * rows <= 6 * steps == position(run)
    assert f"epochs: {epochs} of {rows} rows, 6 rows a step: {steps} steps" in run.text
    kept = yaml.safe_load((run.output / "config.yaml").read_text())["train"]
    assert (kept["steps"], kept["epochs"]) == (steps, "auto")
    same = call(*WORDS, "--data", text, "--steps", steps, output=tmp_path / "steps")
    assert [(step["loss"], step["lr"]) for step in run.steps] == [(step["loss"], step["lr"]) for step in same.steps]


@pytest.mark.slow
def test_a_killed_run_ends_where_it_would_have_ended(text: Path, tmp_path: Path) -> None:
    words = [*WORDS, "--data", text, "--epochs", "1"]
    whole = call(*words, output=tmp_path / "whole")
    saved = tmp_path / "killed/checkpoints/step-00000002/MANIFEST.json"
    killed = call_and_kill(*words, output=tmp_path / "killed", when=lambda _: saved.exists(), number=KILL, hold=3)
    assert killed.code == -9
    again = call(*words, output=tmp_path / "killed")
    assert again.losses == whole.losses
    assert "resumed from" in again.text
    assert "done" in call(*words, output=tmp_path / "killed").text


@pytest.mark.slow
def test_rows_that_a_run_has_visited_count_whatever_its_steps_were(text: Path, tmp_path: Path) -> None:
    first = call(*WORDS, "--data", text, "--epochs", "0.5", output=tmp_path / "run")
    rows, before = rows_of(first), len(first.steps)
    more = [*WORDS, "--accumulate", "3", "--data", text, "--epochs", "2"]
    second = call(*more, output=tmp_path / "run")
    assert len(second.steps) == before + math.ceil((2 * rows - 6 * before) / 9)
    assert 2 * rows <= position(second) < 2 * rows + 9


@pytest.mark.slow
def test_page_files_are_resumed_to_the_same_step(text: Path, tmp_path: Path, drive: Path) -> None:
    words = [*WORDS, "--data", text, "--epochs", "1", "--nvme", drive, "--ram-fraction", "0", "tiered.state_copies=2"]
    words += ["--save-every", "0"]
    whole = call(*words, output=tmp_path / "whole")
    call_and_kill(*words, output=tmp_path / "killed", when=lambda lines: len(lines) >= 4, number=KILL, hold=4)
    again = call(*words, output=tmp_path / "killed")
    assert "resuming from the page files" in again.text
    assert again.losses == whole.losses


@pytest.mark.slow
def test_an_epoch_of_a_mixture_is_the_mixtures(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text with other words in it. " * 40)
    words = [*WORDS, "--data", text, other, "data.mixture=[1,3]", "--epochs", "1"]
    run = call(*words, output=tmp_path / "run")
    printed = next(line for line in run.text.splitlines() if "mixture, in an epoch of" in line)
    rows = int(printed.split("in an epoch of ")[1].split()[0])
    assert rows == rows_of(run)
    assert len(run.steps) == math.ceil(rows / 6)


@pytest.mark.slow
def test_a_warm_up_that_is_longer_is_refused_before_anything_is_written(text: Path, tmp_path: Path) -> None:
    done = ask(*WORDS, "--data", text, "--epochs", "0.1", "optim.warmup_steps=200", "--output", tmp_path / "run")
    assert done.returncode == 2
    assert "optim.warmup_steps=200 is more than train.steps=" in done.stderr
    assert not (tmp_path / "run").exists()
