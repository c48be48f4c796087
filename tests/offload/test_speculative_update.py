"""Tests of the speculative update, which starts during the backward, before its step is decided."""

import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_bench import assert_same, batches, masters, plain, saved, train
from late_transfers import FailingWrites
from placements import ALL_ON_DRIVES, AWAY, FIRST, FULL, HOMES, IN_LINE, Build, plant, skip_last_block
from seen_calls import calls_of, run_before

from offload_trainer.engine import tiered
from offload_trainer.errors import TrainerError
from offload_trainer.offloading.update.updater import SpeculativeStep, StepParams, Updater, ranges_of
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import Page, units_of
from offload_trainer.plan.tiers import RAM

pytestmark = pytest.mark.usefixtures("nothing_is_small")

ALL = ["--ram-fraction", "1"]
IN_RAM = [*ALL, "--params", "cpu", "placement.gradients=cpu"]
UNCLIPPED, CLIPPED = "optim.max_grad_norm=0", "optim.max_grad_norm=0.01"

# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_a_block_that_a_step_does_not_use_counts_its_own_steps(
    build: Build, kept: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The block is unused in some steps, so it has taken fewer; its noise depends on its own count."""
    found, unused = [], {1, 2, 4}
    for how in (IN_LINE, FULL):
        words = [*HOMES["nothing in RAM"], UNCLIPPED, "optim.moment_dtype=8bit", how]
        with build(words, held=how == FULL) as ours:
            steps = train(ours, batches(5), before=skip_last_block(ours, unused))
            found.append((steps, saved(ours, tmp_path / how)))
    assert found[0] == found[1]
    assert all(counted == done > 0 for counted, done in kept)


def test_speculative_pages_are_valid_only_with_the_expected_parameters() -> None:
    (unit,) = units_of(ModelShape((Weight("w", (60, 100), unit="h.0", block=True),), 1, 100, 50, 16))
    rule, steps = {"w": AdamW(1e-3, (0.9, 0.95), 1e-8, 0.1)}, {"w": 3}
    expected = StepParams([ranges_of(unit, rule, steps)], 0.5, 7)
    others = [
        StepParams([ranges_of(unit, rule, steps)], 0.25, 7),
        StepParams([ranges_of(unit, rule, steps)], 0.5, 8),
        StepParams([ranges_of(unit, rule, {"w": 2})], 0.5, 7),
        StepParams([ranges_of(unit, {"w": replace(rule["w"], lr=2e-3)}, steps)], 0.5, 7),
        StepParams([ranges_of(unit, {}, steps)], 0.5, 7),
    ]
    # A weight of another unit may have more steps: the noise is the unit's own.
    step = SpeculativeStep(expected)
    step.written = {0: None}  # type: ignore[dict-item]
    pages = [Page(0, 0, unit.trained, RAM)]
    assert step.kept(StepParams([ranges_of(unit, rule, steps | {"another": 4})], 0.5, 7), pages) == {0}
    assert not any(step.kept(other, pages) for other in others)


@pytest.mark.usefixtures("always")
def test_prefetched_weights_of_a_skipped_step_are_dropped(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = calls_of(monkeypatch.setattr, WeightPrefetcher, "forget")
    with build("weights in RAM", FULL) as ours:
        ours.offloaded.parameters["transformer.wpe.weight"][0].register_hook(lambda grad: grad.fill_(float("nan")))
        assert train(ours, batches(1))[0][1] is None
        assert forgotten


# -- early pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("home", "share"),
    [(["--ram-fraction", "0.6"], 0.4), ([*AWAY, "--ram-fraction", "0.5"], 1.0), ("sums on the device", 1.0)],
)
def test_pages_are_updated_before_the_backward_has_ended(home: str | list[str], share: float, build: Build) -> None:
    """Later blocks' pages are new when the backward reaches its last block, on drives and in RAM with shadow memory."""
    valid, new_and_old = dict[int, int](), dict[int, tuple[torch.Tensor, torch.Tensor]]()
    with build(home, UNCLIPPED, FULL, held=True, shadows=share) as ours:
        store, updater = ours.offloaded.store, ours.offloaded.updater
        state = {number: held for number in updater.numbers if (held := store.in_memory(number)) is not None}
        before = {number: held.clone() for number, held in state.items()}

        def look(_: torch.Tensor) -> None:
            for number in sorted(updater._speculative.written):
                valid[number] = store.copies.valid(number)
                if number in state:
                    new_and_old[number] = state[number].clone(), updater.shadows[number].clone()

        ours.offloaded.parameters[FIRST][0].register_hook(look)
        train(ours, batches(1))
        ours.synchronize()
        blocks = [unit.index for unit in ours.offloaded.units if unit.block]
        later = {number for number, page in enumerate(store.pages) if page.unit in blocks[1:]}
        away = {number for number, page in enumerate(store.pages) if page.home >= 0}
        shadowed = {number for number in state if number in updater.shadows}
        assert min(len(later & shadowed), len(later & away)) > 5
        assert later & (away | shadowed) <= valid.keys() <= away | shadowed
        assert share < 1 or later <= away | shadowed
        elements = sum(store.pages[number].elements for number in shadowed)
        assert elements <= share * sum(page.elements for page in store.pages)
        assert all(store.copies.valid(number) == 1 - valid[number] for number in later & away)
        for number, (new, old) in new_and_old.items():
            assert torch.equal(old, before[number])
            assert not torch.equal(new, old)
            assert torch.equal(new, state[number])  # it is not updated again


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("limit", "skipped"), [(UNCLIPPED, 0), (CLIPPED, 0), (UNCLIPPED, 2)])
def test_a_step_that_is_decided_while_a_page_is_computed(
    limit: str,
    skipped: int,
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    kept: list[tuple[int, int]],
) -> None:
    """The first early page of a step is still being computed when the step is decided; no other is begun."""
    decided, step, found, end = threading.Event(), [0], [], Updater._end_speculation

    def wait(updater: Updater, *_: Any, **__: Any) -> None:
        if updater._speculative is not None and skipped in (0, step[0]):
            assert decided.wait(300)

    def decide(updater: Updater) -> Any:
        speculative = end(updater)
        decided.set()
        return speculative

    monkeypatch.setattr(Updater, "_end_speculation", decide)
    run_before(monkeypatch.setattr, Updater, "_update_page", wait)
    for how in (IN_LINE, FULL):
        with build(IN_RAM, limit, how, shadows=1.0) as ours:
            spoil = plant(ours, {skipped: float("nan")})

            def before(number: int, ours: Any = ours, spoil: Any = spoil) -> None:
                ours.synchronize()
                decided.clear()
                step[0] = number
                spoil(number)

            found.append((str(train(ours, batches(3), before=before)), masters(ours)))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])
    assert len(kept) == 3 - (skipped > 0)
    assert skipped or [done for _, done in kept] == [1, 1, 1]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_plan_counts_what_is_allocated(share: float, build: Build) -> None:
    with build(ALL, FULL, shadows=share) as ours:
        planned = [item.bytes for item in ours.candidate.items if item.name == "shadow memory"]
        assert sum(memory.numel() for memory in ours.offloaded.updater.shadows.values()) == sum(planned) > 0


