"""Tests of the number of blocks that a plan checkpoints, its weight buffers, and units too large for the device."""

from dataclasses import replace

import pytest
from sample_plans import GB, SHAPES, cluster, least_ram, machine, shape_of, timed, wish, with_products

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes
from offload_trainer.config import TrainConfig
from offload_trainer.plan.machine import MachineProfile, Rates, read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import any_placement_fits, combination_mistakes, make_plan, resolved
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.commands.plan import compare_modes, plan_elsewhere
from offload_trainer.settings import load_config

pytestmark = pytest.mark.usefixtures("counted_once")

SHAPE = SHAPES["gpt2-10b"]
BATCH = ("--micro-batch", "4", "--accumulate", "8")


def with_count(count: int | str, machine: MachineProfile) -> Plan:
    words = (*BATCH, f"model.activation_checkpointing={count}")
    return make_plan(wish(*words), SHAPE, machine)


@pytest.mark.slow
def test_auto_chooses_the_number_with_the_shortest_step() -> None:
    """On 40 GB, fewer recomputed blocks gain until their activations leave too little room for the weights."""
    here = with_products(read_machine("a100-40gb"), 156e12)
    plan = make_plan(wish(*BATCH), SHAPE, here)
    config = resolved(wish(*BATCH), plan)
    assert plan.fits
    assert 0 < plan.work.checkpointed < 50
    assert config.model.activation_checkpointing == plan.work.checkpointed
    everyone = {count: with_count(count, here) for count in range(0, 51, 5)}
    best = min(one.forecast.step for one in everyone.values() if one.fits)
    assert plan.forecast.step <= 1.02 * best
    assert plan.forecast.step < 0.95 * with_count("on", here).forecast.step
    again = make_plan(config, SHAPE, here)  # a settled configuration has the same plan
    assert (again.items, again.forecast) == (plan.items, plan.forecast)
    assert f"gradient checkpointing of the first {plan.work.checkpointed} of 50 blocks" in plan.describe(full=True)
    assert plan.to_json()["chosen"]["checkpointed_blocks"] == plan.work.checkpointed


def test_each_block_that_keeps_everything_takes_its_bytes_from_the_state_on_the_device() -> None:
    all_, some = plans = [with_count(count, read_machine("h200")) for count in (50, 30)]
    assert all_.sizes.gpu_fraction > some.sizes.gpu_fraction + 0.03
    assert all_.forecast.seconds["backward"] >= some.forecast.seconds["backward"]
    for plan in plans:
        assert plan.tiers["gpu"]["have"] >= plan.tiers["gpu"]["need"] > 0.99 * plan.tiers["gpu"]["have"]


def test_without_rates_auto_checkpoints_all_blocks_of_large_models_and_none_of_small_ones() -> None:
    untimed = replace(read_machine("h200"), rates=Rates())
    for name, setting in (("gpt2-10b", "on"), ("gpt2", "on"), ("gpt2-mini", "off")):
        config = resolved(wish(*BATCH), make_plan(wish(*BATCH), SHAPES[name], untimed))
        assert config.model.activation_checkpointing == setting


def test_a_cpu_leaves_out_recomputation_that_a_drive_hides() -> None:
    """Its seconds are not free there, since the update shares the cores. State that it would displace comes first."""
    shape, here = SHAPES["gpt2-medium"], timed()

    def planned(*words: str, on: MachineProfile = here) -> Plan:
        return make_plan(wish("--params", "gpu", "--micro-batch", "2", "tiered.overlap=backward", *words), shape, on)

    auto, all_ = planned("--ram-fraction", "0"), planned("--ram-fraction", "0", "model.activation_checkpointing=on")
    # The forecast alone would not have decided.
    assert 0.95 * all_.forecast.step < auto.forecast.step <= all_.forecast.step
    assert auto.work.checkpointed < all_.work.checkpointed == shape.layers
    saved = [one.forecast.seconds["forward"] + one.forecast.seconds["backward"] for one in (all_, auto)]  # type: ignore[operator]
    assert saved[0] - saved[1] >= 0.05 * all_.forecast.step
    small = replace(here, ram_bytes=5 * GB)
    plans = planned(on=small), planned("model.activation_checkpointing=on", on=small)
    assert plans[0].tiers["/ssd"]["need"] == plans[1].tiers["/ssd"]["need"]


