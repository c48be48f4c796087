"""Tests of which update schedule `auto` chooses, by seconds, bytes and what a run allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from sample_plans import GB, SHAPES, least_ram, machine, timed, wish, with_products

from offload_trainer.errors import UserError
from offload_trainer.plan.machine import MachineProfile, read_machine
from offload_trainer.plan.memory import heap_limit
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.tiered.engine import FORWARD, FULL, OFF
from offload_trainer.plan.tiered.layout import homes_of, pages_of, units_of, with_shadows
from offload_trainer.plan.tiered.spec import left_free
from offload_trainer.plan.tiers import RAM, TierKind
from offload_trainer.units import format_seconds

SHAPE = SHAPES["gpt2-medium"]
BOTH = ("--ram-fraction", "0.5", "--micro-batch", "2", "--params", "gpu")  # computing and drives take equally long
# drives take nearly all of the time
DRIVES = ("--ram-fraction", "0", "--micro-batch", "1", "--seq-len", "128", "--params", "gpu")


def planned(*words: str, on: MachineProfile | None = None, **more: object) -> Plan:
    return make_plan(wish(*words), SHAPE, on or timed(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [BOTH, DRIVES])
def test_the_fastest_schedule_is_chosen_and_the_others_are_listed(words: tuple[str, ...]) -> None:
    """Each alternative has the seconds of a plan that asks for it."""
    plan = planned(*words)
    steps = {one: planned(*words, one).forecast.step for one in _ALL}
    assert {one.words: one.seconds for one in plan.ways} == {one: pytest.approx(step) for one, step in steps.items()}
    assert plan.way == FULL == min(steps, key=lambda one: steps[one] or 0.0)
    assert plan.forecast.step == pytest.approx(steps[FULL])
    assert (plan.sizes.places, plan.sizes.ahead) == (2, True)
    said = next(line for line in plan.describe(full=True).splitlines() if f"auto chose {FULL}" in line)
    for one, step in steps.items():
        assert (f"{one} {format_seconds(step or 0.0)}" in said) == (one != FULL)
    taken = [one["words"] for one in plan.to_json()["ways"] if one["taken"]]
    assert taken == [FULL]


_ALL = (OFF, FORWARD, FULL)


def test_two_copies_only_if_the_disk_has_room() -> None:
    second = next(item.bytes for item in planned(*BOTH).items if item.name == "state, second copy")
    need = planned(*BOTH).tiers["/ssd"]["need"]
    drive = timed().drives[0]
    for free, way in ((need, FULL), (need - 1, FORWARD), (need - second, FORWARD)):
        plan = planned(*BOTH, on=replace(timed(), drives=(replace(drive, free_bytes=free),)))
        assert plan.fits
        assert plan.way == way
        assert ("auto ruled out tiered.overlap=backward: /ssd needs" in plan.describe(full=True)) == (way != FULL)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("tiered.state_copies=1",), {OFF, FORWARD}),
        (("tiered.state_copies=2",), {OFF, FORWARD, FULL}),
        (("tiered.overlap=forward",), set()),
        (("tiered.overlap=off",), set()),
        (("tiered.overlap=backward",), set()),
    ],
)
def test_a_configured_schedule_is_kept(words: tuple[str, ...], left: set[str]) -> None:
    plan = planned(*BOTH, *words)
    assert {way.words for way in plan.ways} == left
    if left:
        assert plan.way in left
    else:
        assert (plan.sizes.overlap, plan.sizes.ahead) == (words != (OFF,), words == (FULL,))


def test_an_impossible_schedule_is_left_out_and_named() -> None:
    plan = planned(*BOTH[:4], saves=False)  # a session
    why = "in a session, the learning rate"
    assert plan.way != FULL
    assert next(one.why_not for one in plan.ways if one.words == FULL).startswith(FULL)
    assert why in next(line for line in plan.describe(full=True).splitlines() if f"auto ruled out {FULL}" in line)
    with pytest.raises(UserError, match=FULL):
        planned(FULL, saves=False)


def test_several_ranks_speculate_only_if_configured() -> None:
    plan = planned(*BOTH[:4], world=2)
    assert not plan.sizes.ahead
    assert "auto ruled out tiered.overlap=backward with 2 ranks" in plan.describe(full=True)
    assert planned(*BOTH[:4], FULL, world=2).sizes.ahead


def test_without_drives_there_is_nothing_to_choose() -> None:
    for on in (machine(), timed()):
        plan = planned("--ram-fraction", "1", "--params", "gpu", on=on)
        assert plan.ways == ()
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


def test_pages_in_ram_are_updated_during_the_backward_where_that_is_faster() -> None:
    plan = on_a100()
    assert plan.way == FULL
    assert not plan.uses_drives
    assert plan.sizes.ahead
    steps = {one: on_a100(one).forecast.step or 0.0 for one in (OFF, FORWARD, FULL)}
    assert {one.words: one.seconds for one in plan.ways} == pytest.approx(steps)
    assert steps[FULL] <= 0.95 * min(steps[OFF], steps[FORWARD])
    assert plan.forecast.if_clipped > 0
    assert f"auto chose {FULL}" in plan.describe(full=True)


def test_a_small_gain_is_not_mentioned() -> None:
    plan = on_a100(accumulate=32)
    assert plan.ways == ()
    assert not plan.sizes.ahead
    assert shadow_memory(plan) == 0
    assert (on_a100(FULL, accumulate=32).forecast.step or 0.0) > 0.95 * (plan.forecast.step or 0.0)


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
    assert fractions[0] < 0.01
    assert fractions[-1] == 1.0
    assert all(a <= b for values in (fractions, bytes_, hidden) for a, b in pairwise(values))
    assert 0.9 * state < bytes_[-1] < state  # the embeddings before the blocks have none
    none = on_a100(FULL, ram=need)
    assert (none.sizes.shadow_fraction, none.forecast.hidden) == (0.0, pytest.approx(forward.forecast.hidden))


def test_without_a_gpu_pages_in_ram_wait_for_the_decision() -> None:
    plans = [planned("--ram-fraction", "1", "--params", "gpu", way) for way in (FORWARD, FULL)]
    assert [shadow_memory(plan) for plan in plans] == [0, 0]
    assert plans[0].forecast.step == pytest.approx(plans[1].forecast.step)


@pytest.mark.parametrize("gpu", [0, 16 * GB])
def test_an_untimed_machine_uses_the_free_schedule_and_names_what_timing_would_decide(gpu: int) -> None:
    """It overlaps the update with the next forward, which needs no more bytes, unless there is no core for it."""
    on = machine(gpu=gpu)
    words = (*BOTH, "--gpu-fraction", "0")
    plan = planned(*words, on=on)
    assert plan.way == FORWARD
    assert (plan.sizes.overlap, plan.sizes.places) == (True, 1)
    in_line = planned(*words, OFF, on=on)
    assert (plan.items, plan.tiers, plan.traffic) == (in_line.items, in_line.tiers, in_line.traffic)
    said = plan.describe(full=True)
    times = next(line for line in said.splitlines() if "offload-train bench" in line)
    assert "run `offload-train bench --nvme /ssd` once to time it" in times
    assert f"the fastest of {FORWARD} (the current choice), {OFF}, {FULL}" in times
    assert [one["words"] for one in plan.to_json()["ways"] if one["taken"]] == [FORWARD]
    assert planned(*words, OFF, on=on).sizes.overlap is False
    alone = planned(*words, on=replace(on, cores=1))
    assert alone.sizes.overlap == bool(gpu)
    assert planned(*words[:4], on=on, world=2).sizes.overlap


@pytest.mark.parametrize("way", _ALL)
def test_from_that_many_tokens_on_the_update_is_a_tenth(way: str) -> None:
    """A plan with that many tokens, by accumulation, confirms it, within a tenth: it also adds gradients."""
    always = [*DRIVES, "model.activation_checkpointing=on"]
    found = next(one for one in planned(*always).ways if one.words == way)
    assert found.tokens
    many = planned(*always, way, "--accumulate", str(round(found.tokens / 128))).forecast
    assert many.step
    assert 0.09 < ((many.seconds["update"] or 0.0) - many.hidden) / many.step < 0.103


@pytest.mark.parametrize("share", [(), ("--ram-fraction", "0.5")])
def test_malloc_keeps_freed_memory_where_ram_has_room_for_its_holes(share: tuple[str, ...]) -> None:
    words = (*share, "--seq-len", "128", "--params", "gpu")
    roomy = planned(*words, on=machine(ram=64 * GB))
    assert roomy.sizes.keeps_heap
    (item,) = (item for item in roomy.items if item.name == "heap")
    least = least_ram(roomy)
    assert heap_limit(roomy.items) == pytest.approx(1.02 * (least + item.bytes), rel=0.05)
    margin = 20 * (least + item.bytes) // 19 + 1  # 5 % stay free
    assert planned(*words, on=machine(ram=margin)).sizes.keeps_heap
    tight = planned(*words, on=machine(ram=margin - item.bytes // 2))
    assert tight.fits
    assert not tight.sizes.keeps_heap
    assert not [item for item in tight.items if item.name == "heap"]


def test_freed_memory_is_returned_for_long_rows_beside_a_gpu_and_with_several_ranks() -> None:
    words = ("--params", "gpu", "--ram-fraction", "1")
    long = replace(SHAPE, context=8192)
    assert not make_plan(wish(*words, "--seq-len", "8192"), long, machine(ram=64 * GB)).sizes.keeps_heap
    assert not planned(*words, on=machine(gpu=80 * GB, ram=64 * GB)).sizes.keeps_heap
    assert not planned(*words, on=machine(ram=64 * GB), world=2).sizes.keeps_heap
    assert not planned(*words, on=machine(ram=64 * GB), saves=False).sizes.keeps_heap  # a session


def test_on_a_large_machine_the_heap_comes_before_the_state() -> None:
    plan = make_plan(wish("--params", "gpu"), SHAPES["gpt2-xl"], machine(ram=16 * GB))
    assert 0 < plan.sizes.ram_fraction < 1
    assert plan.sizes.keeps_heap


def test_smaller_moments_are_advised_where_they_are_faster_and_never_chosen() -> None:
    """They move fewer bytes of drives, or leave RAM for shadow memory. What changes results is for the user to take."""

    def advised(plan: Plan) -> list[str]:
        return [words.removeprefix("optim.moment_dtype=") for _, words in plan.faster]

    plan = planned(*DRIVES)
    assert plan.sizes.states == "fp32"
    assert advised(plan) == ["bf16", "8bit"]
    for seconds, words in plan.faster:
        assert seconds == planned(*DRIVES, words).forecast.step
        assert f"{format_seconds(seconds)} a step with {words}" in " ".join(plan.describe().split())
    assert advised(planned(*DRIVES, "optim.moment_dtype=bf16")) == ["8bit"]
    assert advised(planned(*DRIVES, "optim.moment_dtype=8bit")) == []
    assert advised(planned(*DRIVES, "optim.name=muon")) == []  # has no other format
    assert advised(planned(*DRIVES, on=timed(drive=1e12, mixed=1e12))) == []  # drives take no time
    assert advised(planned(*DRIVES, on=replace(timed(), rates=machine().rates))) == []  # no rates
    assert advised(planned("--ram-fraction", "1", "--seq-len", "128", on=timed(update=1e7))) == []  # RAM of a CPU


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_shadow_memory_is_spread_evenly_over_blocks_and_ranks(share: float, ranks: int) -> None:
    units = units_of(SHAPES["gpt2-medium"])
    pages = pages_of(units, page=1 << 18, shares=((RAM, 1.0),), speeds=(), ranks=ranks, ahead=True)
    kinds = {"params": TierKind.GPU, "gradients": TierKind.RAM}
    homes = with_shadows(homes_of(units, pages, **kinds, speeds=(), ranks=ranks), units, share=share)
    blocks = [unit for unit in units if unit.block]
    assert all(pages[number].unit >= blocks[0].index for number in homes.shadows)
    for unit in blocks:
        for rank in range(ranks):
            its = [n for n, page in enumerate(pages) if page.unit == unit.index and homes.of_rank(n, rank)]
            some = [number for number in its if number in homes.shadows]
            largest = max(pages[number].elements for number in its)
            given = sum(pages[number].elements for number in some)
            assert abs(given - share * sum(pages[number].elements for number in its)) <= 2 * largest
