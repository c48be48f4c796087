"""Tests of the update of pages in RAM during the backward, with shadow memory for their old bytes.

As in `test_speculative_update.py`, most tests pause the backward before its first block until every possible page is
updated, and the bits are those of plain torch, whatever is decided about a step.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import assert_same, batches, engine, masters, train
from test_overlap import AWAY, gpt2
from test_speculative_update import CLIP, FULL, IN_LINE, always, hold_up, kept  # noqa: F401  # fixtures

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading.pages.store import PageStore, ShadowPages
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.tiered.engine import TieredCandidate
from offload_trainer.plan.tiered.spec import TierSizes, layouts_of
from offload_trainer.settings import load_config

pytestmark = pytest.mark.usefixtures("nothing_is_small")

ALL = ["--ram-fraction", "1"]
IN_RAM = {
    "all in RAM": ALL,
    "a third in RAM": ["--ram-fraction", "0.3"],
    "weights in RAM": ["--params", "cpu", *ALL, "tiered.weight_buffers=2"],
    "weights and gradients on the drive": [*AWAY, *ALL],
    "all but the state on the drive, and half of it": [*AWAY, "--ram-fraction", "0.5"],
    "sums on the device": ["placement.gradients=gpu", "--ram-fraction", "0.6"],
    "a part on the device": ["--gpu-fraction", "0.3", "--ram-fraction", "0.4"],
}
UNCLIPPED, CLIPPED = "optim.max_grad_norm=0", "optim.max_grad_norm=0.01"
LAST = "transformer.h.0.ln_1.weight"  # one of the last gradients of a backward


def in_ram(ours: TieredEngine, numbers: Any) -> list[int]:
    """Return those of the pages `numbers` whose state is in RAM."""
    return sorted(number for number in numbers if ours.offloaded.store.in_memory(number) is not None)


def note_undone(patch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of pages that are restored from now on."""
    restore, undone = ShadowPages.restore, list[int]()

    def noted(shadows: ShadowPages, number: int) -> torch.Tensor:
        undone.append(number)
        return restore(shadows, number)

    patch.setattr(ShadowPages, "restore", noted)
    return undone


# -- pages in RAM are updated early ------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["all in RAM", "weights and gradients on the drive", "sums on the device"])
def test_pages_in_ram_are_updated_before_the_backward_has_ended(home: str, folder: Path, drive: Path) -> None:
    """The state of all later blocks is new when the backward reaches its last block, and its old bytes are kept."""
    before, found = dict[int, torch.Tensor](), dict[int, tuple[torch.Tensor, torch.Tensor]]()
    with engine(gpt2(folder), *IN_RAM[home], UNCLIPPED, FULL, drives=[drive], shadows=1.0) as ours:
        hold_up(ours)
        store, updater, blocks = ours.offloaded.store, ours.offloaded.updater, []

        def look(_: torch.Tensor) -> None:
            for number in in_ram(ours, updater._speculative.written):
                found[number] = store.in_memory(number).clone(), updater.shadows._bytes[number].clone()

        ours.offloaded.parameters[LAST][0].register_hook(look)
        blocks = [unit.index for unit in ours.offloaded.units if unit.block]
        for number in in_ram(ours, range(len(store.pages))):
            before[number] = store.in_memory(number).clone()
        train(ours, batches(1))
        ours.synchronize()
        early = [number for number in before if store.pages[number].unit in blocks[1:]]
        assert len(early) > 5
        assert set(early) <= set(found)
        for number, (new, old) in found.items():
            assert torch.equal(old, before[number])
            assert not torch.equal(new, old)
            assert torch.equal(new, store.in_memory(number))  # it is not updated again


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_only_pages_with_shadow_memory_are_updated_early(share: float, folder: Path, drive: Path) -> None:
    seen: list[int] = []
    with engine(gpt2(folder), *ALL, UNCLIPPED, FULL, shadows=share) as ours:
        hold_up(ours)
        updater, store = ours.offloaded.updater, ours.offloaded.store
        ours.offloaded.parameters[LAST][0].register_hook(lambda _: seen.extend(updater._speculative.written))
        train(ours, batches(1))
        ours.synchronize()
        some = [number for number in range(len(store.pages)) if number in updater.shadows]
        assert set(seen) <= set(some)
        assert bool(seen) == bool(some) == bool(share)
        elements = sum(store.pages[number].elements for number in some)
        assert elements <= share * sum(page.elements for page in store.pages)


