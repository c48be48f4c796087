"""Tests of plans in which the update overlaps the next forward or the backward, and of the schedule `auto` chooses."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sample_plans import GB, SHAPES, cluster, least_ram, machine, rate, timed, wish, with_products

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_seconds
from offload_trainer.plan import planner, step_time
from offload_trainer.plan.machine import MachineProfile, read_machine
from offload_trainer.plan.memory import heap_limit
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.step_time import Bound, EarlyPages, Forecast, Overlap, UnitShare, parts_of
from offload_trainer.plan.tiered.engine import Tiered, left_free
from offload_trainer.plan.tiered.layout import TierMap, units_of
from offload_trainer.plan.tiered.spec import Layouts, TierSizes
from offload_trainer.plan.tiers import Placement, TierKind

SHAPE = SHAPES["gpt2-medium"]
BOTH = ("--ram-fraction", "0.5", "--micro-batch", "2", "--params", "gpu")  # computing and drives take equally long
EVERY = OFF, FORWARD, FULL = tuple(f"tiered.overlap={how}" for how in ("off", "forward", "backward"))
PARAMS = Placement(TierKind.GPU, TierKind.RAM)
SIZES = TierSizes(0.0, 1.0, TierKind.RAM, 1 << 20, 6, 3, overlap=False, ahead=False, speeds=())
# drives take nearly all of the time
DRIVES = ("--ram-fraction", "0", "--micro-batch", "1", "--seq-len", "128", "--params", "gpu")


def planned(*words: str, on: MachineProfile | None = None, **more: object) -> Plan:
    return make_plan(wish(*words), SHAPE, on or timed(), **more)  # type: ignore[arg-type]


def in_memory(shape: ModelShape) -> TierMap:
    """Return a layout with no state on the device."""
    return Layouts(units_of(shape)).homes(PARAMS, SIZES)


def forecast(update: float, forward: float, *bounds: Bound, backward: float = 1.0) -> Forecast:
    return Forecast({"data": 0.0, "forward": forward, "backward": backward, "update": update}, bounds)


def drive(seconds: float, phase: str = "update", disk: str = "sda", lost: float = 0.0) -> Bound:
    return Bound(phase, seconds, "", "drive", disk, lost)


def adamw(seconds: float, kind: str = "adamw") -> Bound:
    return Bound("update", seconds, "", kind)


def compute(seconds: float, phase: str = "forward") -> Bound:
    return Bound(phase, seconds, "", "compute")


def simulated(
    update: float, forward: float, parts: list[UnitShare], *, adamw: float, read: float = 0.0, after: float = 0.0
) -> float:
    """Return the seconds until the forward is done, and the update except for `after`, simulated unit by unit."""
    share = done = 0.0
    for part in parts:
        share += part.update
        done = max(adamw * share, update * (share - read), done) + forward * part.forward
    return max(update * share - after, done)


@pytest.mark.parametrize("update", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("forward", [0.0, 0.4, 1.0, 2.0])
@pytest.mark.parametrize(
    "shares", [[(1.0, 1.0)], [(0.5, 0.0), (0.25, 0.25), (0.25, 0.5), (0.0, 0.25)], [(0.1, 0.1)] * 10, [(0, 1), (1, 0)]]
)
def test_hidden_is_what_a_simulation_gives(update: float, forward: float, shares: list[tuple[float, float]]) -> None:
    parts = [UnitShare(*share) for share in shares]
    hidden = Overlap(forecast(update, forward), parts).hidden()
    assert update + forward - hidden == pytest.approx(simulated(update, forward, parts, adamw=update))
    found = forecast(update, forward, adamw(0.6 * update), drive(update))
    for read, late in itertools.product((0.0, 0.2, 0.5, 1.0), (0.0, 0.1, 1.0)):
        its = {"read": read, "after": late * read * update}
        hidden = Overlap(found, parts, 1, True).hidden(**its)
        expected = max(forward, simulated(update, forward, parts, adamw=0.6 * update, **its))
        assert update + forward - hidden == pytest.approx(expected)


def test_the_forward_does_not_wait_for_the_cpu_where_the_gpu_has_the_state() -> None:
    """The GPU has the pages of the first units, embeddings before all, and updates them while the CPU works."""
    units = units_of(SHAPE)
    trained = sum(unit.trained for unit in units)
    first, block = (sum(unit.trained for unit in its) / trained for its in (units[:2], units[2:3]))

    def hidden(share: float, on_gpu: float) -> float:
        homes = Layouts(units).homes(PARAMS, replace(SIZES, gpu_fraction=share, ram_fraction=1 - share))
        found = forecast(0.9, 2.0, adamw(0.9), adamw(on_gpu, "adamw_gpu"))
        return Overlap(found, parts_of(homes), 1, True).hidden()

    for share in (0.0, first / 2, first):
        waits = 0.9 * (first - share + block) / (1 - share)  # the CPU's part of embeddings and first block
        assert hidden(share, 0.01) == pytest.approx(0.9 - waits, abs=1e-3)
    assert hidden(0.5, 0.01) == pytest.approx(0.9, abs=0.01)
    assert hidden(first, 0.8) == pytest.approx(0.1)  # the forward waits for the GPU's pages too


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_a_plan_knows_that_the_embeddings_on_the_gpu_are_updated_at_once(how: str) -> None:
    shape, here = SHAPES["gpt2-xl"], cluster(copies=(1e11, 1e11, 1e11), matmul=2e13, update=2e9)
    here = replace(here, rates=replace(here.rates, update=here.rates.update | {"cuda": rate(1e12)}))
    waits = []  # seconds of the update that nothing hides, with those of a step whose early update is redone
    for share in (0.0, 0.1):
        ways = ("--params", "gpu", "--gpu-fraction", str(share), "--ram-fraction", str(1 - share))
        found = make_plan(wish(f"tiered.overlap={how}", "--micro-batch", "8", *ways), shape, here).forecast
        waits.append(found.seconds["update"] - found.hidden + found.if_clipped)
    assert waits[0] == pytest.approx(sum(unit.trained for unit in units_of(shape)[:2]) / 2e9, rel=0.5)
    assert waits[1] < 1e-3


@pytest.mark.parametrize(("pages", "buffers"), [(1, 6), (6, 6), (7, 6), (50, 6), (50, 2), (50, 49)])
def test_pages_that_buffers_read_during_the_backward_arrive_earlier(pages: int, buffers: int) -> None:
    found = forecast(float(pages), 1.0, drive(float(pages)), backward=100.0)
    read = Overlap(found, (), 2).read_before_update(pages, buffers=buffers)
    planned = [max(0, page + 1 - read * pages) for page in range(pages)]
    # When each page's state arrives after the update began, if reading or writing one takes 1 s.
    arrived, written = [0] * min(pages, buffers), list[int]()
    for page in range(pages):
        if page >= buffers:
            arrived.append(max(written[page - buffers], arrived[-1]) + 1)
        written.append(max(arrived[page], written[-1] if written else 0) + 1)
    assert arrived[buffers:] == pytest.approx(planned[buffers:])
    assert max(planned[:buffers]) < 1.0 + 1e-9  # they arrive immediately; the last of them is planned a page late


def test_only_the_first_micro_batch_hides_the_update_and_shared_resources_do_not_overlap() -> None:
    parts, cpu = [UnitShare(0.001, 0.001)] * 1000, forecast(1.0, 4.0, adamw(1.0), compute(4.0))
    for found, micro_batches, gpu, hidden in (
        (forecast(2.0, 4.0), 1, False, 2.0),
        (forecast(2.0, 4.0), 4, False, 1.0),
        (forecast(2.0, 4.0, drive(1.5), drive(3.0, "forward")), 1, False, 1.5),
        (forecast(2.0, 4.0, drive(1.5), drive(3.0, "forward", "sdb")), 1, False, 2.0),
        (cpu, 1, False, 0.0),
        (forecast(1.0, 4.0, adamw(1.0), compute(3.0)), 1, False, 0.0),  # the fourth second copies weights, for example
        (cpu, 1, True, 1.0),
    ):
        assert Overlap(found, parts, micro_batches, gpu).hidden() == pytest.approx(hidden, rel=0.01)
    for lost, hidden in ((0.0, 1.0), (2.0, 1.0), (3.5, 0.5), (5.0, 0.0)):  # computation lost to an update's drives
        found = forecast(4.0, 1.0, drive(4.0, lost=lost), compute(1.0))
        assert Overlap(found, parts).hidden() == pytest.approx(hidden, abs=0.02)
    found = forecast(4.0, 1.0, drive(4.0), drive(0.6, "backward"))  # pages are read while the drive is idle
    for step, micro_batches, pages, share in ((found, 1, 6, 0.1), (found, 4, 6, 0.025), (forecast(4.0, 1.0), 1, 0, 0)):
        assert Overlap(step, (), micro_batches).read_before_update(pages, buffers=6) == pytest.approx(share)


def test_a_little_overlap_does_not_keep_a_faster_schedule_from_being_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward` is taken for less than 5 % of a step of 10 s; `backward` must then gain 5 % of those 10 s."""
    placed, seconds = planner._best_placement, {"data": 0.0, "forward": 3.0, "backward": 3.0, "update": 4.0}
    for hidden, full, taken in (
        (0.3, 9.3, True),  # 7 % faster than without overlap, and faster than with it
        (0.3, 9.6, False),  # 4 %
        (0.6, 9.3, False),  # 1 % faster than an overlap that gains enough itself
        (0.6, 8.9, True),
    ):

        def forecast_as_given(engine: Tiered, *others: Any, hidden: float = hidden, full: float = full) -> Plan:
            is_full = engine.section.overlap == "backward"
            hides = 10.0 - full if is_full else hidden
            found = Forecast(seconds, (), behind=True, ahead=is_full, hidden=hides)
            return replace(placed(engine, *others), forecast=found)

        monkeypatch.setattr(planner, "_best_placement", forecast_as_given)
        plan = make_plan(wish("--engine", "tiered", "--ram-fraction", "0.5"), SHAPES["gpt2"], timed())
        assert plan.forecast.ahead == taken


