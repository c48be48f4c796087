"""Tests of plans for several ranks and machines: links by hand, how weights reach GPUs, ways to divide a step.

Bytes of the tiered engine are compared with those of real ranks in tests/offload/test_rank_bytes.py.
"""

import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from sample_plans import GB, SHAPES, cluster, rate, wish

from offload_trainer.cli import main
from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_seconds
from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan import communication
from offload_trainer.plan.communication import GPUS, NETWORK, OUTBOX, STEP_BARRIERS, Collective, link_seconds, refusal
from offload_trainer.plan.deepspeed import gathered, zero_sizes
from offload_trainer.plan.machine import Links, MachineProfile, read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.shape import Weight
from offload_trainer.plan.step_time import copy_seconds
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.plan.tiered.weight_streaming import at_once, seconds_of, uses_all_gather
from offload_trainer.plan.tiers import Placement
from offload_trainer.plan.workload import Workload
from offload_trainer.run.commands.plan import _batches, compare_modes, modes

SHAPE = SHAPES["gpt2-medium"]  # 24 blocks of 1024, 16 heads


def planned(here: MachineProfile, *words: str, nodes: int, gpus: int = 2, engine: str = "tiered") -> Plan:
    config = wish("--engine", engine, *words)
    return make_plan(config, SHAPE, here, world=gpus * nodes, nodes=nodes)


