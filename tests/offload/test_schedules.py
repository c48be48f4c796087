"""Tests of the update that overlaps the next forward or this backward: waits, errors, skipped steps, snapshots."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import ON_GPU, REFERENCE, assert_same, batches, engine, masters, plain, saved, skip_last_block, train
from placements import ALL_ON_DRIVES, AWAY, BEHIND, CLIP, FULL, HOMES, IN_LINE, Build, digest, plant
from seen_calls import calls_of, run_before

from offload_trainer.common.errors import TrainerError
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.device import limit_cores
from offload_trainer.offloading.pages.manifest import read_description, read_newest
from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.offloading.pages.store import PageStore
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.offloading.update.updater import Updater
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.optim import state_files
from offload_trainer.storage.transfer import Future, Workers
from offload_trainer.telemetry.meters import PhaseClock

pytestmark = pytest.mark.usefixtures("nothing_is_small", "always", "slow_pages")

QUICK = ("nothing in RAM", "a third in RAM")  # the others are only for `make test-all`
IN_RAM = [*AWAY, "--ram-fraction", "1"]
NATIVE = [*IN_RAM, "optim.kernel=native"]  # it copies old state in the pass that updates it


@pytest.mark.parametrize(
    "home",
    [
        *[pytest.param(h, marks=() if h in QUICK else pytest.mark.slow) for h in HOMES if h != "all on the device"],
        pytest.param(NATIVE, id="native kernel"),
    ],
)
def test_clipped_steps_update_early_pages_again(
    home: str | list[str], build: Build, kept: list[tuple[int, int]]
) -> None:
    """bf16 with dropout. About one in four steps is clipped."""
    steps = 8
    norms = sorted(norm or 0.0 for _, norm in plain(build.model, steps, "optim.max_grad_norm=0")[0])
    limit = norms[-steps // 4] * 0.999
    clip = f"optim.max_grad_norm={limit}"
    expected, weights = plain(build.model, steps, clip)
    clipped = [norm is not None and norm > limit for _, norm in expected]
    assert 0 < sum(clipped) < steps
    with build(home, clip, FULL, held=True, shadows=0.6) as ours:
        assert train(ours, batches(steps)) == expected
        assert_same(masters(ours), weights)
    assert [(counted, done > 0) for counted, done in kept] == [
        (0 if was else done, True) for was, (_, done) in zip(clipped, kept, strict=True)
    ]


DRIVES = HOMES["weights and gradients on the drive"]
SKIPPED = {  # placement, schedule, share of shadow memory, dtype, and whether transfers are late
    "forward": (DRIVES, BEHIND, 0.0, "fp16", False),
    "backward": (HOMES["nothing in RAM"], FULL, 0.0, "fp16", False),
    "shadow memory, late": (IN_RAM, FULL, 0.6, "bf16", True),
    "native kernel": ([*NATIVE, "optim.moment_dtype=8bit", "optim.master_dtype=bf16"], FULL, 0.6, "bf16", False),
    "a part on the device": (HOMES["a part on the device"], FULL, 1.0, "fp16", False),
    "shadow memory": (IN_RAM, FULL, 0.6, "bf16", False),
    "drives, late": (DRIVES, FULL, 0.0, "bf16", True),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if n < 4 else pytest.mark.slow) for n, case in enumerate(SKIPPED)]
)
def test_skipped_steps_change_nothing(case: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overflow and NaN in steps 1, 3 and 4 of 6 leave weights and state unchanged; fp16 halves its scale."""
    home, schedule, shadows, dtype, late = SKIPPED[case]
    monkeypatch.setattr(state_files, "WINDOW", 3)
    if late:
        begun = iter([True, True, True, False, True, True])
        monkeypatch.setattr(TieredEngine, "_as_expected", property(lambda _: next(begun)))
    found = []
    for how in (IN_LINE, schedule):
        delayed = late and how != IN_LINE and not ON_GPU  # a GPU has its own transfers
        words = {"late": monkeypatch if delayed else None, "held": how == FULL and not late}
        with build(home, "--dtype", dtype, how, **words, shadows=shadows) as ours:
            before = plant(ours, {1: float("inf"), 3: float("inf"), 4: float("nan")})
            seen = []
            for number, batch in enumerate(batches(6), 1):
                before(number)
                seen.append(train(ours, [batch]))
                seen.append(digest(map(ours.offloaded.weight, ours.offloaded.trained)))
                seen.append(digest(masters(ours).values()))
            found.append((str(seen), ours.offloaded.loss_scale.value, saved(ours, tmp_path / how)))
    assert found[0] == found[1]