def test_more_page_buffers_hide_more_where_weights_do_not_wait_for_state() -> None:
    words = ("--ram-fraction", "0", "--seq-len", "1024", "--micro-batch", "1")

    def hidden(*more: str, ranks: int = 1) -> list[float]:
        plans = (planned(*words, FULL, f"tiered.page_buffers={n}", *more, world=ranks) for n in (2, 6, 12))
        return [plan.forecast.hidden for plan in plans]

    found = hidden()
    assert found == sorted(found)
    assert found[-1] > 1.01 * found[0]
    for same in (hidden("--params", "nvme"), hidden(ranks=2)):
        assert same == pytest.approx([same[0]] * 3)


# -- overlap with the backward -----------------------------------------------------------------------------------------

DRIVE, LITTLE, ADAMW, COMPUTE = drive(4.0), drive(0.5), adamw(1.0), compute(1.0, "backward")
WEIGHTS, ADDING = (Bound("backward", 0.5, "", kind, "sda") for kind in ("drive", "memory"))
ON_DRIVES, IN_RAM = EarlyPages(on_drives=1.0), EarlyPages(0.0, in_ram=1.0)

# The update's seconds and the bounds, its early pages, and other arguments; seconds of the update that are done during
# the backward, and those saved (None: not computed by hand).
OVERLAPS: list[tuple[tuple[float, *tuple[Bound, ...]], EarlyPages, dict[str, Any], float | None, float | None]] = [
    # The last backward hides as much of the drives as it takes.
    ((4.0, DRIVE, COMPUTE), ON_DRIVES, {}, 1.0, 1.0),
    ((4.0, DRIVE, COMPUTE), ON_DRIVES, {"micro_batches": 4}, 0.25, 0.25),
    ((0.5, LITTLE, COMPUTE), ON_DRIVES, {}, 0.5, 0.5),
    ((4.0, DRIVE, COMPUTE), EarlyPages(0.0), {}, 0.0, 0.0),
    ((0.5, LITTLE, COMPUTE), EarlyPages(1.0, last=0.2), {}, 0.4, None),
    # A drive that is busy with weights half of the time has the other half free; a computing CPU has no free time. It
    # is not free while it adds gradients either, which the backward takes in addition to its computation.
    ((4.0, DRIVE, WEIGHTS), ON_DRIVES, {}, None, 0.5),
    ((4.0, DRIVE, ADAMW, COMPUTE), ON_DRIVES, {}, 4 / 3, 1.0),  # four seconds of the drive with one of the CPU
    ((1.0, ADAMW, COMPUTE), ON_DRIVES, {}, None, 0.0),
    ((1.0, ADAMW, replace(COMPUTE, seconds=0.6)), ON_DRIVES, {}, None, 0.0),
    # Transfers take computation from the backward. The share `last` of the drive's seconds waits for units before the
    # blocks, and so does its cost to the cores.
    ((4.0, replace(DRIVE, lost=1.0), COMPUTE), ON_DRIVES, {}, 4 / 3, 1.0),
    ((4.0, replace(DRIVE, lost=1.0), COMPUTE), EarlyPages(on_drives=1.0, last=0.5), {}, 4 / 3, 1.0),
    ((0.5, replace(LITTLE, lost=0.3), COMPUTE), ON_DRIVES, {}, None, 0.2),
    ((0.5, replace(LITTLE, lost=0.3), COMPUTE), ON_DRIVES, {"gpu": True}, None, 0.5),
    # A GPU computes the model: pages with shadow memory take seconds of a free CPU. No page is updated while the old
    # bytes are copied; adding gradients takes half of the memory's bandwidth.
    *(((0.8, replace(ADAMW, seconds=0.8), COMPUTE), EarlyPages(0.0, in_ram=share), {"gpu": True}, *(2 * [0.8 * share]))
      for share in (0.0, 0.25, 0.5, 1.0)),
    ((3.0, replace(ADAMW, seconds=3.0), COMPUTE), IN_RAM, {"gpu": True}, 1.0, None),
    ((3.0, replace(ADAMW, seconds=3.0), COMPUTE), replace(IN_RAM, copying=3.0), {"gpu": True}, 0.5, None),
    ((0.4, replace(ADAMW, seconds=0.4), COMPUTE), replace(IN_RAM, copying=0.4), {"gpu": True}, 0.4, 0.4),
    ((3.0, replace(ADAMW, seconds=3.0), COMPUTE, ADDING), IN_RAM, {"gpu": True}, None, 0.5),
    # Where the CPU computes the model, starting early costs the copies.
    ((0.4, replace(ADAMW, seconds=0.4), COMPUTE), replace(IN_RAM, copying=0.1), {}, 0.4, -0.1),
]  # fmt: skip


