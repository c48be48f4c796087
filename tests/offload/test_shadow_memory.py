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
from engine_bench import ON_GPU, assert_same, batches, digest, engine, masters, plain, saved, train
from late_engines import engine_on_streams, late_engine
from test_overlap import AWAY, gpt2
from test_speculative_update import CLIP, FULL, IN_LINE, always, hold_up, kept  # noqa: F401  # fixtures

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading.pages.store import PageStore, ShadowPages
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.optim import loss_scale
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.tiered.engine import TieredCandidate
from offload_trainer.plan.tiered.spec import Layouts, TierSizes
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


def one_in(count: int, model: Path, steps: int) -> str:
    """Return a limit that about one in `count` of the first steps exceeds."""
    norms = sorted((norm or 0.0 for _, norm in plain(model, steps, UNCLIPPED)[0]), reverse=True)
    return f"optim.max_grad_norm={norms[steps // count - 1] * 0.999}"


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


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("home", "share"), [*zip(IN_RAM, [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0], strict=True)])
def test_steps_match_plain_torch(
    home: str,
    share: float,
    folder: Path,
    drive: Path,
    kept: list[tuple[int, int]],  # noqa: F811
) -> None:
    """bf16 with dropout. About one in four steps is clipped: its early pages are restored and updated again."""
    model = gpt2(folder)
    clip = one_in(4, model, 12)
    expected, weights = plain(model, 12, clip)
    clipped = [norm is not None and norm > float(clip.split("=")[1]) for _, norm in expected]
    assert 0 < sum(clipped) <= 6
    with engine(model, *IN_RAM[home], clip, FULL, drives=[drive], shadows=share) as ours:
        hold_up(ours)
        assert train(ours, batches(12)) == expected
        assert_same(masters(ours), weights)
        some = any(page.home >= 0 or n in ours.offloaded.updater.shadows for n, page in _pages(ours))
    assert [(counted, done > 0) for counted, done in kept] == [
        (0 if was else done, some) for was, (_, done) in zip(clipped, kept, strict=True)
    ]


def _pages(ours: TieredEngine) -> list[tuple[int, Any]]:
    return list(enumerate(ours.offloaded.store.pages))


