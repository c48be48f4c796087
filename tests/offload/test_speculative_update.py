"""Tests of the speculative update, which starts during the backward, before its step is decided, and of its waits."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dead_run_files import stored_masters
from engine_bench import assert_same, batches, masters, plain, saved, skip_last_block, train
from placements import ALL_ON_DRIVES, AWAY, FIRST, FULL, HOMES, IN_LINE, Build, digest, plant
from seen_calls import calls_of, run_before, until

from offload_trainer.common.errors import TrainerError
from offload_trainer.engine import tiered
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.manifest import ManifestWriter
from offload_trainer.offloading.pages.store import PageStore
from offload_trainer.offloading.update.updater import PagePipeline, Updater
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.tiered.spec import Route
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, together

pytestmark = pytest.mark.usefixtures("nothing_is_small")

IN_RAM = ["--ram-fraction", "1", "--params", "cpu", "placement.gradients=cpu"]
UNCLIPPED, CLIPPED = "optim.max_grad_norm=0", "optim.max_grad_norm=0.01"


@pytest.mark.usefixtures("always")
def test_an_unused_block_counts_its_own_steps(build: Build, kept: list[tuple[int, int]], tmp_path: Path) -> None:
    """The block is unused in some steps, so it has taken fewer; its noise depends on its own count."""
    found, unused = [], {1, 2, 4}
    for how in (IN_LINE, FULL):
        words = [*HOMES["nothing in RAM"], UNCLIPPED, "optim.moment_dtype=8bit", how]
        with build(words, held=how == FULL) as ours:
            steps = train(ours, batches(5), before=skip_last_block(ours, unused))
            found.append((steps, saved(ours, tmp_path / how)))
    assert found[0] == found[1]
    assert all(counted == done > 0 for counted, done in kept)


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
            for number in sorted(updater.announced.written):
                valid[number] = store.copies.valid[number]
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
        planned = [item.bytes for item in ours.candidate.items if item.name == "shadow memory"]
        assert sum(memory.numel() for memory in updater.shadows.values()) == sum(planned)
        elements = sum(store.pages[number].elements for number in shadowed)
        assert elements <= share * sum(page.elements for page in store.pages)
        assert all(store.copies.valid[number] == 1 - valid[number] for number in later & away)
        for number, (new, old) in new_and_old.items():
            assert torch.equal(old, before[number])
            assert not torch.equal(new, old)
            assert torch.equal(new, state[number])  # it is not updated again


@pytest.mark.usefixtures("always")
def test_prefetched_weights_of_a_skipped_step_are_dropped(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = calls_of(monkeypatch.setattr, WeightPrefetcher, "forget")
    with build("weights in RAM", FULL) as ours:
        ours.offloaded.parameters["transformer.wpe.weight"][0].register_hook(lambda grad: grad.fill_(float("nan")))
        assert train(ours, batches(1))[0][1] is None
        assert forgotten


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("limit", "skipped"), [(UNCLIPPED, 0), (CLIPPED, 0), (UNCLIPPED, 2)])
def test_a_step_that_is_decided_while_a_page_is_computed(
    limit: str, skipped: int, build: Build, monkeypatch: pytest.MonkeyPatch, kept: list[tuple[int, int]]
) -> None:
    """The first early page of a step is still being computed when the step is decided; no other is begun."""
    decided, step, found, end = threading.Event(), [0], [], Updater._end_speculation

    def wait(updater: Updater, *_: Any, **__: Any) -> None:
        if updater.announced is not None and skipped in (0, step[0]):
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


def test_speculation_pauses_after_more_than_two_mispredictions_in_eight_steps() -> None:
    engine, found = SimpleNamespace(_surprises=deque[bool](maxlen=tiered._RECENT)), []
    for as_expected in [True, False, False, True, False, *[True] * 8]:
        engine._surprises.append(not as_expected)
        found.append(tiered.TieredEngine._as_expected.fget(engine))
    assert found == [True] * 4 + [False] * 5 + [True] * 4


@pytest.mark.parametrize(("limit", "steps"), [(0.01, 3), (0, 4)])
def test_clipped_steps_stop_speculation(limit: float, steps: int, build: Build, kept: list[tuple[int, int]]) -> None:
    clip = f"optim.max_grad_norm={limit}"
    with build("nothing in RAM", clip, FULL, held=True) as ours:
        assert train(ours, batches(4)) == plain(build.model, 4, clip)[0]
        assert_same(masters(ours), plain(build.model, 4, clip)[1])
    assert len(kept) == steps
    assert all(counted == (0 if limit else done) and done for counted, done in kept)


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
def test_a_drive_fails_in_the_backward(file: str, skipped: bool, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
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
    slept = []

    def sleep(updater: Updater, *_: Any, **__: Any) -> None:
        if updater.announced is not None and not slept:
            slept.append(time.sleep(0.1))

    run_before(monkeypatch.setattr, Updater, "_update_page", sleep)
    with build("nothing in RAM", FULL, held=True) as ours:
        train(ours, batches(1))
        ours.synchronize()
        assert slept
        assert ours.offloaded.update_progress.hidden >= 0.1


def test_ranks_meet_before_an_update_changes_weights(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, start = [], Updater.start
    with build("all in RAM", IN_LINE) as ours:
        monkeypatch.setattr(ours.offloaded.node, "barrier", lambda: seen.append("ranks meet"))
        monkeypatch.setattr(Updater, "start", lambda *given, **words: (seen.append("update"), start(*given, **words)))
        train(ours, batches(1))
    assert seen == ["ranks meet", "update"]


# -- each of the following fails if its wait is removed ----------------------------------------------------------------


class FailingWrites(Transfers):
    """Transfers whose writes to the files that `failing` names fail."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = list(failing)

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        if file.path.name not in self.failing:
            return super().write(file, offset, buffer)
        future = Future()
        future.finish_part(TrainerError("the drive failed"))
        return future


