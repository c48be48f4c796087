"""Tests of the tuner: its trials and the settings that it keeps, with given outcomes and one real trial."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, ask
from sample_plans import SHAPES, machine, wish

from offload_trainer.errors import TrainerError
from offload_trainer.plan.planner import make_plan
from offload_trainer.run.commands import tune
from offload_trainer.settings import load_config


def outcomes(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float | None]) -> list[str]:
    """Make trials return the time in `seconds` for their arguments (None: fail); return the arguments tried so far."""
    tried: list[str] = []

    def pretend(_: object, added: str, *, steps: int, say: object) -> tune.Trial:
        tried.append(added)
        taken = seconds[added]
        trial = tune.Trial(added, [{"step": taken, "update": taken}] * steps)
        return replace(trial, failed="killed by signal 9") if taken is None else trial

    monkeypatch.setattr(tune, "run_trial", pretend)
    return tried


def test_each_group_starts_from_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = outcomes(monkeypatch, {"": 2.0, "a": 1.5, "b": 1.8, "a c": None, "a d": 1.2})
    trials = tune.tune([], [("a", "b"), ("c", "d")], phase="step", steps=4, say=lambda line: None)
    assert tried == ["", "a", "b", "a c", "a d"]
    assert trials[0].words == "a d"
    assert len(trials) == 5
    assert [trial.failed for trial in trials if trial.words == "a c"] == ["killed by signal 9"]


def test_a_gain_within_the_noise_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, {"": 2.0, "a": 1.97})
    assert tune.tune([], [("a",)], phase="step", steps=4, say=lambda line: None)[0].words == ""


def test_nothing_to_tune_where_the_plan_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, {"": None})
    with pytest.raises(TrainerError, match="killed by signal 9"):
        tune.tune([], [("a",)], phase="step", steps=4, say=lambda line: None)


def test_the_first_steps_do_not_count() -> None:
    trial = tune.Trial("", [{"step": 9.0}, {"step": 9.0}, {"step": 1.0}, {"step": 3.0}, {"step": 2.0}])
    assert trial.seconds == 2.0


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (
            ["--ram-fraction", "0", "tiered.overlap=off"],
            {"tiered.page_size", "tiered.page_buffers"},
        ),
        (["--ram-fraction", "1"], set()),
        (["--params", "cpu", "--ram-fraction", "1"], {"tiered.weight_buffers"}),
        (["--engine", "deepspeed", "--optimizer", "cpu"], {"deepspeed.reduce_bucket_size"}),
    ],
)
def test_only_what_matters_to_the_placement_is_tried(words: list[str], keys: set[str], tmp_path: Path) -> None:
    config = load_config(["--nvme", str(tmp_path), "--save-every", "0", *words])
    here = replace(machine(), drives=(replace(machine().drives[0], directory=str(tmp_path)),))
    plan = make_plan(config, SHAPES["gpt2"], here)
    tried = {word.partition("=")[0] for group in plan.tunable for word in group}
    assert tried == keys
    assert tune.steered_phase(plan) == ("update" if keys and "tiered.page_size" in keys else "step")
    for group in plan.tunable:
        for added in group:
            wish(*words, *added.split())  # each trial is a valid configuration


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A plan with nothing to vary makes one real trial, and the file is a valid configuration."""
    best = tmp_path / "best.yaml"
    words = [*TINY, "--engine", "tiered", "--ram-fraction", "1", "--output", tmp_path / "run"]
    done = ask("tune", "--json", "--write", best, "--trial-steps", "3", *words)
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)
    assert len(trial["steps"]) == 3
    assert trial["seconds"] > 0
    assert load_config([str(best)]).placement.ram_fraction == 1
    assert not (tmp_path / "run").exists()
