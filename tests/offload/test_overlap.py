"""Tests of the update that overlaps the next forward: what waits for it, and what it reports. `test_schedules.py`
compares its bits.

Pages are updated slowly here, so the forward is always ahead of the update. Code that does not wait reads NaN or an old
weight, or overwrites a sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_bench import (
    ON_GPU,
    REFERENCE,
    assert_same,
    batches,
    digest,
    engine,
    masters,
    train,
)
from placements import BEHIND, HOMES, Build, skip_last_block

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.pages.manifest import read_description, read_newest
from offload_trainer.offloading.pages.store import PageStore
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.storage.transfer import Future
from offload_trainer.telemetry.meters import PhaseClock

pytestmark = pytest.mark.usefixtures("nothing_is_small", "slow_pages")


# -- every wait is needed --------------------------------------------------------------------------------------------


def test_a_weight_that_is_read_without_a_hook_is_nan(build: Build) -> None:
    """Right after a step the updated weights are NaN; after a wait none are."""
    held = threading.Event()
    with build("all in RAM", BEHIND) as ours, pytest.MonkeyPatch.context() as patch:
        walk = Updater._update_all
        patch.setattr(Updater, "_update_all", lambda *given: (held.wait(), walk(*given)))
        train(ours, batches(1))
        uses = [use for name in ours.offloaded.trained for use in ours.offloaded.parameters[name]]
        assert all(use.isnan().all() for use in uses)
        held.set()
        ours.synchronize()
        assert not any(use.isnan().any() for use in uses)


def test_a_backward_waits_for_units_that_its_forward_skipped(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's page is slow to reach the drive, and the next forward skips that block."""
    unused, commit, write = {2, 3, 5}, PlacedWeights.commit, PageStore.write
    with engine(build.model, *REFERENCE) as reference:
        expected = train(reference, batches(6), before=skip_last_block(reference, unused))
        weights = masters(reference)

    def late(begin: Callable[[], Future]) -> Future:
        home = Future()
        threading.Timer(0.1, lambda: begin().then(home.finish_part)).start()
        return home

    def committed(held: PlacedWeights, unit: int, *given: Any, **more: Any) -> Future:
        begin = partial(commit, held, unit, *given, **more)
        return late(begin) if held.units[unit].name.endswith("h.4") else begin()

    def written(store: PageStore, number: int, buffer: torch.Tensor) -> Future:
        begin = partial(write, store, number, buffer)
        return late(begin) if store.pages[number].unit == store.pages[-2].unit else begin()

    monkeypatch.setattr(PlacedWeights, "commit", committed)
    monkeypatch.setattr(PageStore, "write", written)
    words = [*HOMES["weights and gradients on the drive"], "tiered.page_buffers=99"]  # all pages are read ahead
    with build(words, BEHIND) as ours:
        assert train(ours, batches(6), before=skip_last_block(ours, unused)) == expected
        assert_same(masters(ours), weights)


# -- between steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["a third in RAM", "weights and gradients on the drive"])
def test_evaluation_masters_and_weights_wait_for_the_update(home: str, build: Build) -> None:
    """Between any two steps they see the state after the step."""
    found = []
    looks = {
        "loss": lambda ours, batch: ours.eval_loss(batch),
        "masters": lambda ours, batch: digest(masters(ours).values()),
        "last weight": lambda ours, batch: digest([ours.offloaded.weight(ours.offloaded.trained[-1])]),
        "last master": lambda ours, batch: digest([ours.offloaded.master(ours.offloaded.trained[-1])]),
    }
    for words in ([*HOMES[home], "tiered.overlap=off"], [*HOMES[home], BEHIND]):
        with build(words) as ours:
            seen = []
            for batch, look in zip(batches(4), looks.values(), strict=True):
                seen.append((train(ours, [batch]), look(ours, batch)))
            found.append((seen, digest(masters(ours).values())))
    assert found[0] == found[1]


def test_closing_waits_for_a_running_update(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, go = Updater._update_all, threading.Event()
    monkeypatch.setattr(Updater, "_update_all", lambda *given: (go.wait(300), walk(*given)))
    with build("nothing in RAM", BEHIND, "tiered.state_copies=2") as ours:
        ours.offloaded.enable_manifest(model=build.model)
        train(ours, batches(1))
        assert ours.offloaded.update_progress.is_running
        ours.commit({})
        threading.Timer(0.1, go.set).start()
        ours.close()
        (index,) = build.drive.glob("offload-trainer/run-*/store.json")
        assert read_newest(read_description(index.parent)).step == 1


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_drive_that_fails_stops_the_next_step_with_the_numbers(build: Build) -> None:
    with build("nothing in RAM", BEHIND) as ours:
        train(ours, batches(1))
        ours.synchronize()
        file = next(build.drive.glob("offload-trainer/run-*/state"))
        with open(file, "r+b") as opened:
            opened.truncate(8192)
        train(ours, batches(1))  # this step's update fails
        words = r"state: cut short: .* the file has 8192 of \d+"
        with pytest.raises(TrainerError, match=words):
            train(ours, batches(1))
        for call in (ours.synchronize, ours.snapshot, lambda: masters(ours), lambda: ours.eval_loss(batches(1)[0])):
            with pytest.raises(TrainerError, match=words):
                call()


# -- timings -----------------------------------------------------------------------------------------------------------


def test_waited_and_hidden_seconds_add_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later 0.2 s update is split into waiting and hidden time; an update without overlap reports neither."""
    walk, wait, waited_for = Updater._update_all, UpdateProgress._wait, threading.Event()

    def waiting(update_progress: UpdateProgress, future: Future) -> None:
        if not future.done:
            waited_for.set()
        wait(update_progress, future)

    def slowly(updater: Updater, step: Any) -> None:
        assert updater._thread is None or waited_for.wait(300)
        time.sleep(0.2)
        walk(updater, step)

    monkeypatch.setattr(UpdateProgress, "_wait", waiting)
    monkeypatch.setattr(Updater, "_update_all", slowly)
    for how in (BEHIND, "tiered.overlap=off"):
        clock = PhaseClock()
        with build("all in RAM", how) as ours:
            ours.train_step(batches(1), lr=1e-3, clock=clock)
            first = clock.take()
            time.sleep(0.1)
            result = ours.train_step(batches(1), lr=1e-3, clock=clock)
            second = clock.take()
        if how == BEHIND:
            assert first["wait"] == 0.0
            assert second["wait"] >= 0.2
            assert result.hidden >= 0.1
            assert min(second.values()) >= 0.0
        else:
            assert result.hidden == 0.0
            assert second["update"] >= 0.2
            assert "wait" not in second


@pytest.mark.skipif(ON_GPU, reason="there the model leaves the CPU to the update")
def test_the_update_does_not_compute_while_a_cpu_runs_the_model(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, seen = Updater._update_all, []
    monkeypatch.setattr(Updater, "_update_all", lambda *given: (seen.append(torch.get_num_threads()), walk(*given)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with build("all in RAM", BEHIND) as ours:
            train(ours, batches(1))
            ours.synchronize()
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert [*seen, torch.get_num_threads()] == [1, 3, 3]
    finally:
        torch.set_num_threads(before)


def test_an_error_in_the_update_is_raised_by_every_wait(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception is raised at the next wait, even if it occurs before anything waits."""
    with build("all in RAM", BEHIND) as ours:
        train(ours, batches(1))
        ours.synchronize()
        monkeypatch.setattr(Updater, "_update", lambda *_, **__: 1 / 0)
        train(ours, batches(1))
        with pytest.raises(ZeroDivisionError):
            train(ours, batches(1))