class HeldWrites(Transfers):
    """Transfers that delay the next `hold[name]` writes; `crossed` lists requests for the same bytes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.hold: dict[str, int] = {}
        self.patience = 0.5
        self.go = threading.Event()
        self.crossed: list[str] = []
        self.held: list[tuple[DriveFile, int, torch.Tensor]] = []
        self._lock = threading.Lock()

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        with self._lock:
            self._look("read", file, offset, buffer)
        return super().read(file, offset, buffer)

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        future = Future()

        def later() -> None:
            self.go.wait(self.patience)
            with self._lock:
                self.held = [one for one in self.held if one[2] is not buffer]
                arrived = Transfers.write(self, file, offset, buffer)
            arrived.then(future.finish_part)

        with self._lock:
            self._look("written", file, offset, buffer)
            if not self.hold.get(file.path.name):
                return super().write(file, offset, buffer)
            self.hold[file.path.name] -= 1
            self.held.append((file, offset, buffer))
        threading.Thread(target=later, daemon=True).start()
        return future

    def _look(self, verb: str, file: DriveFile, offset: int, buffer: torch.Tensor) -> None:
        for its, start, memory in self.held:
            if its is file and start < offset + buffer.nbytes and offset < start + memory.nbytes:
                self.crossed.append(f"{file.path.name}: {verb} at {offset}")
            first, other = memory.data_ptr(), buffer.data_ptr()
            if first < other + buffer.nbytes and other < first + memory.nbytes:
                self.crossed.append(f"{file.path.name}: the memory of a write is {verb}")


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> HeldWrites:
    made = HeldWrites()
    monkeypatch.setattr("offload_trainer.engine.tiered.Transfers", lambda **_: made)
    return made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the pages of state that are read."""
    return calls_of(monkeypatch.setattr, PageStore, "read", lambda _, number, *__, **___: number)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("decided", ["kept", "clipped", "skipped"])
