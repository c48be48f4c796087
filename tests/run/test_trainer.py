"""Tests of the training loop: signals that arrive while ranks exchange requests or save, and the slowest rank."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_trainer import trainer
from offload_trainer.ranks import all_gather_json
from offload_trainer.signals import StopRequest
from offload_trainer.telemetry.meters import IoCount
from offload_trainer.telemetry.time_to_save import TimeToSave


class Unsaved(nullcontext):
    """Checkpoints of a run that saves none."""

    ended = False


def job_of(monkeypatch: pytest.MonkeyPatch, *, revised_at: int = 0) -> Any:
    """Return a job whose steps only count, and which wants another plan after step `revised_at`."""

    def step(job: Any, state: Any, batches: Any) -> Any:
        job.revised = "another plan" if state.step + 1 == revised_at else None
        return replace(state, step=state.step + 1)

    monkeypatch.setattr(trainer, "_step", step)
    monkeypatch.setattr(trainer, "_evaluate", lambda job, step: None)
    return SimpleNamespace(
        train=SimpleNamespace(steps=9, micro_batch_size=1, eval_every=0, sample_every=0),
        train_rows=SimpleNamespace(train_batches=lambda *_, **__: iter(())),
        engine=SimpleNamespace(rank=0, world=1),
        checkpoints=Unsaved(),
        to_save=TimeToSave(step=None, save=0.0),
        commit=None,
        revised=None,
        telemetry=None,
        sample=None,
    )


@pytest.mark.parametrize("at", [1, 2])
def test_a_signal_that_comes_while_the_ranks_agree_is_not_forgotten(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives while ranks exchange requests after a step is handled after the next one."""
    asked, agreed, saved = StopRequest(), [], []

    def slowly(said: Any) -> Any:
        answers = all_gather_json(said)
        agreed.append(said)
        if len(agreed) == at:
            asked.stop = signal.SIGTERM  # the handler sets it
        return answers

    monkeypatch.setattr(trainer, "all_gather_json", slowly)
    monkeypatch.setattr(trainer, "_save_if_due", lambda job, state, **why: saved.append((state.step, why["stopping"])))
    state = trainer.train(job_of(monkeypatch), asked)
    assert state.step == at + 1
    assert saved[-1] == (at + 1, True)
    assert asked.stop == signal.SIGTERM


@pytest.mark.parametrize("other", [0, signal.SIGTERM])
def test_a_signal_to_another_rank_while_a_change_is_saved_stops_the_run(
    other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks change their plan, or all of them stop."""
    asked, job, saved = StopRequest(), job_of(monkeypatch, revised_at=3), list[int]()

    def with_another_rank(said: Any) -> Any:
        return [said, other if saved else said]

    def save(job: Any, state: Any) -> bool:
        saved.append(state.step)
        return True

    monkeypatch.setattr(trainer, "all_gather_json", with_another_rank)
    monkeypatch.setattr(trainer, "_saved_for_change", save)
    monkeypatch.setattr(trainer, "_save_if_due", lambda *_, **__: None)
    state = trainer.train(job, asked)
    assert (state.step, saved) == (3, [3])
    assert asked.stop == other
    assert job.revised == (None if other else "another plan")


def test_the_slowest_rank_is_the_one_for_which_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster rank has the shorter forward, and waits in its backward."""
    fast, slow = {"forward": 2.0, "backward": 2.0}, {"forward": 3.0, "backward": 1.0}
    for mine, others in ((fast, slow), (slow, fast)):
        other = (1, 2, 30, others)
        monkeypatch.setattr(trainer, "all_gather_json", lambda said, other=other: [said, other])
        job: Any = SimpleNamespace(engine=SimpleNamespace(world=2))
        found = trainer._of_all_ranks(job, IoCount(4, 5), tokens=10, phases=mine)
        assert found == (IoCount(5, 7), 40, slow)