def test_what_the_backward_hides_of_an_update_by_hand() -> None:
    """A backward of 1 s over 1000 blocks; the first page is updated after one of them."""
    weights = tuple(Weight("w", (4096,), unit=f"h.{n}", block=True) for n in range(1000))
    parts = parts_of(in_memory(replace(SHAPES["gpt2"], weights=weights)))
    for (update, *bounds), early, how, done, hidden in OVERLAPS:
        found = Overlap(forecast(update, 1.0, *bounds), parts, **how).ahead(early)[:2]
        told = (update, bounds, early, how)
        near = {"rel": 1e-6 if update < 1 else 0.01, "abs": 1e-9}  # a longer update ends in the middle of a block
        for seconds, by_hand in zip(found, (done, hidden), strict=True):
            assert by_hand is None or seconds == pytest.approx(by_hand, **near), told
    *_, first = Overlap(forecast(0.5, 1.0, LITTLE, COMPUTE), parts).ahead(ON_DRIVES)
    assert first == pytest.approx(0.001, rel=0.01)


def test_pages_in_memory_and_all_that_is_complete_last_are_left_to_the_time_after_the_decision() -> None:
    """Embeddings on drives take 0.6 s of the remaining 0.8 s of 2.0 s; in RAM they take their arithmetic only."""
    away, early = EarlyPages(0.4), EarlyPages(on_drives=0.4, in_ram=0.4)
    for pages, done, update, more, seconds in (
        (away, 1.8, 0.6, [], [0.6, 0.6]),
        (away, 0.5, 1.5, [], [1.5, 0.75]),
        (early, 1.9, 0.2, [], [0.2, 0.2]),  # 0.2 of the pages in RAM wait
        (early, 1.9, 0.5, [adamw(0.5, "adamw_gpu")], [0.5, 0.25, 0.5]),  # all pages on the GPU wait too
    ):
        left = Overlap(forecast(2.0, 1.0, drive(2.0), adamw(1.0), *more), ()).left_after(done, pages).found
        assert left.seconds["update"] == pytest.approx(update)
        assert [bound.seconds for bound in left.bounds] == pytest.approx(seconds)
    units, shares = units_of(SHAPE), parts_of(in_memory(SHAPE))
    overlap = Overlap(forecast(2.0, 1.0, drive(2.0), adamw(0.4)), shares)
    for last, waits in ((0.3, 0.6), (0.0, 0.4 * sum(unit.trained for unit in units[:2]) / SHAPE.trainable)):
        left = overlap.left_after(1.2, EarlyPages(1.0, last=last))
        assert left.found.seconds["update"] == pytest.approx(0.8)
        parts = left.parts
        assert sum(part.update for part in parts) == pytest.approx(1.0)
        assert 0.8 * sum(part.update for part in parts[:2]) == pytest.approx(waits, rel=0.01)
        assert [part.forward for part in parts] == [part.forward for part in shares]