# -- when steps are often clipped ------------------------------------------------------------------------------------


def test_speculation_pauses_after_more_than_two_mispredictions_in_eight_steps() -> None:
    engine, found = SimpleNamespace(_surprises=deque[bool](maxlen=tiered._RECENT)), []
    for as_expected in [True, False, False, True, False, *[True] * 8]:
        engine._surprises.append(not as_expected)
        found.append(tiered.TieredEngine._as_expected.fget(engine))
    assert found == [True] * 4 + [False] * 5 + [True] * 4


@pytest.mark.parametrize(("limit", "steps"), [(0.01, 3), (0, 4)])
def test_a_run_whose_steps_are_all_clipped_stops_speculating(
    limit: float, steps: int, build: Build, kept: list[tuple[int, int]]
) -> None:
    clip = f"optim.max_grad_norm={limit}"
    with build("nothing in RAM", clip, FULL, held=True) as ours:
        assert train(ours, batches(4)) == plain(build.model, 4, clip)[0]
        assert_same(masters(ours), plain(build.model, 4, clip)[1])
    assert len(kept) == steps
    assert all(counted == (0 if limit else done) and done for counted, done in kept)


# -- between steps -----------------------------------------------------------------------------------------------------


def test_a_backward_that_fails_ends_with_its_own_error_and_the_thread_ends(build: Build) -> None:
    before = set(threading.enumerate())

    def threads_left() -> set[str]:
        return {thread.name for thread in {*threading.enumerate()} - before if thread.name.startswith("update")}

    with build("nothing in RAM", FULL, held=True) as ours:
        ours.offloaded.parameters[FIRST][0].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(ours, batches(1))
        assert threads_left()
    assert not threads_left()


@pytest.mark.parametrize(("file", "skipped"), [("state", False), ("state", True), ("gradients", False)])
def test_a_drive_that_fails_during_the_backward_is_reported(
    file: str, skipped: bool, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step whose update failed raises the error, or else the next operation that waits for it."""
    transfers = FailingWrites()
    monkeypatch.setattr("offload_trainer.engine.tiered.Transfers", lambda **_: transfers)
    with build(ALL_ON_DRIVES, FULL, held=True) as ours:
        train(ours, batches(1))
        ours.synchronize()
        transfers.failing.append(file)
        if skipped:
            ours.offloaded.parameters["transformer.wpe.weight"][0].register_hook(lambda grad: grad.fill_(float("nan")))
        with pytest.raises(TrainerError, match=r"^the drive failed$"):
            train(ours, batches(2))


def test_seconds_during_the_backward_are_hidden(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page of the step takes 0.1 s, which counts as hidden."""
    slept = []

    def sleep(updater: Updater, *_: Any, **__: Any) -> None:
        if updater._speculative is not None and not slept:
            slept.append(time.sleep(0.1))

    run_before(monkeypatch.setattr, Updater, "_update_page", sleep)
    with build("nothing in RAM", FULL, held=True) as ours:
        train(ours, batches(1))
        ours.synchronize()
        assert slept
        assert ours.offloaded.update_progress.hidden >= 0.1


def test_ranks_meet_before_an_update_changes_weights(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, start = [], Updater.start
    with build(ALL, IN_LINE) as ours:
        monkeypatch.setattr(ours.offloaded.node, "barrier", lambda: seen.append("ranks meet"))
        monkeypatch.setattr(Updater, "start", lambda *given, **words: (seen.append("update"), start(*given, **words)))
        train(ours, batches(1))
    assert seen == ["ranks meet", "update"]
