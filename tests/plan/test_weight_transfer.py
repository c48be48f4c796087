"""Tests of how several GPUs receive weights from RAM: bytes by hand, the plan's choice, and explicit settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_plans import GB, SHAPES, cluster, rate, wish

from offload_trainer.plan.machine import Links, MachineProfile
from offload_trainer.plan.parallel.comm_cost import GPUS
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.step_time import copy_seconds
from offload_trainer.plan.tiered.layout import ALIGN, units_of
from offload_trainer.plan.tiered.weight_streaming import (
    TransferBytes,
    at_once,
    seconds_of,
    transfer_bytes,
    uses_all_gather,
)
from offload_trainer.units import format_seconds


def node(gpu: int = 80 * GB, **links: float) -> MachineProfile:
    """Return a machine with 50 GB/s for each GPU and 400 GB/s of memory; products and updates take no time."""
    return cluster(gpu=gpu, copies=(5e10, 4e10, 3e10), memory=4e11, **{name: rate(v) for name, v in links.items()})


def planned(here: MachineProfile, *words: str, gpus: int = 8) -> Plan:
    config = wish("--engine", "tiered", "--params", "cpu", "--dtype", "bf16", *words)
    return make_plan(config, SHAPES["gpt2-xl"], here, world=gpus)


def test_bytes_of_a_unit() -> None:
    """Each of 3 ranks copies 2 of 8 pieces and the 2 left over; 4 pieces come from the other ranks."""
    piece = 2 * ALIGN
    assert transfer_bytes(8 * piece, item_bytes=2, ranks=3, by_parts=True) == TransferBytes(4 * piece, 4 * piece)
    assert transfer_bytes(8 * piece, item_bytes=2, ranks=3, by_parts=False) == TransferBytes(8 * piece, 0)
    assert transfer_bytes(2 * piece, item_bytes=2, ranks=3, by_parts=True) == TransferBytes(
        2 * piece, 0
    )  # fewer pieces than ranks


def test_rates_of_all_at_once() -> None:
    """Timed rates are used; otherwise one GPU's rate, limited by its share of the common memory."""
    alone = at_once(node(), ranks=1).rates
    assert alone == node().rates
    few, many = at_once(node(), ranks=8).rates, at_once(node(), ranks=16).rates
    assert (few.to_device, few.from_device, few.both_ways) == (alone.to_device, alone.from_device, alone.both_ways)
    assert (many.to_device.value, many.to_device.origin) == (4e11 / 16, "assumed")
    assert many.both_ways.value == 3e10 / 2
    timed = at_once(node(to_device_at_once=1e10, from_device_at_once=2e10), ranks=8).rates
    assert (timed.to_device.value, timed.from_device.value) == (1e10, 2e10)


@pytest.mark.parametrize(
    ("links", "parts"),
    [
        ({}, False),  # the speed of an all-gather is unknown
        ({"between_gpus": 3e11}, True),  # NVLink
        # the timed all-gather takes precedence over the data sheet
        ({"between_gpus": 3e11, "all_gather": 2e10}, False),
        ({"all_gather": 4.9e10}, False),  # 7/8 at 49 GB/s take longer than 7/8 at 50
        ({"all_gather": 5.1e10}, True),
        ({"all_gather": 2e10, "to_device_at_once": 1e10}, True),  # PCIe switches: GPUs share the path to memory
    ],
)
def test_the_faster_transfer_is_chosen(links: dict[str, float], parts: bool) -> None:
    plan = planned(node(**links))
    assert plan.sizes.by_parts == parts
    (told,) = [note for note in plan.notes if note.startswith("weight transfer for 8 GPUs")]
    assert ("GPUs: all_gather" if parts else "GPUs: direct") in told
    assert ("unknown" in told) == (not links)
    assert planned(node(**links), "tiered.weight_transfer=all_gather").sizes.by_parts
    assert not planned(node(**links), "tiered.weight_transfer=direct").sizes.by_parts
    assert any(
        "(tiered.weight_transfer=direct)" in note
        for note in planned(node(**links), "tiered.weight_transfer=direct").notes
    )