@pytest.mark.parametrize(("share", "ranks"), [("0", 1), ("0.5", 1), ("0.5", 2)])
def test_an_overlap_is_counted_itemised_and_printed(share: str, ranks: int) -> None:
    words = ("--ram-fraction", share, "--engine", "tiered")
    plans = {how: planned(*words, how, world=ranks) for how in EVERY}
    off, forward, full = (plan.forecast for plan in plans.values())
    assert full.seconds == forward.seconds == off.seconds == off.in_line
    assert off.hidden == 0 < forward.hidden < full.hidden
    for found in (forward, full):
        assert found.step == pytest.approx(off.step - found.hidden)
        assert sum(seconds or 0.0 for seconds in found.in_line.values()) == pytest.approx(found.step)
    # A clipped step's update starts again, with nothing read in advance.
    unread = Overlap(forward, parts_of(in_memory(SHAPE))).hidden()
    assert unread < forward.hidden if ranks == 1 else unread == pytest.approx(forward.hidden)
    assert full.if_clipped == pytest.approx(full.hidden - unread)
    names = ("state", "state, second copy")
    first, second = ([item.bytes for item in plans[FULL].items if item.name == name] for name in names)
    assert first == second
    said = [plan.describe(full=True) for plan in plans.values()]
    for words, shown in (
        ("update overlap with the next forward", FORWARD),
        ("update overlap with the backward and the next forward", FULL),
        (f"skipped: up to {format_seconds(full.if_clipped)} more", FULL),
    ):
        assert [words in text for text in said] == [how == shown for how in EVERY]
    assert [plan.to_json()["hidden"] for plan in plans.values()] == [0.0, forward.hidden, full.hidden]
    assert [plan.to_json()["if_clipped"] for plan in plans.values()] == [0.0, 0.0, full.if_clipped]


