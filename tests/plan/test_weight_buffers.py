"""Tests of the number of weight buffers that a plan chooses, and of units too large for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_plans import GB, SHAPES, cluster, machine, shape_of, wish

from offload_trainer.errors import UserError
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.commands.plan import compare_modes, plan_elsewhere
from offload_trainer.settings import load_config
from offload_trainer.units import format_bytes

pytestmark = pytest.mark.usefixtures("counted_once")

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
    """The comparison tables choose what a run would, for two GPUs on one machine or on two."""
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

    blocks = shape_of("gpt2", n_embd=8192, n_head=64, n_layer=3)  # of 12 x 8192^2 weights, 1.6 GB in bf16
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