@pytest.mark.slow
def test_state_on_drives_is_read_once_a_step_while_pages_in_ram_pass_through_the_same_slots(
    folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were prefetched for later units do not have to leave their slots to pages in RAM."""
    read, seen = PageStore.read, list[int]()

    def noted(store: PageStore, number: int, *given: Any, **more: Any) -> Any:
        seen.append(number)
        return read(store, number, *given, **more)

    words = ["placement.gradients=gpu", "--ram-fraction", "0.9", "tiered.page_buffers=3", UNCLIPPED, FULL]
    with engine(gpt2(folder), *words, drives=[drive], shadows=1.0) as ours:
        hold_up(ours)
        monkeypatch.setattr(PageStore, "read", noted)
        train(ours, batches(3))
        ours.synchronize()
        ahead = [page.route.number for page in ours.offloaded.updater.pipeline._prefetched]
        on_drives = [number for number, page in enumerate(ours.offloaded.store.pages) if page.home >= 0]
    assert len(on_drives) > 2
    assert sorted(seen) == sorted([*3 * on_drives, *ahead])


# -- the same bits -----------------------------------------------------------------------------------------------------


# -- late and out of order ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("limit", "skipped"), [(UNCLIPPED, 0), (CLIPPED, 0), (UNCLIPPED, 2)])
def test_a_step_that_is_decided_while_a_page_is_computed(
    limit: str,
    skipped: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: list[tuple[int, int]],  # noqa: F811
) -> None:
    """The first early page of a step is still being computed when the step is decided; no other is begun.

    After such a skipped step, the next one begins with its own pages.
    """
    model, update, decided, found = gpt2(folder), Updater._update, threading.Event(), []
    step = [0]
    end = Updater._end_speculation

    def ended(updater: Updater) -> Any:
        decided.set()
        return end(updater)

    def slow(updater: Updater, *given: Any, **words: Any) -> None:
        if updater._speculative is not None and skipped in (0, step[0]):
            assert decided.wait(300)
        update(updater, *given, **words)

    monkeypatch.setattr(Updater, "_end_speculation", ended)
    monkeypatch.setattr(Updater, "_update", slow)
    for how in (IN_LINE, FULL):
        with engine(model, *ALL, limit, how, shadows=1.0) as ours:

            def plant(grad: torch.Tensor) -> torch.Tensor:
                return grad.fill_(float("nan")) if step[0] == skipped else grad

            ours.offloaded.parameters[LAST][0].register_hook(plant)
            steps = []
            for number, batch in enumerate(batches(3), 1):
                step[0] = number
                decided.clear()
                steps += train(ours, [batch])
                ours.synchronize()
            found.append((str(steps), masters(ours)))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])
    assert len(kept) == 3 - (skipped > 0)
    assert skipped or [done for _, done in kept] == [1, 1, 1]


# -- snapshots ---------------------------------------------------------------------------------------------------------


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_plan_counts_what_is_allocated(share: float, folder: Path) -> None:
    with engine(gpt2(folder), *ALL, FULL, shadows=share) as ours:
        assert ours.offloaded.updater.shadows.nbytes == _planned(gpt2(folder), share)


def _planned(model: Path, share: float) -> int:
    """Return the bytes of shadow memory that a plan of the same sizes counts."""
    config = load_config(["--model", str(model), "--scratch", "tiered.page_size=8192", *ALL, FULL])
    shape = resolve_model(config.model, seed=0).shape
    machine, work = probe_machine(config.placement, output=str(model)), workload(config, shape)
    plan = make_plan(config, shape, machine)
    assert isinstance(plan.sizes, TierSizes)
    sizes = replace(plan.sizes, shadow_fraction=share)
    items = TieredCandidate(work, machine, plan.placement, sizes, layouts_of(work)).items()
    return sum(item.bytes for item in items if item.name == "shadow memory")