def test_both_transfers_match_the_arithmetic() -> None:
    """The largest unit of gpt2-xl is its embedding: 50257 x 1600 weights of 2 bytes and the positions'."""
    plan = planned(node(between_gpus=3e11, to_device_at_once=2.5e10))
    largest = 2 * max(unit.elements for unit in units_of(SHAPES["gpt2-xl"]))
    whole, parts = largest / 2.5e10, largest / 8 / 2.5e10 + largest * 7 / 8 / 3e11
    (told,) = [note for note in plan.notes if note.startswith("weight transfer for 8 GPUs")]
    assert f"the largest block takes {format_seconds(whole)} if each GPU copies all" in told
    assert f"(direct), {format_seconds(parts)} if each copies its shard" in told


def test_seconds_and_bytes_of_a_plan() -> None:
    """Forward and backward wait for the bytes from RAM, and then for the other GPUs' parts."""
    direct = planned(node(between_gpus=3e11), "tiered.weight_transfer=direct")
    parts = planned(node(between_gpus=3e11))
    for phase in ("forward", "backward"):
        (whole,) = [one.read for one in direct.traffic if (one.place, one.phase) == ("device", phase)]
        (mine,) = [one.read for one in parts.traffic if (one.place, one.phase) == ("device", phase)]
        (others,) = [one.read for one in parts.links if (one.place, one.phase) == (GPUS, phase)]
        assert mine + others == whole
        assert mine == pytest.approx(whole / 8, rel=1e-2)  # plus what does not divide
        if phase == "forward":  # the backward also waits for gradients to leave
            assert direct.forecast.seconds[phase] == pytest.approx(whole / 5e10, rel=1e-3)
            assert parts.forecast.seconds[phase] == pytest.approx(mine / 5e10 + others / 3e11, rel=1e-3)
    assert parts.tiers["gpu"]["need"] - direct.tiers["gpu"]["need"] == 8 * (512 << 20)


def test_without_gpus_shards_are_gathered_only_on_request() -> None:
    here = node(gpu=0, all_gather=1e12)
    assert not planned(here).sizes.by_parts
    assert planned(here, "tiered.weight_transfer=all_gather").sizes.by_parts
    assert not uses_all_gather("all_gather", here, ranks=1)
    assert seconds_of(TransferBytes(10**9, 10**9), here, ranks=2) == pytest.approx(1e9 / 1e11 + 1e9 / 1e12)
    assert seconds_of(TransferBytes(10**9, 10**9), node(gpu=0), ranks=2) is None


def test_a_setting_without_effect_is_noted() -> None:
    for words, gpus in ((("--params", "gpu"), 8), ((), 1)):
        plan = planned(node(), *words, "tiered.weight_transfer=all_gather", gpus=gpus)
        assert not plan.sizes.by_parts
        assert any("tiered.weight_transfer=all_gather has no effect here" in note for note in plan.notes)


def test_copies_in_both_directions_at_once_have_a_rate_each() -> None:
    """Much PCIe 4.0 hardware copies in at half of its rate while it copies out; several GPUs slow both alike."""
    alone = cluster(copies=(25e9, 25e9, 12e9))
    apart = replace(alone, rates=replace(alone.rates, both_ways_out=rate(24e9)))
    assert copy_seconds(12 * GB, 24 * GB, apart) == pytest.approx(1.0)
    assert copy_seconds(25 * GB, 24 * GB, apart) == pytest.approx(1.0 + 13 / 25)
    assert copy_seconds(12 * GB, 24 * GB, alone) == pytest.approx(1.0 + 12 / 25)
    several = at_once(replace(apart, links=Links(to_device_at_once=rate(12.5e9))), ranks=2).rates
    assert (several.both_ways, several.both_ways_out) == (
        replace(rate(12e9), value=6e9),
        replace(rate(24e9), value=12e9),
    )