@pytest.mark.usefixtures("always")
def test_every_step_is_clipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undone = note_undone(monkeypatch)
    model = gpt2(folder)
    with engine(model, *ALL, CLIPPED, FULL, shadows=1.0) as ours:
        hold_up(ours)
        assert train(ours, batches(5)) == plain(model, 5, CLIPPED)[0]
        assert_same(masters(ours), plain(model, 5, CLIPPED)[1])
    assert len(undone) >= 5


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_moments_that_are_rounded_stochastically(folder: Path, tmp_path: Path) -> None:
    found = []
    for how in (IN_LINE, FULL):
        with engine(gpt2(folder), *ALL, CLIP, "optim.moment_dtype=8bit", how, shadows=0.7) as ours:
            if how == FULL:
                hold_up(ours)
            found.append((train(ours, batches(8)), saved(ours, tmp_path / how)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("home", ["all in RAM", "weights and gradients on the drive"])
def test_accumulation_and_frozen_weights(home: str, folder: Path, drive: Path) -> None:
    model = gpt2(folder, tied=False)
    words = ["--accumulate", "3", CLIP, 'model.freeze=["wpe","h.1.mlp"]']
    expected, weights = plain(model, 4, *words, accumulate=3)
    with engine(model, *IN_RAM[home], *words, FULL, drives=[drive], shadows=1.0) as ours:
        hold_up(ours)
        assert train(ours, batches(12), accumulate=3) == expected
        assert_same(masters(ours), weights)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("home", "dtype"),
    [("all in RAM", "fp16"), ("weights and gradients on the drive", "bf16"), ("a part on the device", "fp16")],
)
def test_a_skipped_step_is_undone(
    home: str, dtype: str, folder: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overflow and NaN in steps 1, 3 and 4 of 6 leave weights and state unchanged; fp16 halves its scale."""
    undone = note_undone(monkeypatch)
    monkeypatch.setattr(loss_scale, "WINDOW", 3)
    words = ["--dtype", dtype]
    found = []
    for how in (IN_LINE, FULL):
        with engine(gpt2(folder), *IN_RAM[home], *words, how, drives=[drive], shadows=0.6) as ours:
            planted = {1: float("inf"), 3: float("inf"), 4: float("nan")}
            step, seen = [0], []

            def plant(grad: torch.Tensor, step: Any = step, planted: Any = planted) -> torch.Tensor:
                return grad.fill_(planted[step[0]]) if step[0] in planted else grad

            ours.offloaded.parameters[LAST][0].register_hook(plant)
            if how == FULL:
                hold_up(ours)
            for number, batch in enumerate(batches(6), 1):
                step[0] = number
                seen.append(train(ours, [batch]))
                seen.append(digest(map(ours.offloaded.weight, ours.offloaded.trained)))
                seen.append(digest(masters(ours).values()))
            found.append((str(seen), ours._scale.value, saved(ours, tmp_path / how)))
    assert found[0] == found[1]
    assert undone


# -- late and out of order ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("home", "accumulate"), [*zip(IN_RAM, [1, 2, 1, 2, 1, 2, 1], strict=True)])
def test_late_copies_and_reads_change_nothing(
    home: str, accumulate: int, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward is not paused: some pages are in flight when the step is decided. Some steps are clipped."""
    model, words = gpt2(folder), ["--accumulate", str(accumulate), CLIP]
    expected, weights = plain(model, 4, *words, accumulate=accumulate)
    with late_engine(monkeypatch, model, *IN_RAM[home], *words, FULL, drives=[drive], shadows=0.8) as ours:
        assert train(ours, batches(4 * accumulate), accumulate=accumulate) == expected
        assert_same(masters(ours), weights)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.skipif(ON_GPU, reason="the stand-in's queues are for the CPU's memory")
@pytest.mark.parametrize("home", IN_RAM)
def test_queues_that_run_late_change_nothing(home: str, folder: Path, drive: Path, monkeypatch: Any) -> None:
    """New weights of pages in RAM pass through slots if the device has separate memory."""
    model = gpt2(folder)
    with engine_on_streams(monkeypatch, model, *IN_RAM[home], CLIP, FULL, drives=[drive], shadows=0.8) as ours:
        assert train(ours, batches(4)) == plain(model, 4, CLIP)[0]
        assert_same(masters(ours), plain(model, 4, CLIP)[1])


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


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("home", "limit"),
    [("all in RAM", UNCLIPPED), ("a third in RAM", CLIP), ("weights and gradients on the drive", CLIP)],
)
def test_a_snapshot_is_of_its_step(home: str, limit: str, folder: Path, drive: Path, tmp_path: Path) -> None:
    """It is written while the next step's backward already updates pages, and a run resumes from it."""
    model = gpt2(folder)
    with engine(model, *IN_RAM[home], limit, IN_LINE, drives=[drive]) as ours:
        train(ours, batches(8)[:4])
        expected = saved(ours, tmp_path / "in line")
    with engine(model, *IN_RAM[home], limit, FULL, drives=[drive], shadows=1.0) as ours:
        found = train(ours, batches(8)[:4])
        snapshot = ours.snapshot()
        (tmp_path / "full").mkdir()
        writing = threading.Timer(0.3, snapshot.write, args=[tmp_path / "full"])
        writing.start()
        found += train(ours, batches(8)[4:])
        writing.join()
        assert found == plain(model, 8, limit)[0]
        assert {path.name: path.read_bytes() for path in (tmp_path / "full").iterdir()} == expected
        ours.load(tmp_path / "full")
        assert train(ours, batches(8)[4:]) == plain(model, 8, limit)[0][4:]


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
    items = TieredCandidate(work, machine, plan.placement, sizes, Layouts(work)).items()
    return sum(item.bytes for item in items if item.name == "shadow memory")
