"""Tests of the training loop: signals that arrive while ranks exchange requests, and the time to stop."""

import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_trainer.ranks import all_gather_json
from offload_trainer.run import loop
from offload_trainer.run.signals import StopRequest


class Unsaved(nullcontext):
    ended = False


def job_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loop, "_step", lambda job, state, batches: replace(state, step=state.step + 1))
    monkeypatch.setattr(loop, "_evaluate", lambda job, step: None)
    return SimpleNamespace(
        train=SimpleNamespace(steps=9, micro_batch_size=1, eval_every=0),
        train_rows=SimpleNamespace(train_batches=lambda *_, **__: iter(())),
        engine=SimpleNamespace(rank=0, world=1),
        checkpoints=Unsaved(),
        to_save=loop.TimeToSave(step=None, save=0.0),
        commit=None,
        telemetry=None,
    )


@pytest.mark.parametrize("at", [1, 2])
def test_a_signal_that_comes_while_the_ranks_agree_is_not_forgotten(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, agreed, saved = StopRequest(), [], []

    def slowly(said: Any) -> Any:
        answers = all_gather_json(said)
        agreed.append(said)
        if len(agreed) == at:
            asked.stop = signal.SIGTERM  # the handler sets it
        return answers

    monkeypatch.setattr(loop, "all_gather_json", slowly)
    monkeypatch.setattr(loop, "_save_if_due", lambda job, state, **why: saved.append((state.step, why["stopping"])))
    state = loop.train(job_of(monkeypatch), asked)
    assert state.step == at + 1
    assert saved[-1] == (at + 1, True)
    assert asked.stop == signal.SIGTERM


def test_what_is_left_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    left = loop.TimeToSave(step=None, save=4.0)
    left.begin("step", "validation", "save")
    assert left.seconds is None  # nobody knows the seconds of a first step
    now[0] = 10.0
    left.begin("validation", "save")
    now[0] = 13.0
    left.begin("save")
    assert left.seconds == 4.0
    now[0] = 15.0
    assert left.seconds == 2.0
    left.begin("step", "validation", "save")
    now[0] = 16.0
    assert left.seconds == 9 + 3 + 4
    left.save = 6.0
    now[0] = 26.0  # the step takes longer than the one before
    assert left.seconds == 0 + 3 + 6
    left.begin("save")
    left.begin("step", "save")
    assert left.seconds == 11 + 6  # the longest of the latest steps
