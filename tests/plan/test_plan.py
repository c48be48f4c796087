"""Tests of plans: properties that the arithmetic must have, DeepSpeed's configurations, the screen before a run, and
what a run keeps of the one that it resumes, or refuses.

After an intended change, run `UPDATE_GOLDEN=1 pytest tests/plan/test_plan.py` and review the difference.
"""

import json
import os
import random
import re
from collections import Counter
from dataclasses import astuple, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from commands import TINY
from sample_plans import GB, SHAPES, least_ram, machine, timed, wish

from offload_trainer.cli import main
from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes, format_seconds
from offload_trainer.config import TrainConfig
from offload_trainer.engine.deepspeed import deepspeed_config
from offload_trainer.plan.deepspeed import zero_sizes
from offload_trainer.plan.machine import DriveFacts, MachineProfile, Rate, Rates, read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import ALIGN, Unit, aligned, pages_of, range_of_rank, rank_of, units_of
from offload_trainer.plan.tiered.weight_streaming import NCCL_BYTES, fetches
from offload_trainer.plan.tiers import DEVICE, RAM, Placement
from offload_trainer.run import planning, resume
from offload_trainer.run.commands.plan import plan_elsewhere
from offload_trainer.run.planning import _moves, _with_resumed_choices, model_of, plan_run, planned, with_what_fits
from offload_trainer.settings import load_config
from offload_trainer.storage.manifest import CONFIG, FORMAT, MANIFEST, Manifest, differences, refuse_other_run

pytestmark = pytest.mark.usefixtures("counted_once")

GOLDEN = Path(__file__).parents[1] / "golden/deepspeed.tsv"