SNAPSHOTS = {  # placement, schedule, share of shadow memory; on the device transfers are late
    "on the device": (["--gpu-fraction", "1"], IN_LINE, 0.0),
    "in all tiers, a part on the device": ([*AWAY, "--gpu-fraction", "0.3", "--ram-fraction", "0.3"], IN_LINE, 0.0),
    "off": (["--ram-fraction", "0.5", "optim.moment_dtype=8bit"], IN_LINE, 0.0),
    "forward, frozen": ([*ALL_ON_DRIVES, 'model.freeze=["h.1.mlp","wpe"]', "optim.moment_dtype=8bit"], BEHIND, 0.0),
    "forward, two copies": ([*HOMES["two copies on the drive"], CLIP], BEHIND, 0.0),
    "backward, all in RAM": (["--ram-fraction", "1", "optim.max_grad_norm=0"], FULL, 1.0),
    "backward, half in RAM": ([*AWAY, "--ram-fraction", "0.5", CLIP], FULL, 1.0),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "on the device" in case else pytest.mark.slow) for case in SNAPSHOTS]
)
def test_a_snapshot_is_of_its_step(case: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written while later steps already update pages, and a run resumes from it, also during an update."""
    (home, how, shadows), data = SNAPSHOTS[case], batches(6)
    with build(home, IN_LINE) as ours:
        steps = train(ours, data[:3])
        expected = saved(ours, tmp_path / "in line")
        steps += train(ours, data[3:])
        weights = masters(ours)
    late = monkeypatch if "on the device" in case and not ON_GPU else None
    with build(home, how, shadows=shadows, late=late) as ours:
        run_before(monkeypatch.setattr, TieredSnapshot, "_put", lambda *_: time.sleep(0.01))
        found = train(ours, data[:3])
        snapshot = ours.snapshot()
        (tmp_path / "meanwhile").mkdir()
        writing = threading.Timer(0.1, snapshot.write, args=[tmp_path / "meanwhile"])
        writing.start()
        found += train(ours, data[3:])
        writing.join()
        assert found == steps
        assert {path.name: path.read_bytes() for path in (tmp_path / "meanwhile").iterdir()} == expected
        for _ in range(2):  # the second time an update may still be running
            ours.load(tmp_path / "meanwhile")
            assert train(ours, data[3:]) == steps[3:]
        assert_same(masters(ours), weights)


def test_a_weight_that_is_read_without_a_hook_is_nan(build: Build) -> None:
    held = threading.Event()
    with build("all in RAM", BEHIND) as ours, pytest.MonkeyPatch.context() as patch:
        run_before(patch.setattr, Updater, "_update_all", lambda *_: held.wait())
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


@pytest.mark.parametrize("home", ["a third in RAM", "weights and gradients on the drive"])
def test_evaluation_masters_and_weights_wait_for_the_update(home: str, build: Build) -> None:
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
    go = threading.Event()
    run_before(monkeypatch.setattr, Updater, "_update_all", lambda *_: go.wait(300))
    with build("nothing in RAM", BEHIND, "tiered.state_copies=2") as ours:
        ours.offloaded.enable_manifest(model=build.model)
        train(ours, batches(1))
        assert ours.offloaded.update_progress.is_running
        ours.commit({})
        threading.Timer(0.1, go.set).start()
        ours.close()
        (index,) = build.drive.glob("offload-trainer/run-*/store.json")
        assert read_newest(read_description(index.parent)).step == 1


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


def test_waited_and_hidden_seconds_add_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later 0.2 s update is split into waiting and hidden time; an update without overlap reports neither."""
    waited_for = threading.Event()

    def sleep(updater: Updater, *_: Any) -> None:
        assert updater._thread is None or waited_for.wait(300)
        time.sleep(0.2)

    run_before(monkeypatch.setattr, UpdateProgress, "_wait", lambda _, future: future.done or waited_for.set())
    run_before(monkeypatch.setattr, Updater, "_update_all", sleep)
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


@pytest.mark.skipif(ON_GPU, reason="there some threads launch kernels")
def test_the_update_beside_a_cpus_model_uses_all_cores(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls_of(monkeypatch.setattr, Updater, "_update_all", lambda *_: torch.get_num_threads())
    torch.set_num_threads(3)
    with build("all in RAM", BEHIND) as ours:
        train(ours, batches(1))
        ours.synchronize()
    assert seen == [3]


def test_limiting_a_threads_cores_leaves_the_others_theirs() -> None:
    seen: list[int] = []
    limited = Workers(1, "limited")
    torch.set_num_threads(3)
    limit_cores(limited, 1)
    limited.submit(lambda: seen.append(torch.get_num_threads())).wait()
    limited.close()
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert [*seen, torch.get_num_threads()] == [1, 3, 3]