def by_link(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    return {(one.place, one.phase): (one.read, one.written) for one in plan.links}


def test_seconds_of_the_links() -> None:
    """Transfers overlap products and the update, additions and barriers do not. Each of 3 nodes sends a third to 2."""
    weights, found = 2 * SHAPE.trainable, by_link(planned(cluster(), "--params", "gpu", nodes=1, gpus=4))
    assert {place for place, _ in found} == {OUTBOX, GPUS}
    assert found[GPUS, "update"][0] == pytest.approx(3 / 4 * weights, rel=0.01)
    found = by_link(planned(cluster(network=rate(1e9)), "--params", "gpu", "--accumulate", "1", nodes=3))
    for phase, times in (("update", 2 / 3), ("backward", 4 / 3)):
        assert found[NETWORK, phase] == pytest.approx((times * weights,) * 2, rel=0.01)
    plan = planned(cluster(network=rate(1e9)), "--params", "gpu", nodes=2)
    found, seconds = by_link(plan), plan.forecast.seconds
    assert seconds["backward"] == pytest.approx(max(found[NETWORK, "backward"]) / 1e9, rel=1e-3)
    assert seconds["update"] == pytest.approx(max(found[NETWORK, "update"]) / 1e9, rel=1e-3)
    slow = cluster(network=rate(1e9), matmul=1e12)
    computing = planned(slow, "--params", "gpu", nodes=2).forecast
    assert computing.slowest("backward").kind == "compute"
    told = replace(slow, links=replace(slow.links, message=rate(1e3)))
    later = planned(told, "--params", "gpu", nodes=2).forecast
    units, each = len(units_of(SHAPE)), 2 * 3 * 1e-3
    assert later.seconds["backward"] - computing.seconds["backward"] == pytest.approx(units * each)
    assert later.seconds["update"] == pytest.approx(max(found[NETWORK, "update"]) / 1e9 + STEP_BARRIERS * each)
    assert any("barriers" in note for note in planned(told, "--params", "gpu", nodes=2).notes)
    untimed = [planned(cluster(), "--params", "gpu", nodes=nodes).forecast for nodes in (1, 2)]
    assert [found.seconds["backward"] is None for found in untimed] == [False, True]


@pytest.mark.parametrize(("params", "times"), [("gpu", (0, 4, 1)), ("cpu", (4, 8, 0))])
def test_stock_zero_by_its_paper(params: str, times: tuple[int, int, int]) -> None:
    """ZeRO-2 gathers weights once, ZeRO-3 twice a micro-batch, somewhat less since some stay for their next use."""
    words = ("--params", params, "--optimizer", "cpu", "--accumulate", "4")
    found = by_link(planned(cluster(network=rate(1e9)), *words, nodes=2, engine="deepspeed"))
    each = 3 / 4 * 2 * SHAPE.parameters
    for place in (NETWORK, GPUS):
        for phase, count in zip(("forward", "backward", "update"), times, strict=True):
            near = found.get((place, phase), (0, 0))
            assert near == pytest.approx((count * each,) * 2, rel=1e-6 if params == "gpu" else 0.2, abs=0.01 * each)
        in_all = sum(size for (where, _), (size, _) in found.items() if where == place)
        assert in_all <= sum(times) * each * 1.01


def test_machines_of_a_file_or_the_command_line_are_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "--machine", "4xrtx4090-10gbe", "--model", "gpt2", "--engine", "tiered"]
    assert main([*words, "--nodes", "2", "--gpus", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chosen"]["nodes"], found["chosen"]["ranks"]) == (2, 6)
    assert {one["place"] for one in found["links"]} >= {NETWORK, OUTBOX}
    (tmp_path / "two.json").write_text(json.dumps(asdict(read_machine("4xrtx4090-10gbe")) | {"nodes": 2}))
    assert main(["plan", "--machine", str(tmp_path / "two.json"), *words[3:]]) == 0
    printed = capsys.readouterr().out
    assert "tiered engine" in printed
    assert "8 ranks on 2 nodes" in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((["--machine", "8xh100-80gb", f"--nodes={n}"], "from 1 to 1024") for n in ("0", "1,2", "", "2000")),
        (["--parallel", "--machine", "8xh100-80gb", "--nodes=0"], "one whole number from 1 to 1024"),
        (["--parallel", "--machine", "8xh100-80gb", "--gpus=1"], "there is only one rank: add --gpus N"),
        (["--nodes", "2"], "belongs to --machine"),
    ],
)
def test_invalid_numbers_of_nodes(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


# -- ways to divide a step --------------------------------------------------------------------------------------------

here = partial(cluster, copies=(1e10, 1e10, 1e10), matmul=1e14, memory=1e11, update=1e9)


def work(*words: str, world: int = 8, nodes: int = 1) -> Workload:
    return workload(wish(*words), SHAPE, world=world, nodes=nodes, saves=False)


def test_collectives_by_hand() -> None:
    """gpt2-medium has 4 matrices a block, 2 of them split by columns, in 24 blocks with bf16 states of 1024."""
    moved = communication.zero_collectives(work("--accumulate", "3"), stage=1, trained=800, gathered={})
    found = [(sent.phase, sent.bytes) for sent in moved]
    assert found == [("backward", pytest.approx(7 / 8 * 2 * 800)), ("update", pytest.approx(7 / 8 * 2 * 800))]
    # Of rings of `group` ranks at a distance of `stride`, `times` enter a node of `here` ranks.
    rings = (16, 1, 2, 1), (2, 1, 1, 1), (4, 4, 8, 4), (2, 8, 8, 8), (2, 8, 4, 4), (4, 2, 8, 0)
    for group, stride, here, times in rings:
        assert Collective("forward", 100.0, group, stride).network(here) == 100.0 * times, (group, stride, here)

    step = work("--micro-batch", "2", "--accumulate", "5", "--seq-len", "512", "model.activation_checkpointing=off")
    forward, backward = communication.tensor_collectives(replace(step, tensor=8))
    each = 2 * 7 / 8 * 2 * (2 * 512) * 1024
    assert communication.column_products(SHAPE) == 2
    assert (forward.phase, forward.bytes) == ("forward", pytest.approx(5 * 24 * 2 * each))
    assert (backward.phase, backward.bytes) == ("backward", pytest.approx(5 * 24 * 2 * each))
    _, again = communication.tensor_collectives(replace(step, tensor=8, checkpointed=24))
    assert again.bytes == pytest.approx(5 * 24 * 3 * each)
    matrices = 24 * 12 * 1024**2
    held = sum(communication.part_held(weight, 8) for weight in SHAPE.weights)
    assert held == matrices // 8 + SHAPE.parameters - matrices


def test_an_impossible_stage_is_refused() -> None:
    stock = ("--engine", "deepspeed")
    with pytest.raises(UserError, match=r"zero_stage=2 keeps whole weights on each GPU.*use --params gpu"):
        wish(*stock, "deepspeed.zero_stage=2", "--params", "cpu")
    with pytest.raises(UserError, match=r"parallel.tensor=2 works with ZeRO-1 only: leave deepspeed.zero_stage out"):
        wish(*stock, "deepspeed.zero_stage=3", "parallel.tensor=2")
    wish(*stock, "deepspeed.zero_stage=3", "--params", "cpu")
    words = ("--engine", "deepspeed", "--save-every", "0", "deepspeed.zero_stage=1", "--accumulate", "2")
    with pytest.raises(UserError, match=r"zero_stage=1 --optimizer gpu with fp32 sums"):
        make_plan(wish(*words, "--optimizer", "gpu"), SHAPE, here(), world=2)
    plan = make_plan(wish(*words), SHAPE, here(), world=2)
    assert (plan.title, plan.placement.optimizer) == ("DeepSpeed ZeRO-1", "cpu")


def test_zero_3_gathers_once_what_stays_for_the_backward() -> None:
    sizes = zero_sizes(SHAPE, DeepSpeedSection(), Placement("cpu", "cpu"), world=8, item_bytes=2)
    small = sum(weight.numel for weight in SHAPE.weights if weight.numel <= 100_000)
    moving = SHAPE.parameters - small + SHAPE.largest  # the tied head comes twice
    for live, prefetch, again in (
        (2 * SHAPE.parameters, 1, 0),
        (1, 0, moving),
        (10**8, 1, moving - 10**8),
        (10**8, 0, moving - 10**8 // 2),
    ):
        found = gathered(SHAPE, replace(sizes, max_live=live, prefetch_bucket=prefetch))
        assert found == {"forward": moving, "backward": again, "update": small}


def test_rates_timed_between_ranks_count_if_no_links_are_described() -> None:
    flow, timed = Collective("backward", 1e12, 8, 1), {"all_gather": rate(2e9)}
    for links, speed in ((timed, 2e9), (timed | {"between_gpus": rate(1e11)}, 1e11), ({}, 1e10)):
        assert link_seconds(flow, here(**links), here=8) == 1e12 / speed


def test_models_that_cannot_be_divided_are_named() -> None:
    assert refusal(SHAPE, tensor=8) == ""
    assert refusal(SHAPE, tensor=32) == "16 attention heads are not a multiple of 32"
    assert refusal(replace(SHAPE, key_heads=4), tensor=8) == "4 key-value heads are not a multiple of 8"
    experts = Weight("h.0.experts", (4, 8, 8), unit="h.0", block=True)
    assert "experts" in refusal(replace(SHAPE, weights=(*SHAPE.weights, experts)), tensor=2)


def test_rows_of_the_table_are_plans() -> None:
    """Each mode has its plan's JSON, and a name and accepted setting of its own; refused ones have a reason."""
    for world in (2, 4, 6, 8, 16):
        names, settings, _ = zip(*modes(world), strict=True)
        assert len({*names}) == len({*settings}) == len([wish(*words.split()) for words in settings])
    fast = here(between_gpus=rate(1e11), network=rate(1e10))
    model = ("--model", "gpt2-medium", "--gpus", "8")
    found, text, best = compare_modes(wish(*model, "--micro-batch", "1", "--accumulate", "16"), fast, None)
    refused = ["tensor 2 x ZeRO-1 over 4", "tensor 4 x ZeRO-1 over 2", "tensor 8"]
    assert [one["mode"] for one in found["refused"]] == refused
    assert f"refused: {', '.join(refused)}: transformers has no" in text
    assert all(row["name"] in text for row in found["modes"])
    assert re.search(r"  between gpus +100 GB/s", text)
    assert (found["tokens_per_step"], found["ranks"]) == (8 * 16 * 1024, 8)
    rows = {row["name"]: row for row in found["modes"]}
    assert len(rows) == 5
    seconds = [row["step"] for row in rows.values()]
    assert seconds == sorted(seconds)
    assert (found["fastest"], best.forecast.step) == (next(iter(rows)), seconds[0])
    stage_2 = rows["ZeRO-2 over 8"]
    assert stage_2["words"] == "--engine deepspeed deepspeed.zero_stage=2"
    micro = stage_2["chosen"]["micro_batch"]
    words = (*stage_2["words"].split(), "--micro-batch", str(micro), "--accumulate", str(16 // micro))
    plan = json.loads(json.dumps(make_plan(wish(*model, *words), SHAPE, fast, world=8).to_json()))
    assert json.loads(json.dumps({key: stage_2[key] for key in plan})) == plan
    one_row = ("--model", "gpt2-medium", "--gpus", "4", "parallel.pipeline=4", "--micro-batch", "1")
    found, *_ = compare_modes(wish(*one_row), here(), None)
    assert {row["name"] for row in found["modes"]} == {"tiered, 4 ranks, pipeline"}
    reasons = {row["mode"]: row["reason"] for row in found["refused"]}
    assert reasons["tiered, 4 ranks"] == "1 rows a step are not a multiple of 4 data-parallel ranks"


def test_pipelines_are_compared_with_more_micro_batches_of_the_same_rows() -> None:
    """Other ways take the largest micro-batch that fits; more micro-batches keep more of a pipeline's ranks busy."""
    for rows in (64, 24, 2):
        tried = [config.train for config in _batches(wish(), "--engine tiered parallel.pipeline=4", rows, 4)]
        assert {one.micro_batch_size * one.gradient_accumulation_steps for one in tried} == {rows}
        counts = {one.gradient_accumulation_steps for one in tried}
        assert counts >= {min(rows, times * 4) for times in (1, 2)} | {rows}, rows
        assert 16 in counts or rows < 64


# -- how several GPUs receive weights from RAM ------------------------------------------------------------------------


def node(gpu: int = 80 * GB, **links: float) -> MachineProfile:
    """Return a machine with 50 GB/s for each GPU and 400 GB/s of memory; products and updates take no time."""
    return cluster(gpu=gpu, copies=(5e10, 4e10, 3e10), memory=4e11, **{name: rate(v) for name, v in links.items()})


def of_node(here: MachineProfile, *words: str, gpus: int = 8) -> Plan:
    config = wish("--engine", "tiered", "--params", "cpu", "--dtype", "bf16", *words)
    return make_plan(config, SHAPES["gpt2-xl"], here, world=gpus)


def test_rates_of_all_at_once() -> None:
    """Timed rates are used; otherwise one GPU's rate, limited by its share of the common memory.

    Much PCIe 4.0 hardware copies in at half of its rate while it copies out; several GPUs slow both alike.
    """
    alone = at_once(node(), ranks=1).rates
    assert alone == node().rates
    few, many = at_once(node(), ranks=8).rates, at_once(node(), ranks=16).rates
    assert (few.to_device, few.from_device, few.both_ways) == (alone.to_device, alone.from_device, alone.both_ways)
    assert (many.to_device.value, many.to_device.origin) == (4e11 / 16, "assumed")
    assert many.both_ways.value == 3e10 / 2
    timed = at_once(node(to_device_at_once=1e10, from_device_at_once=2e10), ranks=8).rates
    assert (timed.to_device.value, timed.from_device.value) == (1e10, 2e10)
    alone = cluster(copies=(25e9, 25e9, 12e9))
    apart = replace(alone, rates=replace(alone.rates, both_ways_out=rate(24e9)))
    assert copy_seconds(12 * GB, 24 * GB, apart) == pytest.approx(1.0)
    assert copy_seconds(25 * GB, 24 * GB, apart) == pytest.approx(1.0 + 13 / 25)
    assert copy_seconds(12 * GB, 24 * GB, alone) == pytest.approx(1.0 + 12 / 25)
    several = at_once(replace(apart, links=Links(to_device_at_once=rate(12.5e9))), ranks=2).rates
    assert (several.both_ways, several.both_ways_out) == (rate(6e9), rate(12e9))


@pytest.mark.parametrize(
    ("links", "parts"),
    [
        ({}, False),  # the speed of an all-gather is unknown
        ({"between_gpus": 3e11}, True),  # NVLink
        ({"between_gpus": 3e11, "all_gather": 2e10}, False),  # the timed rate takes precedence over the data sheet
        ({"all_gather": 4.9e10}, False),  # 7/8 at 49 GB/s take longer than 7/8 at 50
        ({"all_gather": 5.1e10}, True),
        ({"all_gather": 2e10, "to_device_at_once": 1e10}, True),  # PCIe switches: GPUs share the path to memory
    ],
)
def test_the_faster_transfer_is_chosen(links: dict[str, float], parts: bool) -> None:
    """The largest unit of gpt2-xl is its embedding: 50257 x 1600 weights of 2 bytes and the positions'."""
    plan = of_node(node(**links))
    assert plan.sizes.by_parts == parts
    (told,) = [note for note in plan.notes if note.startswith("weight transfer for 8 GPUs")]
    assert ("GPUs: all_gather" if parts else "GPUs: direct") in told
    largest, into = 2 * max(unit.elements for unit in units_of(SHAPES["gpt2-xl"])), links.get("to_device_at_once", 5e10)
    assert f"the largest block takes {format_seconds(largest / into)} if each GPU copies all" in told
    joined = links.get("all_gather", links.get("between_gpus"))
    shards = format_seconds(largest / 8 / into + largest * 7 / 8 / joined) if joined else "unknown"
    assert f"(direct), {shards} if each copies its shard" in told
    assert of_node(node(**links), "tiered.weight_transfer=all_gather").sizes.by_parts
    direct = of_node(node(**links), "tiered.weight_transfer=direct")
    assert not direct.sizes.by_parts
    assert any("(tiered.weight_transfer=direct)" in note for note in direct.notes)


def test_seconds_and_bytes_of_a_plan() -> None:
    """Forward and backward wait for the bytes from RAM, and then for the other GPUs' parts."""
    direct = of_node(node(between_gpus=3e11), "tiered.weight_transfer=direct")
    parts = of_node(node(between_gpus=3e11))
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
    assert not of_node(here).sizes.by_parts
    assert of_node(here, "tiered.weight_transfer=all_gather").sizes.by_parts
    assert not uses_all_gather("all_gather", here, ranks=1)
    assert seconds_of((10**9, 10**9), here, ranks=2) == pytest.approx(1e9 / 1e11 + 1e9 / 1e12)
    assert seconds_of((10**9, 10**9), node(gpu=0), ranks=2) is None
    for words, gpus in ((("--params", "gpu"), 8), ((), 1)):
        plan = of_node(node(), *words, "tiered.weight_transfer=all_gather", gpus=gpus)
        assert not plan.sizes.by_parts
        assert any("tiered.weight_transfer=all_gather has no effect here" in note for note in plan.notes)