# Words, machine, and the first changes with which the plan fits: fewer checkpoints where these are the cause.
REMEDIES: list[tuple[str, MachineProfile, tuple[str, ...]]] = [
    ("--model gpt2", replace(machine(), output=DriveFacts("/out", 4 * GB, "ext4")), ("save.keep=1", "--save-every 0")),
    ("--model gpt2", replace(machine(), output=DriveFacts("/out", 2 * GB, "ext4")), ("--save-every 0",)),
    ("--model gpt2 --optimizer cpu", machine(ram=2 * GB), ("--optimizer auto", "optim.moment_dtype=8bit")),
    ("--model gpt2", replace(machine(ram=9 * GB // 4), drives=()), ("optim.moment_dtype=8bit",)),
    ("--model gpt2 --micro-batch 64", machine(gpu=4 * GB), ("--micro-batch 1 --accumulate 64",)),
    ("--model gpt2", machine(ram=GB // 2, drive=GB // 8), ()),
]


@pytest.mark.parametrize(("words", "here", "expected"), REMEDIES)
def test_a_refusal_names_changes_that_fit(words: str, here: MachineProfile, expected: tuple[str, ...]) -> None:
    given = [*words.split(), "--scratch"]
    given += ["--nvme", "/ssd"] if here.drives else []
    refused = plan_elsewhere(load_config(given), here)
    assert not refused.fits
    assert refused.fits_with[: len(expected)] == expected
    with pytest.raises(UserError) as error:
        refused.refuse(force=False)
    for more in refused.fits_with:
        assert f"`{more}`" in str(error.value)
        assert plan_elsewhere(load_config([*given, *more.split()]), here).fits
    assert bool(refused.fits_with) == bool(expected)
    assert bool(expected) != ("Not even three of these together make it fit" in str(error.value))


def test_remedies_that_a_run_cannot_take_are_left_out() -> None:
    """bf16 masters are AdamW's in the tiered engine; with shorter rows a run that resumes would be another run."""
    tiny, small = machine(ram=GB // 2, drive=GB // 8), machine(gpu=16 * GB // 10)
    for words in ("", "optim.name=muon", "--engine deepspeed"):
        config = load_config(["--model", "gpt2", "--scratch", "--dtype", "bf16", *words.split()])
        found = planned(config, model_of(config), tiny, world=1)
        assert not found.plan.fits
        assert ("optim.master_dtype=bf16" in _moves(found, config, here=False)) == (not words)
    config = load_config(["--model", "gpt2", "--micro-batch", "1", "--scratch"])
    found = planned(config, model_of(config), small, world=1)
    for resumes, remedies in ((False, ("--seq-len 512", "--seq-len 128")), (True, ())):
        assert with_what_fits(found, config, here=False, resumes=resumes).plan.fits_with == remedies


@pytest.mark.parametrize("homes", list(product(("gpu", "cpu", "nvme"), repeat=2)), ids="/".join)
def test_items_sum_to_the_tiers(homes: tuple[str, str]) -> None:
    plan = make_plan(wish("--params", homes[0], "--optimizer", homes[1]), SHAPES["gpt2-xl"], machine(gpu=32 * GB))
    assert (plan.placement.params, plan.placement.optimizer) == homes
    for tier, room in plan.tiers.items():
        assert room["need"] == sum(item.bytes for item in plan.items if item.tier == tier)
    assert {item.tier for item in plan.items} <= set(plan.tiers)


def test_a_plan_that_just_fits_is_refused_with_one_byte_less() -> None:
    config, shape = wish("--params", "cpu", "--optimizer", "cpu"), SHAPES["gpt2"]
    need = least_ram(make_plan(config, shape, machine()))
    fits = make_plan(config, shape, machine(ram=need))
    fits.to_json()["tiers"]["ram"]["have"] = 0  # a report changes the JSON, and not the plan
    assert fits.fits
    assert not make_plan(config, shape, machine(ram=need - 1)).fits


def test_auto_uses_the_first_that_fits_and_says_why_not_the_others() -> None:
    shape = SHAPES["gpt2-xl"]
    chosen = {gpu: make_plan(wish(), shape, machine(gpu=gpu * GB)) for gpu in (80, 16)}
    assert (chosen[80].engine, chosen[80].homes) == ("tiered", "params gpu, optimizer gpu")
    assert chosen[80].to_json()["chosen"]["optimizer"] == "gpu"
    assert chosen[16].engine == "tiered"
    assert re.fullmatch(r"params gpu, optimizer [1-9][0-9.]+% gpu, rest RAM", chosen[16].homes)
    assert [name for name, _ in chosen[16].rejected] == ["params gpu, optimizer gpu"]
    assert "gpu needs" in chosen[16].rejected[0][1]
    assert make_plan(wish(), shape, machine(gpu=16 * GB)) == chosen[16]
    assert SHAPES["gpt2-10b"].parameters == 10_279_239_680
    none = make_plan(wish(), SHAPES["gpt2-10b"], machine(gpu=1 * GB, ram=2 * GB))
    assert not none.fits
    assert none.shortfalls()


@pytest.mark.parametrize("ram", [20, 12])
@pytest.mark.parametrize("gpu", [12, 16, 20])
def test_auto_fills_the_gpu_then_ram_then_drives(gpu: int, ram: int) -> None:
    plan = make_plan(wish(), SHAPES["gpt2-xl"], machine(gpu=gpu * GB, ram=ram * GB))
    assert plan.fits
    assert 0 < plan.sizes.gpu_fraction < 1
    # A unit's gradients move to the GPU with the last of its state, so one unit's may not have fitted.
    assert gpu * GB - 0.4 * GB < plan.tiers["gpu"]["need"] <= gpu * GB
    left = 1 - plan.sizes.gpu_fraction - plan.sizes.ram_fraction
    assert round(left, 9) == 0 or plan.tiers["ram"]["need"] > 0.9 * ram * GB
    state = {item.tier: item.bytes for item in plan.items if item.name.startswith("state")}
    total = sum(state.values())
    assert state["gpu"] == pytest.approx(plan.sizes.gpu_fraction * total, rel=0.01)
    assert state.get("/ssd", 0) == pytest.approx(max(0.0, left) * total, rel=0.01, abs=1e6)


def test_configured_shares_are_kept() -> None:
    shape, here = SHAPES["gpt2-xl"], machine(gpu=16 * GB, ram=64 * GB)

    def shares(words: str) -> tuple[float, float]:
        sizes = make_plan(wish(*words.split()), shape, here).sizes
        return sizes.gpu_fraction, sizes.ram_fraction

    on_gpu, in_ram = shares("")
    assert on_gpu + in_ram == 1
    for words, expected in {
        "--ram-fraction 0.25": (pytest.approx(on_gpu, abs=0.003), 0.25),  # up to a page's size
        "--ram-fraction 0.9": (0.1, 0.9),
        "--gpu-fraction 0.125": (0.125, 0.875),
        "--gpu-fraction 0.25 --ram-fraction 0.5": (0.25, 0.5),
        "--optimizer gpu": (1, 0),
        "--optimizer cpu": (0, 1),
        "--optimizer nvme": (0, 0),
    }.items():
        assert shares(words) == expected, words


def test_no_state_is_on_a_gpu_without_a_kernel() -> None:
    shape, here = SHAPES["gpt2-xl"], replace(machine(gpu=80 * GB), no_state_on_gpu="no Triton")
    plan = make_plan(wish(), shape, here)
    assert plan.homes == "params gpu, optimizer RAM"
    assert [note for note in plan.notes if "no Triton" in note]
    for words in (["--gpu-fraction", "0.5"], ["--optimizer", "gpu"]):
        with pytest.raises(UserError, match="no Triton; use --gpu-fraction 0"):
            make_plan(wish(*words), shape, here)


def held(*words: str, world: int, nodes: int = 1) -> Counter[str]:
    """Return the bytes of a plan's items by tier and name, and those that each phase reads and writes on the drive."""
    config = wish("--engine", "tiered", *words)
    plan = make_plan(config, SHAPES["gpt2-medium"], machine(gpu=32 * GB), world=world, nodes=nodes)
    assert plan.tiers["gpu"]["have"] == world // nodes * 32 * GB
    assert plan.to_json()["chosen"].get("nodes", 1) == nodes
    found = Counter[str]()
    for item in plan.items:
        found[f"{item.tier} {item.name}"] += item.bytes
    for moved in plan.traffic:
        if moved.place == "/ssd":
            found.update({f"{moved.phase} read": moved.read, f"{moved.phase} written": moved.written})
    return found


def test_ranks_and_nodes_share_the_state_and_move_the_drive_bytes_of_one_rank() -> None:
    """Four ranks, as many micro-batches on two or three ranks as on one, and four nodes of two ranks."""
    words = ("--params", "cpu", "placement.gradients=cpu", "--gpu-fraction", "0", "--ram-fraction", "0.5")
    one, four = (held(*words, "--accumulate", str(4 // world), world=world) for world in (1, 4))
    for name in ("ram state in RAM", "/ssd state", "ram gradients", "ram weights", "update read", "update written"):
        assert four[name] == pytest.approx(one[name], rel=1e-2), name
    for name in ("ram process", "gpu weights in use", "gpu CUDA context"):
        assert four[name] == 4 * one[name], name
    units = units_of(SHAPES["gpt2-medium"])
    assert four["ram gradient exchange"] == 4 * 2 * 2 * max(unit.trained for unit in units)
    assert four["gpu broadcasts"] == 4 * NCCL_BYTES  # a communicator of all ranks, for new weights on the devices
    assert "gpu broadcasts" not in one

    away = ("--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme", "--accumulate", "2")
    one, *others = (held(*away, "tiered.micro_batch_order=depth_first", world=ranks) for ranks in (1, 2, 3))
    assert "ram weights read" not in one
    of_node = [name for name in one if name.endswith((" read", " written"))] + ["/ssd weights", "ram gradient buffers"]
    assert len(of_node) == 8
    for several in others:  # weights pass through shared RAM
        assert several["ram weights read"] == 2 * 2 * max(unit.elements for unit in units)
        assert {name: several[name] for name in of_node} == {name: one[name] for name in of_node}

    words = ("--params", "cpu", "--ram-fraction", "0.5")
    one, four = (held(*words, "--accumulate", str(8 // n), world=2 * n, nodes=n) for n in (1, 4))
    for name in ("ram state in RAM", "/ssd state", "ram gradients", "update read", "update written"):
        assert four[name] == pytest.approx(one[name] / 4, rel=0.01), name
    for name in ("ram weights", "ram process", "ram gradient exchange", "gpu weights in use", "gpu CUDA context"):
        assert four[name] == one[name], name


def test_tiers_and_ranks_divide_the_state() -> None:
    """Each byte has one place; units completed last are in RAM; ranks have about equal parts of each tier."""
    units = units_of(SHAPES["gpt2"])
    total = sum(unit.trained for unit in units)
    shares = [(gpu, ram) for gpu, ram in product((0.0, 0.1, 0.5, 0.999, 1.0), repeat=2) if gpu + ram <= 1]
    cases = [*product([*shares, (0.7, 0.3)], ([1.0], [1.0, 2.0, 0.5]), (False, True), (1,))]
    for (gpu, ram), speeds, ahead, ranks in [*cases, *product([(0.0, 0.5)], ([1.0],), (False,), (2, 3, 8))]:
        way = {"page": 100_000, "ahead": ahead, "ranks": ranks}
        cut = pages_of(units, shares=[(DEVICE, gpu), (RAM, ram)], speeds=speeds, **way)
        assert all(cut.pages[one.number] is one.page and cut.owners[one.number] == one.rank for one in cut.groups)
        kinds = {(one.rank, one.page.unit, one.page.home, one.page.elements): one.count for one in cut.groups}
        ends, held, counted = dict.fromkeys(range(len(units)), 0), Counter[tuple[int, int]](), Counter[Any]()
        for page, owner in zip(cut.pages, cut.owners, strict=True):
            assert page.start == ends[page.unit]
            assert page.start % ALIGN == page.elements % ALIGN == 0
            assert 0 < page.elements <= aligned(100_000)
            ends[page.unit] += page.elements
            first, end = range_of_rank(units[page.unit], owner, ranks=ranks)
            assert first <= page.start < page.start + page.elements <= end
            assert all(rank_of(units[page.unit], element, ranks=ranks) == owner for element in (first, end - 1))
            held[owner, page.home] += page.elements
            counted[owner, page.unit, page.home, page.elements] += 1
        assert [ends[unit.index] for unit in units] == [unit.trained for unit in units]
        assert kinds == counted
        on_gpu, in_ram = (sum(held[rank, home] for rank in range(ranks)) for home in (DEVICE, RAM))
        assert 0 <= on_gpu - gpu * total < ALIGN
        assert ranks > 1 or abs(in_ram - ram * total) < ALIGN
        for rank in range(ranks) if ranks > 1 else ():
            for part, homes in ((1.0, (RAM, 0)), (ram, (RAM,))):
                held_there = sum(held[rank, home] for home in homes)
                assert held_there == pytest.approx(part * total / ranks, abs=ALIGN * len(units))
        for drive, speed in enumerate(speeds):
            rest = (total - on_gpu - in_ram) * speed / sum(speeds)
            assert sum(held[rank, drive] for rank in range(ranks)) == pytest.approx(rest, abs=250_000)
        assert pages_of(units, shares=[(DEVICE, gpu), (RAM, 1 - gpu)], speeds=[], **way).pages  # no rest remains
        if ahead and any(page.home == RAM for page in cut.pages if units[page.unit].block):
            assert {page.home for page in cut.pages if page.unit in (0, 1)} <= {DEVICE, RAM}


def test_sizes_follow_the_largest_weight() -> None:
    weights = [Weight("wte", (100_000, 4096))] + [Weight(f"w{i}", (4096, 512)) for i in range(64)]
    shape = ModelShape(tuple(weights), layers=16, hidden=4096, vocabulary=100_000, context=1024)
    sizes_of = partial(zero_sizes, section=TrainConfig().deepspeed, item_bytes=2)
    sizes = sizes_of(shape, placement=Placement("nvme", "nvme"), world=1)
    assert (sizes.weight_buffer_elements, sizes.prefetch_bucket) == (409_600_000, 0)
    assert sizes.largest_sub_group >= 409_600_000
    assert sizes.weight_buffers >= 65
    assert sizes_of(shape, placement=Placement("nvme", "nvme"), world=2).weight_buffer_elements == 204_800_000
    # As DeepSpeed does, a plain simulation adds weights until the sub-group size is reached.
    shape, groups = SHAPES["gpt2-medium"], [0]
    sizes = sizes_of(shape, placement=Placement("cpu", "nvme"), world=1)
    for weight in shape.weights:
        if len(weight.shape) > 1:
            groups[-1] += weight.numel
            groups += [0] * (groups[-1] >= sizes.sub_group)
    assert sizes.largest_sub_group == max(groups)


CASES = {
    "zero2-cpu-bf16": (Placement("gpu", "cpu"), [], "cpu"),
    "zero2-gpu-fp16": (Placement("gpu", "gpu"), ["--dtype", "fp16"], "cuda"),
    "zero3-cpu-bf16-accumulate": (Placement("cpu", "cpu"), ["--accumulate", "4"], "cuda"),
    "zero3-nvme-optimizer": (Placement("gpu", "nvme"), [], "cuda"),
    "zero3-nvme": (Placement("nvme", "nvme"), ["--dtype", "fp32"], "cpu"),
}


def flat(given: dict[str, Any], above: str = "") -> dict[str, str]:
    """Return the values of nested dictionaries as JSON, by their dotted keys."""
    found: dict[str, str] = {}
    for key, value in given.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": json.dumps(value)}
    return found


def test_deepspeed_configurations_are_the_golden_ones() -> None:
    found, shape = {}, SHAPES["gpt2-medium"]
    for name, (placement, words, accelerator) in CASES.items():
        config = wish(*words)
        sizes = zero_sizes(shape, config.deepspeed, placement, world=2, item_bytes=2)
        swap = "/ssd/offload-trainer/run-x" if "nvme" in astuple(placement) else None
        how = {"accelerator": accelerator, "swap_directory": swap}
        step = workload(config, shape, world=2)
        found[name] = flat(deepspeed_config(step, config.optim, config.deepspeed, placement, sizes, **how))
    keys = dict.fromkeys(key for each in found.values() for key in each)
    table = [["key", *found], *([key, *(each.get(key, "") for each in found.values())] for key in keys)]
    text = "".join("\t".join(row) + "\n" for row in table)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


def test_sums_of_several_micro_batches_are_on_the_gpu_if_they_fit() -> None:
    """Each micro-batch after the first reads and writes 4 bytes of a sum in RAM and reads 2 of gradient."""
    shape, words = SHAPES["gpt2-xl"], ("--gpu-fraction", "0", "--accumulate", "4", "--micro-batch", "1")
    trained = sum(unit.trained for unit in units_of(shape))
    here = replace(machine(gpu=24 * GB), rates=Rates(memory=Rate(100e9, "measured", "here")))
    plans = [make_plan(wish(*words, *more), shape, here) for more in ((), ("placement.gradients=cpu",))]
    plan = plans[0]
    assert "gradients gpu" in plan.homes
    assert [(item.tier, item.bytes) for item in plan.items if item.name == "gradients"] == [("gpu", 4 * trained)]
    out = {moved.phase: moved.written for moved in plan.traffic if moved.place == "device"}
    assert not out.get("backward")
    assert out["update"] == 4 * trained
    adding = [[bound.seconds for bound in one.forecast.bounds if bound.kind == "memory"] for one in plans]
    assert adding == [[], [pytest.approx(3 * 10 * trained / 100e9)]]
    once = make_plan(wish("--gpu-fraction", "0"), shape, here)
    others = (make_plan(wish(*words), shape, machine(gpu=size)) for size in (8 * GB, 0))
    assert [one.sizes.gradients for one in (plan, *others, once)] == ["gpu", "cpu", "cpu", "cpu"]


def test_gradients_in_flight_are_counted() -> None:
    """The largest gradient and 256 MB are in flight on a GPU. A CPU adds to sums in RAM, with nothing in flight."""
    shape, e = SHAPES["gpt2-xl"], 2
    words = ("--gpu-fraction", "0", "--micro-batch", "1", "--params", "gpu")

    def items(*more: str, gpu: int) -> dict[str, int]:
        plan = make_plan(wish(*words, *more), shape, machine(gpu=gpu * GB))
        return {item.name: item.bytes for item in plan.items if item.name.startswith("gradient")}

    assert items(gpu=16)["gradients in flight"] == e * shape.largest + 256_000_000
    assert items(gpu=0)["gradients in flight"] == 0
    several = ("--accumulate", "4")
    assert items(*several, "placement.gradients=gpu", gpu=16)["gradients in flight"] == 0
    in_ram = (*several, "placement.gradients=cpu")
    for more, sizes in (((), (1, 1)), (in_ram, (1, 256)), (("placement.gradients=nvme",), (32, 256))):
        rings = [items(*more, gpu=gpu)["gradient staging"] for gpu in (0, 16)]
        assert rings == [size * 1_000_000 for size in sizes], more


@pytest.mark.parametrize("ranks", [1, 2])
def test_breadth_first_a_gpu_with_room_adds_the_gradients_of_all_units_or_of_the_blocks(ranks: int) -> None:
    """Their sums leave it once, and those of two blocks are there at a time. With the first one is the embedding."""
    shape, micro, rates = SHAPES["gpt2-10b"], 8, Rates(memory=Rate(100e9, "measured", "here"))
    words = ["--gpu-fraction", "0", "--params", "cpu", "--accumulate", str(micro), "--micro-batch", "1"]
    words += ["placement.gradients=cpu", "tiered.micro_batch_order=breadth_first", f"parallel.pipeline={ranks}"]
    embedding, positions, *blocks, _ = units = units_of(shape)
    room = 40 * GB
    for most, sums in (
        (embedding.trained, 2 * blocks[0].trained + embedding.trained + positions.trained),
        (blocks[0].trained, 2 * blocks[0].trained + positions.trained),
        (0, 0),
    ):
        here = replace(machine(gpu=room, ram=500 * GB), rates=rates)
        plan = make_plan(wish(*words), shape, here, world=ranks)
        assert plan.fits
        assert plan.sizes.device_sums == most
        items = {item.name: item for item in plan.items}
        assert not sums or max(items["gradient sums"].of_ranks) == 4 * sums
        rest = [unit for unit in units if unit.trained > most]
        adding = [bound.seconds for bound in plan.forecast.bounds if bound.kind == "memory"]
        each = 10 * (micro - 1) * sum(unit.trained for unit in rest) / 100e9
        assert adding == pytest.approx([each] * bool(rest))
        numels = {unit: sum(place.weight.numel for place in unit.places) for unit in units}
        left = sum(numels.values()) * 4 + sum(numels[unit] for unit in rest) * (2 * micro - 4)
        left += micro * plan.work.hidden_bytes * sum(one != other for one, other in pairwise(plan.work.owners))
        (written,) = (one.written for one in plan.traffic if (one.place, one.phase) == ("device", "backward"))
        assert written == left // ranks
        room = plan.tiers["gpu"]["need"] // ranks - 1


def test_directories_on_one_filesystem_are_reported_together() -> None:

    def planned_on(free: int) -> Plan:
        one, words = machine(drive=free), ("--optimizer", "nvme", "--save-every", "5", "save.keep=2")
        drives, output = (replace(one.drives[0], device=7),), replace(one.output, free_bytes=free, device=7)
        return make_plan(wish(*words), SHAPES["gpt2"], replace(one, output=output, drives=drives))

    ample, plan = planned_on(500 * GB), planned_on(GB)
    need = {place: ample.tiers[place]["need"] for place in ("/ssd", "/out")}
    assert ample.fits
    for free, fits in ((sum(need.values()), True), (sum(need.values()) - 1, False), (min(need.values()) - 1, False)):
        tight = planned_on(free)
        assert tight.fits == fits
        assert all(tier["have"] >= 0 for tier in tight.tiers.values())
    sizes = {place: format_bytes(size) for place, size in need.items()}
    told = f"one filesystem has 1 GB free for {sizes['/out']} in /out and {sizes['/ssd']} in /ssd"
    assert plan.shortfalls() == [told]
    said = plan.describe(full=True)
    assert "of 0 B" not in said
    for place, other in (("/ssd", "/out"), ("/out", "/ssd")):
        line = next(line for line in said.splitlines() if line.startswith(f"  {place} "))
        assert f"{sizes[place]} of 1 GB on the filesystem shared with {other}   DOES NOT FIT" in line


def test_rows_longer_than_the_context_and_needs_of_a_model_without_state_are_refused() -> None:
    with pytest.raises(UserError, match="context is 1024 tokens"):
        make_plan(wish("--seq-len", "2048"), SHAPES["gpt2"], machine())
    frozen = tuple(replace(weight, trainable=False) for weight in SHAPES["gpt2"].weights)
    shape = replace(SHAPES["gpt2"], weights=frozen)
    assert not make_plan(wish("--engine", "tiered"), shape, machine(gpu=GB, ram=GB), saves=False).fits


def test_a_repeated_order_is_simulated_until_it_repeats(seed: int) -> None:
    """The fetches equal those of the written-out repetition, for random units, orders and buffers."""
    draw = random.Random(seed)
    for _ in range(300):
        count = draw.randint(1, 8)
        units = [
            Unit(index, str(index), block, (), trained=0, elements=ALIGN * (3 if block else draw.randint(1, 4)))
            for index, block in enumerate(draw.choices((True, False), k=count))
        ]
        order = draw.choices(range(count), k=draw.randint(1, 14))
        away, times, blocks = draw.sample(units, draw.randint(0, count)), draw.randint(1, 9), draw.randint(1, 4)
        assert fetches(away, order, blocks=blocks, times=times) == fetches(away, order * times, blocks=blocks)


# -- the screen: 25 lines of 100 columns ------------------------------------------------------------------------------


def screen_of(plan: Plan, steps: int = 300) -> str:
    text = plan.describe(steps=steps)
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert "--explain" in lines[-1]
    return " ".join(text.split())


@pytest.mark.parametrize("name", ["a100-40gb", "8xa100-80gb", "4xrtx4090-10gbe"])
def test_the_screen_of_a_named_machine(name: str) -> None:
    here, words = read_machine(name), ["--model", "gpt2-10b", "--save-every", "0"]
    config = load_config(words, drives=[drive.directory for drive in here.drives])
    plan = make_plan(config, SHAPES["gpt2-10b"], here, world=here.gpus)
    text, whole = screen_of(plan), plan.describe(full=True)
    assert "10.3 G parameters" in text
    assert " tokens/s" in text
    assert ("DOES NOT FIT" in text) != plan.fits
    assert all(f"{item.name:<26}" in whole and item.why in whole for item in plan.items if item.bytes)
    assert all(f"  rejected: {homes}: {why}\n" in f"{whole}\n" for homes, why in plan.rejected)


def test_the_command_prints_screen_or_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "--model", "gpt2", "--machine", "v100-32gb"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert main([*words, "--explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(lines)


def test_the_screen_says_bytes_seconds_and_the_run_of_its_steps() -> None:
    plan = make_plan(wish("--ram-fraction", "0.5"), SHAPES["gpt2"], timed())
    text, step = screen_of(plan), plan.forecast.step
    assert step
    assert f"a step takes {format_seconds(step)}" in text
    assert f"{format_seconds(300 * step)} for 300 steps" in text
    assert plan.homes in text
    for tier, room in plan.tiers.items():
        if room["need"]:
            assert f"{tier} {format_bytes(room['need'])} of {format_bytes(room['have'])}" in text
        largest = max((item for item in plan.items if item.tier == tier), key=lambda item: item.bytes, default=None)
        assert largest is None or f"{largest.name} {format_bytes(largest.bytes)}" in text
    untimed = make_plan(wish("--optimizer", "nvme"), SHAPES["gpt2"], machine())
    assert untimed.to_json()["seconds"] == {"data": 0.0, "forward": None, "backward": None, "update": None}
    assert "seconds a step: unknown" in screen_of(untimed)
    assert "run `offload-train bench --nvme /ssd` once" in screen_of(untimed)


def test_a_long_plan_ends_within_its_screen() -> None:
    plan = make_plan(wish(), SHAPES["gpt2"], replace(timed(), ram_bytes=GB))
    text = screen_of(replace(plan, notes=tuple(f"note {number} " + "word " * 60 for number in range(20))))
    assert "DOES NOT FIT" in text
    assert "note: note 0" in text
    assert "note 19" not in text
    plan = replace(plan, notes=("fp16",), rejected=tuple((f"home {number}", "fits " * 99) for number in range(2)))
    assert "note: fp16" in screen_of(plan)  # rejections are left out before notes


# -- a run and the one that it resumes --------------------------------------------------------------------------------

SAVED = {"seed": 0, "seq_len": 32, "tokens": 100, "training rows": 3, "text": 77, "tokenizer": "abc"}
SAVED[CONFIG] = {"rope_theta": 1e4, "head_dim": None, "of_an_older_version": 1}

DATA = "the text of --data is another, or has changed since"
VALIDATION = DATA.replace("--data", "--validation-data") + "; or only one of the two has such a text"
HEAD = "config.json's head_dim: it has none, this run 8"
NUMBERS = {"rope_theta": 5e5, "head_dim": 8, "of_a_newer_version": 2}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        (dict.fromkeys(("tokens", "training rows", "text", "tokenizer", "validation text")), []),  # not known
        ({"text": 78, "tokens": 120, "training rows": 4}, [f"{DATA}: 100 tokens, now 120"]),
        ({"text": 78}, [f"{DATA}: as many tokens (100), but not the same"]),
        ({"training rows": 4}, ["training rows: it has 3, this run 4"]),
        ({"tokenizer": "xyz", "text": 5, "tokens": 90}, ["tokenizer: it has abc, this run xyz"]),
        ({"seed": 1, "seq_len": 64}, ["seed: it has 0, this run 1", "seq_len: it has 32, this run 64"]),
        ({CONFIG: NUMBERS}, ["config.json's rope_theta: it has 10000.0, this run 500000.0", HEAD]),
        ({"validation text": 5}, [VALIDATION]),
    ],
)
def test_differences_are_described(changes: dict[str, object], lines: list[str]) -> None:
    assert differences(SAVED, SAVED | changes) == lines
    assert len(differences(SAVED | changes, SAVED)) == len(lines)


def test_the_advice_is_one_that_works() -> None:
    many = {f"w{i}": 0 for i in range(30)}
    saved = Manifest(FORMAT, 2, identity=SAVED, layout=many, files={})
    with pytest.raises(UserError) as caught:
        refuse_other_run(Path("runs/a/checkpoints/step-2"), saved, identity=SAVED | {"text": 1}, layout={})
    assert "name another --output, or move runs/a/checkpoints away" in str(caught.value)
    assert "--resume never" not in str(caught.value)
    with pytest.raises(UserError, match="and 20 more"):
        refuse_other_run(Path("c"), saved, identity=SAVED, layout=dict.fromkeys(many, 1))


@pytest.mark.slow
def test_a_plan_refuses_another_runs_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the manifest exists, since `plan` reads nothing else of a checkpoint."""
    output = tmp_path / "run"
    checkpoint = output / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    assert main(["plan", *TINY, "--output", str(output)]) == 2
    identity = SAVED | {"shuffle": True, "tokens": 5, "text": 6, "parameters": None, "initial weights": None}
    del identity["training rows"]
    manifest = {"format": FORMAT, "step": 2, "identity": identity, "layout": {}, "files": {}}
    for other, words, told in (
        ({}, ["--seed", "1"], "seed: it has 0, this run 1"),
        ({}, [], "transformer.wte.weight: it has none"),  # the weights are missing
        ({"format": 1, "layout": None}, [], f"written in format 1, this version reads {FORMAT}"),
    ):
        (checkpoint / MANIFEST).write_text(json.dumps(manifest | other))
        assert main(["plan", *TINY, "--output", str(output), *words]) == 2
        assert told in capsys.readouterr().err


def test_choices_that_change_bits_are_kept_unless_the_user_chooses() -> None:
    """On a CPU the bits do not depend on the number of checkpointed blocks, so the plan chooses it again."""

    def resumed(before: int | str, *more: str, on_gpu: bool = True) -> int | str:
        was = {"model": {"activation_checkpointing": before}}
        return _with_resumed_choices(load_config([*TINY, *more]), was, on_gpu=on_gpu).model.activation_checkpointing

    for count in (1, "on", "off"):
        assert resumed(count) == count
        assert resumed(count, on_gpu=False) == "auto"
    assert resumed("on", "model.activation_checkpointing=1") == 1
    assert resumed(1, "parallel.pipeline=2") == "auto"  # a pipeline checkpoints all blocks
    # Nothing could be offloaded with the number of the run before.
    assert resumed("off", "model.offload_activations=true") == "auto"


def test_a_run_keeps_the_checkpointed_blocks_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; unless nothing fits with them, or the user chooses."""

    def blocks(before: object, *words: str, gpu: int = 24 * GB) -> int:
        monkeypatch.setattr(planning, "machine_here", lambda *_, **__: machine(gpu=gpu))
        monkeypatch.setattr(resume, "earlier_run", lambda _: ({"model": {"activation_checkpointing": before}}, False))
        return plan_run(load_config([*TINY, *words])).plan.work.checkpointed

    assert [blocks(count) for count in (0, 1, 2)] == [0, 1, 2]
    assert blocks(1, "model.activation_checkpointing=on") == 2
    assert blocks("off", "--micro-batch", "64", gpu=GB) == 2