# -- what `auto` chooses -----------------------------------------------------------------------------------------------


def test_the_fastest_schedule_is_chosen() -> None:
    """Each alternative has the seconds of a plan that asks for it, with pages on drives and in RAM."""
    for words in (BOTH, DRIVES, ()):
        plan_of, drives = partial(planned, *words) if words else on_a100, bool(words)
        plan = plan_of()
        steps = {one: plan_of(one).forecast.step for one in EVERY}
        assert min(steps, key=lambda one: steps[one] or 0.0) == FULL
        assert plan.forecast.step == pytest.approx(steps[FULL])
        assert (plan.sizes.places, plan.sizes.ahead) == (2, True)
        assert plan.uses_drives == drives
        assert drives or 0 < steps[FULL] <= 0.95 * min(steps[OFF], steps[FORWARD])
        assert plan.forecast.if_clipped > 0


def test_two_copies_only_if_the_disk_has_room() -> None:
    both, drive = planned(*BOTH), timed().drives[0]
    second = next(item.bytes for item in both.items if item.name == "state, second copy")
    need = both.tiers["/ssd"]["need"]
    for free, way in ((need, FULL), (need - 1, FORWARD), (need - second, FORWARD)):
        plan = planned(*BOTH, on=replace(timed(), drives=(replace(drive, free_bytes=free),)))
        assert (plan.fits, plan.sizes.overlap, plan.sizes.ahead) == (True, True, way == FULL)
        assert ("rejected: tiered.overlap=backward: /ssd needs" in plan.describe(full=True)) == (way != FULL)