def test_a_small_model_that_does_not_fit_checkpoints_as_few_blocks_as_fit() -> None:
    shape, words = SHAPES["gpt2-mini"], ("--micro-batch", "64")
    counts = [f"model.activation_checkpointing={count}" for count in range(shape.layers + 1)]
    needs = [least_ram(make_plan(wish(*words, count), shape, machine())) for count in counts]
    assert needs == sorted(needs, reverse=True)
    for count in (1, shape.layers // 2, shape.layers - 1):
        assert needs[count - 1] > needs[count] + 10**6
        here = machine(ram=needs[count] + 10**6)
        plan = make_plan(wish(*words), shape, here)
        assert (plan.fits, plan.work.checkpointed) == (True, count)
        assert any_placement_fits(wish(*words), shape, here, world=1, nodes=1)


def test_offloaded_inputs_are_those_of_the_checkpointed_blocks() -> None:
    words = ("model.offload_activations=true", "model.activation_checkpointing=20")
    plan = make_plan(wish(*BATCH, *words), SHAPE, machine(gpu=300 * GB, ram=300 * GB))
    kept = next(item.bytes for item in plan.items if (item.tier, item.name) == ("ram", "block inputs"))
    assert kept == 20 * 2 * 4 * 1024 * SHAPE.hidden
    copied = sum(moved.written for moved in plan.traffic if moved.phase == "forward" and moved.place == "device")
    assert copied == 8 * kept


def test_numbers_that_a_model_or_an_engine_does_not_have_are_refused() -> None:
    for shape, count, why in (
        (SHAPE, 51, "the model has 50 blocks; use on for all"),
        (replace(SHAPE, can_checkpoint_some=False), 20, "checkpoints all of its blocks or none"),
    ):
        with pytest.raises(UserError, match=why):
            make_plan(wish(f"model.activation_checkpointing={count}"), shape, machine())
    assert wish("model.activation_checkpointing=0").model.activation_checkpointing == "off"
    stock = TrainConfig.model_validate({"placement": {"engine": "deepspeed"}, "model": {"activation_checkpointing": 3}})
    assert any("model.activation_checkpointing=3 belongs to" in mistake for mistake in combination_mistakes(stock))


# -- weight buffers ----------------------------------------------------------------------------------------------------


PRESET = ["--model", "gpt2-xl"]
WIDE = ["model.overrides.n_embd=2048", "model.overrides.n_head=16", "model.overrides.n_layer=3"]
BLOCKS_ARE_LARGEST = ["--model", "gpt2", *WIDE, "model.overrides.vocab_size=1000", "--seq-len", "64"]
AWAY = ["--params", "nvme", "--nvme", "/ssd", "--save-every", "0", "placement.gpu_fraction=0"]
ROOMY = 40 * GB  # large enough that the reserve has its minimum, as on smaller GPUs


def planned(gpu: float, *words: str) -> Plan:
    return plan_elsewhere(load_config(["--micro-batch", "1", *AWAY, *words]), machine(gpu=int(gpu)))


def test_fewer_buffers_are_taken_where_more_do_not_fit() -> None:
    needs = dict[int, int]()
    for count in (3, 2, 1):
        plan = planned(ROOMY, *PRESET, f"tiered.weight_buffers={count}")
        assert plan.sizes.unit_buffers == count
        needs[count] = plan.tiers["gpu"]["need"]
    assert needs[3] > needs[2] > needs[1]
    for count, need in needs.items():
        plan = planned(need, *PRESET)
        assert (plan.fits, plan.sizes.unit_buffers) == (True, count)
    refused = planned(needs[1] - 10**6, *PRESET)
    assert (refused.fits, refused.sizes.unit_buffers) == (False, 3)  # the default
    assert not planned(needs[1], *PRESET, "tiered.weight_buffers=3").fits


@pytest.mark.slow
def test_nodes_and_modes_use_fewer_buffers_too() -> None:
    for gpus, nodes in ((2, 1), (1, 2)):
        words = [*BLOCKS_ARE_LARGEST, *AWAY, "--micro-batch", "1", "--gpus", str(gpus)]
        smallest = plan_elsewhere(load_config([*words, "tiered.weight_buffers=1"]), machine(gpu=ROOMY), nodes=nodes)
        need = smallest.tiers["gpu"]["need"] // gpus
        config, here = load_config(words), replace(machine(gpu=need), gpus=gpus)
        plan = plan_elsewhere(config, here, nodes=nodes)
        assert (plan.fits, plan.sizes.unit_buffers) == (True, 1)
        rows = compare_modes(config, here, nodes)[0]["modes"]
        assert [row["fits"] for row in rows if row["name"] == "tiered, 2 ranks"] == [True]
        assert not plan_elsewhere(config, replace(here, gpu_bytes=need - 10**6), nodes=nodes).fits


def test_one_buffer_prefetches_nothing() -> None:
    """A single buffer allows no overlap, so transfers add to the computing time."""
    here, seconds = cluster(gpu=ROOMY, copies=(1e9, 1e9, 1e9), matmul=1e12), {}
    for count in (2, 1):
        words = [*AWAY, "--params", "cpu", "--ram-fraction", "1", f"tiered.weight_buffers={count}"]
        plan = make_plan(load_config(words), SHAPES["gpt2"], here)
        seconds[count] = {bound.kind: bound.seconds for bound in plan.forecast.bounds if bound.phase == "forward"}
    assert "turns" not in seconds[2]
    assert seconds[1]["turns"] == pytest.approx(seconds[1]["compute"] + seconds[1]["device"])


def test_a_unit_that_fits_nowhere_is_named_with_its_bytes() -> None:
    def plan_of(gpu: float, shape: ModelShape) -> Plan:
        return make_plan(wish("--micro-batch", "1", "--seq-len", "64"), shape, machine(gpu=int(gpu * GB)))

    blocks = shape_of("gpt2", n_embd=8192, n_head=64, n_layer=3)  # a block has 12 x 8192^2 weights, 1.6 GB in bf16
    words = shape_of("gpt2", n_embd=1024, n_head=16, n_layer=3, vocab_size=10**6)  # an embedding of 2 GB
    for shape, name in ((blocks, "the block transformer.h.0"), (words, "transformer.wte")):
        size = sum(2 * weight.numel for weight in shape.weights if weight.unit == name.split()[-1])
        plan = plan_of(2, shape)
        assert not plan.fits
        told = (
            f"{name} alone has {format_bytes(size)} of weights, a GPU has room for 1 GB, and it is fetched as a whole"
        )
        assert told in plan.describe(full=True)
        assert plan.to_json()["too_large"] == told
        with pytest.raises(UserError, match=f"gpu needs .*; {told}"):
            plan.refuse(force=False)
        assert (plan_of(24, shape).fits, plan_of(24, shape).too_large) == (True, "")
    assert (plan_of(2.7, blocks).fits, plan_of(2.7, blocks).too_large) == (False, "")  # something else is too large
    # With fewer buffers the bytes that are lacking are the fewest.
    plan = planned(510 * 10**6, *BLOCKS_ARE_LARGEST)
    assert (plan.fits, plan.sizes.unit_buffers) == (False, 1)
    assert plan.too_large.startswith("the block transformer.h.0 alone has 101 MB of weights")
