"""Tests of the speculative update, which starts during the backward, before its step is decided.

It has the bits of plain torch, whatever the params. Most tests pause the backward before its first block until every
possible page is updated, so that the outcome does not depend on timing. Tests with late copies and drives do not pause
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import assert_same, batches, digest, engine, masters, plain, saved, train
from late_engines import use_late_transfers
from late_transfers import FailingWrites, LateDevice
from test_overlap import AWAY, HOMES, gpt2
from test_tiered import skip_last_block

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.errors import TrainerError
from offload_trainer.offloading.update.updater import MispredictionWatch, SpeculativeStep, Updater, step_params_of
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import units_of

pytestmark = pytest.mark.usefixtures("nothing_is_small")

FULL = "tiered.overlap=backward"
IN_LINE = "tiered.overlap=off"
ON_DRIVES = {
    name: HOMES[name]
    for name in ("nothing in RAM", "weights in RAM", "weights and gradients on the drive", "a part on the device")
} | {
    "sums on the device": ["placement.gradients=gpu", "--ram-fraction", "0.3"],
    "state on the drive, weights and gradients there": [*AWAY, "--ram-fraction", "0"],
}
CLIP = "optim.max_grad_norm=2"


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every step speculatively, however often steps are clipped."""
    monkeypatch.setattr(MispredictionWatch, "rarely", True)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record, for each step that was started speculatively, how many of its updated pages were kept, and
    of how many.
    """
    found, its = [], SpeculativeStep.kept

    def seen(ahead: SpeculativeStep, *given: Any) -> set[int]:
        numbers = its(ahead, *given)
        found.append((len(numbers), len(ahead.written)))
        return numbers

    monkeypatch.setattr(SpeculativeStep, "kept", seen)
    return found


def hold_up(ours: TieredEngine) -> None:
    """Pause the backward at the first block's gradients until the pages of all complete units are updated."""
    updater, gradients, pages = ours.offloaded.updater, ours.offloaded.gradients, ours.offloaded.store.pages

    def wait(_: torch.Tensor) -> None:
        ahead, end = updater._speculative, time.monotonic() + 300
        if ahead is not None:
            complete = {unit for unit, lacking in gradients._missing.items() if not lacking}
            early = (n for n, page in enumerate(pages) if page.home >= 0 or n in updater.shadows)
            wanted = {number for number in early if pages[number].unit in complete}
            while not (ahead.error or wanted <= ahead.written.keys()):
                assert time.monotonic() < end
                time.sleep(0.0005)

    ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(wait)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_a_block_that_a_step_does_not_use_counts_its_own_steps(
    folder: Path, drive: Path, kept: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The block is unused from the first step, so the others have taken more; noise depends on the largest count of
    steps.
    """
    found, unused = [], {1, 2, 4}
    for how in (IN_LINE, FULL):
        words = [*HOMES["nothing in RAM"], "optim.max_grad_norm=0", "optim.moment_dtype=8bit", how]
        with engine(gpt2(folder), *words, drives=[drive]) as ours:
            if how == FULL:
                hold_up(ours)
            steps = train(ours, batches(5), before=skip_last_block(ours, unused))
            found.append((steps, saved(ours, tmp_path / how)))
    assert found[0] == found[1]
    assert all(counted == done > 0 for counted, done in kept)


def test_speculative_pages_are_valid_only_with_the_expected_parameters() -> None:
    unit = units_of(ModelShape((Weight("w", (60, 100), unit="h.0", block=True),), 1, 100, 50, 16))
    rule, steps = {"w": AdamW(1e-3, (0.9, 0.95), 1e-8, 0.1)}, {"w": 3}
    expected = step_params_of(unit, rule, steps, scale=0.5, noise_seed=7)
    others = [
        step_params_of(unit, rule, steps, scale=0.25, noise_seed=7),
        # the new weight has more steps, so the noise differs
        step_params_of(unit, rule, steps | {"another": 4}, scale=0.5, noise_seed=7),
        step_params_of(unit, rule, {"w": 2}, scale=0.5, noise_seed=None),
        step_params_of(unit, {"w": replace(rule["w"], lr=2e-3)}, steps, scale=0.5, noise_seed=7),
        step_params_of(unit, {}, steps, scale=0.5, noise_seed=7),
    ]
    assert expected.same_for(step_params_of(unit, rule, dict(steps), scale=0.5, noise_seed=7), 0)
    assert not any(expected.same_for(other, 0) for other in others)


def test_a_step_that_is_skipped_while_copies_and_reads_are_late(
    folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2, 4 and 5 of 7 are skipped with transfers in flight. The step after 4 is not speculative, the one after 5
    is.
    """
    model, words, found = gpt2(folder), ["--dtype", "bf16", "optim.max_grad_norm=0"], []
    ahead = iter([True, True, True, True, False, True, True])
    monkeypatch.setattr(MispredictionWatch, "rarely", property(lambda _: next(ahead)))
    for how in (IN_LINE, FULL):
        if how == FULL:
            use_late_transfers(monkeypatch)
        given = LateDevice() if how == FULL else None
        with engine(
            model, *HOMES["weights and gradients on the drive"], *words, how, drives=[drive], device=given
        ) as ours:
            step = [0]

            def plant(grad: torch.Tensor, step: Any = step) -> torch.Tensor:
                return grad.fill_(float("nan")) if step[0] in (2, 4, 5) else grad

            ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(plant)
            steps = train(ours, batches(7), before=lambda number, step=step: step.__setitem__(0, number))
            found.append(str((steps, digest(masters(ours).values()))))
    assert found[0] == found[1]


@pytest.mark.usefixtures("always")
def test_prefetched_weights_of_a_skipped_step_are_dropped(
    folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, forgotten = WeightPrefetcher.forget, []
    monkeypatch.setattr(WeightPrefetcher, "forget", lambda stream: (forgotten.append(True), forget(stream)))
    with engine(gpt2(folder), *HOMES["weights in RAM"], FULL, drives=[drive]) as ours:
        ours.offloaded.parameters["transformer.wpe.weight"][0].register_hook(lambda grad: grad.fill_(float("nan")))
        assert train(ours, batches(1))[0][1] is None
        assert forgotten


# -- every wait is needed --------------------------------------------------------------------------------------------


def test_pages_are_written_during_the_backward_and_copies_flip_after_it(folder: Path, drive: Path) -> None:
    """During the backward the pages of complete units are written, but the committed copy changes only afterwards."""
    seen = []
    with engine(gpt2(folder), *HOMES["nothing in RAM"], FULL, drives=[drive]) as ours:
        store, updater = ours.offloaded.store, ours.offloaded.updater
        hold_up(ours)

        def look(_: torch.Tensor) -> None:
            numbers = sorted(updater._speculative.written)
            seen.append([(n, store.copies.valid(n)) for n in numbers])

        ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(look)
        train(ours, batches(1))
        ours.synchronize()
        blocks = {unit.index for unit in ours.offloaded.units if unit.block}
        ahead = [n for n, page in enumerate(store.pages) if page.unit in blocks and page.unit != min(blocks)]
        assert set(ahead) <= {number for number, _ in seen[0]}
        before = dict(seen[0])
        assert all(store.copies.valid(number) == 1 - before[number] for number in ahead)


def test_a_unit_reported_too_late_is_not_offered_to_the_next_step(folder: Path, drive: Path) -> None:
    with engine(gpt2(folder), *HOMES["nothing in RAM"], FULL, drives=[drive]) as ours:
        hold_up(ours)
        moving, seen = ours.offloaded.updater.pipeline, []

        def late(_: torch.Tensor) -> None:
            moving.offer(SpeculativeStep(step_params_of((), {}, {}, scale=1.0, noise_seed=None)), 0, None, None)
            seen.append((len(moving._waiting), len(moving._in_slots)))

        ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(late)
        train(ours, batches(1))
    assert seen == [(0, 0)]


# -- when steps are often clipped ------------------------------------------------------------------------------------


def test_speculation_pauses_after_more_than_two_mispredictions_in_eight_steps() -> None:
    watch, found = MispredictionWatch(), []
    for as_expected in [True, False, False, True, False, *[True] * 8]:
        watch.decided(as_expected=as_expected)
        found.append(watch.rarely)
    assert found == [True] * 4 + [False] * 5 + [True] * 4


@pytest.mark.parametrize(("limit", "steps"), [(0.01, 3), (0, 4)])
def test_a_run_whose_steps_are_all_clipped_stops_speculating(
    limit: float, steps: int, folder: Path, drive: Path, kept: list[tuple[int, int]]
) -> None:
    model, clip = gpt2(folder), f"optim.max_grad_norm={limit}"
    with engine(model, *HOMES["nothing in RAM"], clip, FULL, drives=[drive]) as ours:
        hold_up(ours)
        assert train(ours, batches(4)) == plain(model, 4, clip)[0]
        assert_same(masters(ours), plain(model, 4, clip)[1])
    assert len(kept) == steps
    assert all(counted == (0 if limit else done) and done for counted, done in kept)


# -- between steps -----------------------------------------------------------------------------------------------------


@pytest.fixture
def threads_left() -> Callable[[], set[threading.Thread]]:
    before = set(threading.enumerate())
    return lambda: {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("update")}


def test_a_backward_that_fails_ends_with_its_own_error_and_the_thread_ends(
    folder: Path, drive: Path, threads_left: Callable[[], set[threading.Thread]]
) -> None:
    with engine(gpt2(folder), *HOMES["nothing in RAM"], FULL, drives=[drive]) as ours:
        hold_up(ours)
        ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(ours, batches(1))
        assert threads_left()
    assert not threads_left()


@pytest.mark.parametrize(("file", "skipped"), [("state", False), ("state", True), ("gradients", False)])
def test_a_drive_that_fails_during_the_backward_is_reported(
    file: str, skipped: bool, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step whose update failed raises the error, or else the next operation that waits for it."""
    transfers = FailingWrites()
    monkeypatch.setattr("offload_trainer.engine.build_tiered.Transfers", lambda **_: transfers)
    with engine(
        gpt2(folder), *ON_DRIVES["state on the drive, weights and gradients there"], FULL, drives=[drive]
    ) as ours:
        hold_up(ours)
        train(ours, batches(1))
        ours.synchronize()
        transfers.failing.append(file)
        if skipped:
            ours.offloaded.parameters["transformer.wpe.weight"][0].register_hook(lambda grad: grad.fill_(float("nan")))
        with pytest.raises(TrainerError, match=r"^the drive failed$"):
            train(ours, batches(2))


def test_seconds_during_the_backward_are_hidden(folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page of the step takes 0.1 s, which counts as hidden."""
    update, slept = Updater._update, []

    def slowly(updater: Updater, *given: Any, **words: Any) -> None:
        if updater._speculative is not None and not slept:
            slept.append(time.sleep(0.1))
        update(updater, *given, **words)

    monkeypatch.setattr(Updater, "_update", slowly)
    with engine(gpt2(folder), *HOMES["nothing in RAM"], FULL, drives=[drive]) as ours:
        hold_up(ours)
        train(ours, batches(1))
        ours.synchronize()
        assert slept
        assert ours.offloaded.update_progress.hidden >= 0.1