@pytest.mark.parametrize("file", ["state", "weights"])
def test_pages_are_complete_before_their_next_use(file: str, decided: str, build: Build, writes: HeldWrites) -> None:
    """A valid page is whole before the next forward or update reads it; an invalid one before it is updated again."""
    limit = CLIPPED if decided == "clipped" else UNCLIPPED
    with build("weights and gradients on the drive", limit, FULL, held=True) as ours:
        before = masters(ours)
        writes.hold[file] = 1
        if decided == "skipped":
            spoil = plant(ours, {1: float("nan")}, weight="transformer.wpe.weight")
            assert train(ours, batches(1), before=spoil)[0][1] is None
            assert_same(masters(ours), before)
            spoil(2)
        assert train(ours, batches(3)) == plain(build.model, 3, limit)[0]
        assert_same(masters(ours), plain(build.model, 3, limit)[1])
    assert (writes.crossed, writes.hold[file]) == ([], 0)


def test_forward_and_backward_do_not_wait_for_state_in_flight(build: Build, writes: HeldWrites) -> None:
    """State of all pages is being written until the next backward has reached its last block; none of it is read."""
    seen = list[int]()
    words = [*HOMES["nothing in RAM"], UNCLIPPED, "tiered.page_buffers=99", FULL]
    with build(words) as ours:
        writes.hold["state"] = len(ours.offloaded.store.pages)
        writes.patience = 60.0
        first = train(ours, batches(1))

        def go(_: torch.Tensor) -> None:
            seen.append(len(writes.held))
            writes.go.set()

        ours.offloaded.parameters[FIRST][0].register_hook(go)
        assert first + train(ours, batches(3)[1:]) == plain(build.model, 3, UNCLIPPED)[0]
        assert_same(masters(ours), plain(build.model, 3, UNCLIPPED)[1])
        assert seen[0] == len(ours.offloaded.store.pages)
    assert not writes.crossed


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("home", ["sums on the device", "a part on the device"])
def test_a_page_waits_for_its_own_units_event(home: str, build: Build, monkeypatch: Any) -> None:
    """Copies of gradients and writes of weights wait for the event at which their unit was complete."""
    found: list[bool] = []

    def look(_: Any, unit: int, *__: Any, after: Any) -> None:
        if ours.offloaded.updater.announced is not None:
            found.append(after is dict(made)[unit])

    with build(home, UNCLIPPED, FULL, held=True, late=monkeypatch) as ours:
        made = calls_of(monkeypatch.setattr, PagePipeline, "offer", lambda _, step, unit, mark, error: (unit, mark))
        run_before(monkeypatch.setattr, Gradients, "read", look)
        run_before(monkeypatch.setattr, PlacedWeights, "commit", look)
        train(ours, batches(3), before=lambda _: ours.synchronize())
    assert found
    assert all(found)