def test_a_configured_schedule_is_kept_and_an_impossible_one_named() -> None:
    """A session cannot speculate, and several ranks do only if configured. Without drives there is no choice."""
    assert not planned(*BOTH, "tiered.state_copies=1").sizes.ahead
    for words in EVERY:
        plan = planned(*BOTH, words)
        assert (plan.sizes.overlap, plan.sizes.ahead) == (words != OFF, words == FULL)
    for more, why in (({"saves": False}, "in a session, the learning rate"), ({"world": 2}, "with 2 ranks")):
        plan = planned(*BOTH[:4], **more)
        assert not plan.sizes.ahead
        assert f"rejected: {FULL}: {why}" in plan.describe(full=True)
    assert planned(*BOTH[:4], FULL, world=2).sizes.ahead
    with pytest.raises(UserError, match=FULL):
        planned(FULL, saves=False)
    for on in (machine(), timed()):
        plan = planned("--ram-fraction", "1", "--params", "gpu", on=on)
        assert (plan.sizes.overlap, plan.sizes.places) == (False, 1)


# -- pages in RAM ------------------------------------------------------------------------------------------------------

ONE_MICRO_BATCH = ("--micro-batch", "4", "--accumulate", "1", "--seq-len", "1024", "--params", "gpu")
ONE_MICRO_BATCH += ("model.activation_checkpointing=on", "--gpu-fraction", "0", "--ram-fraction", "1")


def on_a100(*words: str, ram: int | None = None, accumulate: int = 1) -> Plan:
    """Return a plan of GPT-2 with 10e9 parameters and all state in RAM."""
    here = with_products(read_machine("a100-40gb"), 156e12)
    words = (*ONE_MICRO_BATCH, "--accumulate", str(accumulate), *words)
    return make_plan(wish(*words), SHAPES["gpt2-10b"], replace(here, ram_bytes=ram or here.ram_bytes))


def shadow_memory(plan: Plan) -> int:
    return sum(item.bytes for item in plan.items if item.name == "shadow memory")


def test_a_small_gain_is_not_mentioned() -> None:
    plan = on_a100(accumulate=32)
    assert FULL not in dict(plan.rejected)
    assert (plan.sizes.ahead, shadow_memory(plan)) == (False, 0)
    assert on_a100(FULL, accumulate=32).forecast.step > 0.95 * plan.forecast.step
    plans = [planned("--ram-fraction", "1", "--params", "gpu", way) for way in (FORWARD, FULL)]
    assert [shadow_memory(plan) for plan in plans] == [0, 0]  # without a GPU pages in RAM wait for the decision
    assert plans[0].forecast.step == pytest.approx(plans[1].forecast.step)