def test_copies_that_a_record_names_stay_if_the_next_one_fails(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of step 2 fails while the backward of step 3 has complete units: step 1 can still be read."""
    in_backward = threading.Event()

    def fail(_: ManifestWriter, step: int, *, updating: bool) -> None:
        if step == 2 and not updating:
            assert in_backward.wait(300)
            raise TrainerError("the drive failed")

    run_before(monkeypatch.setattr, ManifestWriter, "note", fail)
    with build("nothing in RAM", UNCLIPPED, FULL) as ours:
        ours.offloaded.enable_manifest(model=build.model)
        updater = ours.offloaded.updater
        train(ours, batches(1))
        ours.commit({})
        before = masters(ours)

        def go(_: torch.Tensor) -> None:
            in_backward.set()
            until(lambda: bool(updater.announced.error or updater.announced.written))

        train(ours, batches(2)[1:])
        ours.offloaded.parameters[FIRST][0].register_hook(go)
        with pytest.raises(TrainerError, match="the drive failed"):
            train(ours, batches(3)[2:])
        ours.close()
        (index,) = build.drive.glob("offload-trainer/run-*/store.json")
        assert_same(stored_masters(index.parent)[1], before)


def test_state_is_read_ahead_in_the_order_of_the_next_updates(build: Build, read: list[int], monkeypatch: Any) -> None:
    """State of the first pages is read, then in the last backward's order until the slots are full. None is reread."""

    def end_writes(_: PagePipeline, *, writing: Mapping[int, Future] | None = None) -> None:
        together((writing or {}).values()).wait()

    run_before(monkeypatch.setattr, PagePipeline, "read_ahead", end_writes)
    words = [*HOMES["a third in RAM"], UNCLIPPED, "tiered.page_buffers=4"]
    with build(words, FULL, held=True) as ours:
        moving, pages = ours.offloaded.updater.pipeline, ours.offloaded.store.pages
        train(ours, batches(1))
        ours.synchronize()
        order = [n for unit in moving._order for n, page in enumerate(pages) if page.unit == unit and page.home >= 0]
        on_drives = [number for number, page in enumerate(pages) if page.home >= 0]
        assert len(order) > 4
        assert sorted(read[: len(on_drives)]) == on_drives

        def wait(*_: Any) -> None:
            until(lambda: len(moving._prefetched) == 4)
            seen.append(read[len(on_drives) :])

        seen: list[list[int]] = []
        ours._module.model.transformer.h[0].register_forward_pre_hook(wait)
        train(ours, batches(1))
        ours.synchronize()
        assert seen == [[*on_drives[:2], *order[:2]]]
        assert sorted(read[len(on_drives) :][: len(on_drives)]) == on_drives


def test_units_of_the_next_forward_are_updated_in_its_order(build: Build, read: list[int], writes: HeldWrites) -> None:
    """Two slots are busy until all blocks except the first are complete."""
    words = [*HOMES["nothing in RAM"], UNCLIPPED, "tiered.page_buffers=2", FULL]
    with build(words) as ours:
        writes.hold["state"], writes.patience = 2, 60.0
        moving, lacking = ours.offloaded.updater.pipeline, ours.offloaded.gradients._missing

        def go(_: torch.Tensor) -> None:
            complete = {unit for unit, its in lacking.items() if not its}
            until(lambda: len(writes.held) == 2 and complete <= set(moving._order))  # Another thread offers the units.
            assert len(read) == 2
            writes.go.set()
            until(lambda: not moving._waiting and not moving._in_slots)
            assert len(read) > 4
            assert read[2:] == sorted(read[2:])

        ours.offloaded.parameters[FIRST][0].register_hook(go)
        train(ours, batches(1))


@pytest.mark.usefixtures("always")
def test_units_that_are_complete_before_pages_may_be_offered(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are staged as soon as the update of the previous step has ended."""
    run_before(monkeypatch.setattr, PagePipeline, "expect", lambda *_: time.sleep(0.2))
    with build("nothing in RAM", UNCLIPPED, FULL, held=True) as ours:
        train(ours, batches(1))
        assert len(ours.offloaded.updater.pipeline._order) > 1


@pytest.mark.usefixtures("always")
def test_prefetched_state_of_incomplete_units(build: Build) -> None:
    """Pages of a block that only the first step uses wait until the step is skipped (2) or decided (3)."""
    found = []
    for how in ("tiered.overlap=off", FULL):
        with build("nothing in RAM", UNCLIPPED, how) as ours:
            hooks = plant(ours, {2: float("nan")}, weight="transformer.wpe.weight"), skip_last_block(ours, {2, 3})
            steps = train(ours, batches(4), before=lambda step, hooks=hooks: [hook(step) for hook in hooks])
            found.append(str((steps, digest(masters(ours).values()))))
    assert found[0] == found[1]


@pytest.mark.usefixtures("always")
def test_a_page_that_is_expected_without_a_turn_is_updated_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward needs its unit first, the last step did not offer it, and no slot has read it ahead."""
    offer, offered = PagePipeline.offer, list[int]()
    words = [*HOMES["nothing in RAM"], UNCLIPPED, "tiered.page_buffers=4"]

    def told(moving: PagePipeline, step: Any, unit: int, *given: Any) -> None:
        offer(moving, step, unit, *given)
        offered.append(unit)

    def written(_: PagePipeline, route: Route) -> bool:
        return route.page.unit != 0 or 0 in offered

    with build(words, FULL, held=True) as ours:
        moving, pages = ours.offloaded.updater.pipeline, ours.offloaded.store.pages
        monkeypatch.setattr(PagePipeline, "_is_written", written)
        found = train(ours, batches(1))
        ours.synchronize()
        moving._order = [unit for unit in moving._order if unit]
        monkeypatch.setattr(PagePipeline, "offer", told)
        assert [route.page.unit for route in moving._expected][:2] == [0, 0]
        norm, updater = ours.offloaded.norm, ours.offloaded.updater

        def at_rest() -> bool:
            wanted = {number for number, page in enumerate(pages) if page.unit in moving._order}
            if 0 not in moving._order or wanted != set(updater.announced.written):
                return False
            with moving._lock:  # each slot is free or holds a page that was read ahead
                return len(moving._free) + len(moving._prefetched) == len(moving._slots)

        def norm_at_rest() -> float:
            until(at_rest)
            return norm()

        monkeypatch.setattr(ours.offloaded, "norm", norm_at_rest)
        found += train(ours, batches(2)[1:])
        monkeypatch.setattr(ours.offloaded, "norm", norm)
        found += train(ours, batches(3)[2:])
        assert found == plain(build.model, 3, UNCLIPPED)[0]
        assert_same(masters(ours), plain(build.model, 3, UNCLIPPED)[1])


def test_steps_that_are_not_announced_offer_nothing(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose steps are clipped stops announcing them; it must not collect their units for ever."""
    with build("nothing in RAM", CLIPPED, FULL) as ours:
        monkeypatch.setattr(TieredEngine, "_as_expected", True)
        train(ours, batches(1))
        monkeypatch.setattr(TieredEngine, "_as_expected", False)
        train(ours, batches(1))
        ours.synchronize()
        moving = ours.offloaded.updater.pipeline
        before = len(moving._too_early)
        train(ours, batches(2))
        ours.synchronize()
        assert len(moving._too_early) == before


@pytest.mark.slow
def test_a_unit_out_of_order_gets_slots(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient sums arrive late, when the slots already hold the state of later units."""
    offer, late, passed = PagePipeline.offer, list[tuple[Any, ...]](), threading.Event()
    deciding = threading.Lock()
    with build("weights and gradients on the drive", UNCLIPPED, FULL, held=True) as ours:
        first = train(ours, batches(1))
        moving = ours.offloaded.updater.pipeline
        moving._order = order = sorted(moving._order, reverse=True)

        def out_of_turn(self: PagePipeline, step: object, unit: int, *more: Any) -> None:
            with deciding:
                if unit == order[1] and not passed.is_set():  # It may also be late on its own.
                    late.append((step, unit, *more))
                    return
            offer(self, step, unit, *more)
            if unit == order[2]:
                with deciding:
                    passed.set()
                end = time.monotonic() + 5
                while late and len(self._prefetched) < len(self._slots) and time.monotonic() < end:
                    time.sleep(0.0005)
                if late:
                    offer(self, *late.pop())

        monkeypatch.setattr(PagePipeline, "offer", out_of_turn)
        assert first + train(ours, batches(2)[1:]) == plain(build.model, 2, UNCLIPPED)[0]
        assert_same(masters(ours), plain(build.model, 2, UNCLIPPED)[1])