def test_shadow_memory_is_as_much_as_fits_in_the_ram_that_is_left() -> None:
    """Each tenth of it hides more of the update. Without any, only the next forward hides it."""
    forward = on_a100(FORWARD)
    need, state = (sum(item.bytes for item in forward.items if item.tier == "ram" and each in item.name)
                   for each in ("", "state in RAM"))  # fmt: skip
    found = []
    for tenths in range(13):
        have = need + tenths * state // 10
        plan = on_a100(FULL, ram=have + left_free(have * 100 // 95))
        kept = shadow_memory(plan)
        assert plan.fits
        assert kept <= max(0, plan.tiers["ram"]["have"] - left_free(plan.tiers["ram"]["have"]) - need)
        assert plan.tiers["ram"]["need"] == need + kept
        found.append((plan.sizes.shadow_fraction, kept, plan.forecast.hidden))
    fractions, bytes_, hidden = zip(*found, strict=True)
    assert fractions[0] < 0.01 < fractions[-1] == 1.0
    assert all(a <= b for values in (fractions, bytes_, hidden) for a, b in itertools.pairwise(values))
    assert 0.9 * state < bytes_[-1] < state  # the embeddings before the blocks have none
    none = on_a100(FULL, ram=need)
    assert (none.sizes.shadow_fraction, none.forecast.hidden) == (0.0, pytest.approx(forward.forecast.hidden))


@pytest.mark.parametrize("gpu", [0, 16 * GB])
def test_an_untimed_machine_uses_the_free_schedule_and_names_the_command_that_times_it(gpu: int) -> None:
    """It overlaps the update with the next forward, which needs no more bytes, unless there is no core for it."""
    on = machine(gpu=gpu)
    words = (*BOTH, "--gpu-fraction", "0")
    plan = planned(*words, on=on)
    assert (plan.sizes.overlap, plan.sizes.places) == (True, 1)
    in_line = planned(*words, OFF, on=on)
    assert (plan.items, plan.tiers, plan.traffic) == (in_line.items, in_line.tiers, in_line.traffic)
    times = next(line for line in plan.describe(full=True).splitlines() if "offload-train bench" in line)
    assert "run `offload-train bench --nvme /ssd` once to time it" in times
    assert planned(*words, OFF, on=on).sizes.overlap is False
    assert planned(*words, on=replace(on, cores=1)).sizes.overlap == bool(gpu)
    assert planned(*words[:4], on=on, world=2).sizes.overlap


@pytest.mark.parametrize("way", EVERY)
def test_from_that_many_tokens_on_the_update_is_a_tenth(way: str) -> None:
    """A plan with that many tokens, by accumulation, confirms it, within a tenth: it also adds gradients."""
    always = [*DRIVES, "model.activation_checkpointing=on"]
    tokens = step_time.tokens_that_hide_the_update(planned(*always, way).forecast, tokens=128)
    many = planned(*always, way, "--accumulate", str(round(tokens / 128))).forecast
    assert 0.09 < (many.seconds["update"] - many.hidden) / many.step < 0.103


def test_malloc_keeps_freed_memory_where_ram_has_room_for_its_holes() -> None:
    """It is returned for long rows, with a GPU, with several ranks and in a session."""
    for share in ((), ("--ram-fraction", "0.5")):
        words = (*share, "--seq-len", "128", "--params", "gpu")
        roomy = planned(*words, on=machine())
        assert roomy.work.keeps_heap
        (item,) = (item for item in roomy.items if item.name == "heap")
        least = least_ram(roomy)
        assert heap_limit(roomy.items) == pytest.approx(1.02 * (least + item.bytes), rel=0.05)
        margin = 20 * (least + item.bytes) // 19 + 1  # 5 % stay free
        assert planned(*words, on=machine(ram=margin)).work.keeps_heap
        tight = planned(*words, on=machine(ram=margin - item.bytes // 2))
        assert (tight.fits, tight.work.keeps_heap) == (True, False)
        assert not [item for item in tight.items if item.name == "heap"]
    words = ("--params", "gpu", "--ram-fraction", "1")
    long = replace(SHAPE, context=8192)
    assert not make_plan(wish(*words, "--seq-len", "8192"), long, machine()).work.keeps_heap
    for gpu, more in ((80 * GB, {}), (0, {"world": 2}), (0, {"saves": False})):
        assert not planned(*words, on=machine(gpu=gpu), **more).work.keeps_heap
    plan = make_plan(wish("--params", "gpu"), SHAPES["gpt2-xl"], machine(ram=16 * GB))
    assert 0 < plan.sizes.ram_fraction < 1
    assert plan.work.keeps_heap  # on a large machine the heap comes before the state


@pytest.mark.parametrize(("moments", "each"), [("fp32", 10), ("bf16", 6), ("8bit", 4 + 8 / 256)])
def test_bf16_masters_take_two_bytes_less(moments: str, each: float) -> None:
    words = ("--optimizer", "nvme", "--ram-fraction", "0", f"optim.moment_dtype={moments}", "optim.master_dtype=bf16")
    plan = planned(*words)
    (state,) = [item for item in plan.items if item.name == "state"]
    assert state.bytes == pytest.approx(each * SHAPE.trainable, rel=0.01)
    assert state.why.startswith(f"bf16 master, {moments} moments: {each:.3g} B a parameter")
    moved = [one for one in plan.traffic if one.phase == "update" and one.place == state.tier]
    assert sum(one.read for one in moved) == sum(one.written for one in moved) == state.bytes


def test_smaller_moments_are_advised_where_they_are_faster_and_never_chosen() -> None:
    """They move fewer bytes of drives, or leave RAM for shadow memory."""

    def advised(plan: Plan) -> list[str]:
        return [words.removeprefix("optim.moment_dtype=") for _, words in plan.faster]

    plan = planned(*DRIVES)
    assert any("fp32 master, fp32 moments: 12 B" in item.why for item in plan.items)
    masters = "optim.master_dtype=bf16"
    assert advised(plan) == ["bf16", "8bit", f"8bit {masters}"]
    for seconds, words in plan.faster:
        assert seconds == planned(*DRIVES, *words.split()).forecast.step
        assert f"{format_seconds(seconds)} a step with {words}" in " ".join(plan.describe().split())
    assert advised(planned(*DRIVES, "optim.moment_dtype=bf16")) == ["8bit", f"8bit {masters}"]
    assert advised(planned(*DRIVES, "optim.moment_dtype=8bit")) == [masters]
    assert advised(planned(*DRIVES, "optim.moment_dtype=8bit", masters)) == []
    assert advised(planned(*DRIVES, "optim.moment_dtype=8bit", "--dtype", "fp16")) == []
    assert advised(planned(*DRIVES, "optim.name=muon")) == []  # has no other format
    assert advised(planned(*DRIVES, on=timed(drive=1e12, mixed=1e12))) == []  # drives take no time
    assert advised(planned(*DRIVES, on=replace(timed(), rates=machine().rates))) == []  # no rates
    assert advised(planned("--ram-fraction", "1", "--seq-len", "128", on=timed(update=1e7))) == []  # RAM of a CPU


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_shadow_memory_is_spread_evenly_over_blocks_and_ranks(share: float, ranks: int) -> None:
    units = units_of(SHAPE)
    homes = Layouts(units, ranks=ranks).homes(PARAMS, replace(SIZES, page=1 << 18, ahead=True, shadow_fraction=share))
    blocks = [unit.index for unit in units if unit.block]
    assert all(homes.pages[number].unit >= blocks[0] for number in homes.shadows)
    for unit, rank in itertools.product(blocks, range(ranks)):
        numbered = enumerate(homes.pages)
        sizes = {n: page.elements for n, page in numbered if page.unit == unit and homes.cut.owners[n] == rank}
        given = sum(size for number, size in sizes.items() if number in homes.shadows)
        assert abs(given - share * sum(sizes.values())) <= 2 * max(sizes.values())
