"""Tests of dividing blocks into modules that are fetched separately: how a block is divided, and when a plan chooses
it; and that a unit too large for the device is refused, and named with its size.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from sample_plans import GB, SHAPES, cluster, machine, wish

from offload_trainer.errors import UserError
from offload_trainer.model.presets import PRESETS, gpt2_shape
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import Unit, divided, is_divided, undivided, units_of
from offload_trainer.run.commands.plan import compare_modes, plan_elsewhere
from offload_trainer.settings import load_config
from offload_trainer.units import format_bytes

WIDE = 2048


def block(number: int, **modules: tuple[tuple[int, ...], ...]) -> list[Weight]:
    """Return a block's weights, by module name."""
    name = f"layers.{number}"
    return [
        Weight(f"{name}.{module.replace('__', '.')}.w{place}", shape, unit=name, block=True)
        for module, shapes in modules.items()
        for place, shape in enumerate(shapes)
    ]


def shape_of(*blocks: list[Weight], divisible: tuple[str, ...], **more: tuple[str, ...]) -> ModelShape:
    weights = [Weight("embed.weight", (999, WIDE), unit="embed"), *(weight for one in blocks for weight in one)]
    return ModelShape(
        tuple(weights), layers=len(blocks), hidden=WIDE, vocabulary=999, context=64, divisible=divisible, **more
    )


def names(shape: ModelShape) -> dict[str, list[str]]:
    """Return each unit's weight names."""
    return {unit.name: [place.weight.name for place in unit.places] for unit in units_of(shape)}


SQUARE, TALL = (WIDE, WIDE), (4 * WIDE, WIDE)
LLAMA = {
    "attn__q": (SQUARE,), "attn__k": ((256, WIDE),), "attn__o": (SQUARE,), "mlp__up": (TALL,), "mlp__down": (TALL,),
    "norm": ((WIDE,),),
}  # fmt: skip
BOTH = ("layers.0", "layers.0.attn", "layers.0.mlp")


def test_a_part_is_at_most_as_large_as_the_largest_that_cannot_be_divided() -> None:
    shape = shape_of(block(0, **LLAMA), divisible=BOTH)
    assert names(divided(shape)) == {
        "embed": ["embed.weight"],
        "layers.0.attn": [f"layers.0.attn.{one}.w0" for one in "qko"],
        "layers.0.mlp.up": ["layers.0.mlp.up.w0"],
        "layers.0.mlp.down": ["layers.0.mlp.down.w0"],
        "layers.0": ["layers.0.norm.w0"],
    }
    kinds = {unit.name: (unit.block, unit.is_part, unit.small, unit.within) for unit in units_of(divided(shape))}
    assert kinds["layers.0.attn"] == kinds["layers.0.mlp.up"] == (True, True, False, "layers.0")
    assert kinds["layers.0"] == (False, False, True, "layers.0")  # it stays on the device
    assert undivided(divided(shape)) == replace(shape, divisible=())


def test_modules_that_no_probe_showed_divisible_are_whole() -> None:
    one = block(0, **LLAMA)
    mlp = ["layers.0.mlp.up.w0", "layers.0.mlp.down.w0"]
    assert names(divided(shape_of(one, divisible=BOTH[:2])))["layers.0.mlp"] == mlp
    assert names(divided(shape_of(one, divisible=BOTH, tiles=("layers.0.mlp",))))["layers.0.mlp"] == mlp
    # Modules inside cannot be fetched separately if the block itself cannot be divided.
    for divisible in ((), BOTH[1:]):
        shape = shape_of(one, divisible=divisible)
        assert divided(shape) is shape
        assert not is_divided(shape)


def test_experts_in_one_tensor_are_one_part_and_blocks_that_are_smaller_stay_whole() -> None:
    experts = block(0, attn__q=(SQUARE,) * 4, mlp__router=((2, WIDE),), mlp__experts=((2, *TALL), (2, *SQUARE)))
    dense = block(1, attn__q=(SQUARE,), mlp__up=(TALL,))
    divisible = tuple(f"layers.{number}{part}" for number in (0, 1) for part in ("", ".mlp"))
    units = {unit.name: unit for unit in units_of(divided(shape_of(experts, dense, divisible=divisible)))}
    assert set(units) == {"embed", "layers.0", "layers.0.attn", "layers.0.mlp.experts", "layers.1"}
    assert units["layers.1"].block
    assert not units["layers.1"].is_part
    assert [place.weight.name for place in units["layers.0"].places] == ["layers.0.mlp.router.w0"]


def test_many_small_modules_are_fetched_if_they_are_large_together() -> None:
    """A list of many small experts is one part if it is smaller than the largest matrix, or else many parts."""
    many = {f"mlp__experts__{number}": ((64, WIDE),) for number in range(32)}
    shape = shape_of(block(0, attn__q=(TALL,), **many), divisible=("layers.0", "layers.0.mlp", "layers.0.mlp.experts"))
    units: dict[str, Unit] = {unit.name: unit for unit in units_of(divided(shape))}
    assert units["layers.0.mlp"].is_part  # all experts together are smaller than the matrix
    larger = shape_of(block(0, attn__q=((WIDE, 1024),), **many), divisible=shape.divisible)
    units = {unit.name: unit for unit in units_of(divided(larger))}
    assert units["layers.0"].elements <= 1 << 20
    assert sum(unit.is_part for unit in units.values()) > 24


# -- when a plan divides blocks ----------------------------------------------------------------------------------------

MODEL = ["model.overrides.n_embd=2048", "model.overrides.n_head=16", "model.overrides.n_layer=3"]
ALWAYS = ["--model", "gpt2", *MODEL, "model.overrides.vocab_size=1000", "--seq-len", "64", "--micro-batch", "1"]
AWAY = ["--params", "nvme", "--nvme", "/ssd", "--save-every", "0", "placement.gpu_fraction=0", "model.mlp_chunk=off"]
RUNGS = [("block", 3), ("block", 2), ("block", 1), ("module", 3), ("module", 2), ("module", 1)]
ROOMY = 40 * GB  # large enough that the reserve has its minimum, as on smaller GPUs


def planned(gpu: float, *words: str) -> Plan:
    return plan_elsewhere(load_config([*ALWAYS, *AWAY, *words]), machine(gpu=int(gpu)))


def way(plan: Plan) -> tuple[str, int]:
    parts = any(
        note.startswith("tiered.fetch_granularity=module: weights of blocks are fetched in parts")
        for note in plan.notes
    )
    return "module" if parts else "block", plan.sizes.unit_buffers


@pytest.mark.slow
def test_each_fallback_is_used_if_the_one_before_does_not_fit() -> None:
    """Fewer buffers are tried before division, since they move nothing twice."""
    needs = []
    for fetch, count in RUNGS:
        plan = planned(ROOMY, f"tiered.fetch_granularity={fetch}", f"tiered.weight_buffers={count}")
        assert way(plan) == (fetch, count)
        needs.append(plan.tiers["gpu"]["need"])
    assert needs[:3] == sorted(needs[:3], reverse=True)
    assert needs[-1] == min(needs)
    for rung, need in zip(RUNGS, needs, strict=True):
        first = next(one for one, other in zip(RUNGS, needs, strict=True) if other <= need)
        plan = planned(need)
        assert plan.fits
        assert way(plan) == first, rung
    refused = planned(needs[-1] - 10**6)
    assert not refused.fits
    assert way(refused) == ("block", 3)  # the configured way
    for configured in ("tiered.fetch_granularity=block", "tiered.weight_buffers=3"):
        assert not planned(needs[-1], configured).fits


@pytest.mark.slow
def test_nodes_and_modes_use_the_same_fallbacks() -> None:
    """The comparison tables choose what a run would, for two GPUs on one machine or on two."""
    for gpus, nodes in ((2, 1), (1, 2)):
        words, least = [*ALWAYS, *AWAY, "--gpus", str(gpus)], ["tiered.fetch_granularity=module"]
        smallest = plan_elsewhere(
            load_config([*words, *least, "tiered.weight_buffers=1"]), machine(gpu=ROOMY), nodes=nodes
        )
        need = smallest.tiers["gpu"]["need"] // gpus
        config, here = load_config(words), replace(machine(gpu=need), gpus=gpus)
        plan = plan_elsewhere(config, here, nodes=nodes)
        assert plan.fits
        assert way(plan) == ("module", 1)
        rows = compare_modes(config, here, nodes)[0]["modes"]
        assert [row["fits"] for row in rows if row["name"] == "tiered, 2 ranks"] == [True]
        assert not plan_elsewhere(config, replace(here, gpu_bytes=need - 10**6), nodes=nodes).fits


def test_a_preset_uses_fewer_buffers_too() -> None:
    def planned(gpu: int, *words: str) -> Plan:
        return plan_elsewhere(load_config(["--model", "gpt2-xl", *AWAY, *words]), machine(gpu=gpu))

    whole, fewer = planned(ROOMY), planned(ROOMY, "tiered.weight_buffers=1")
    found = planned(whole.tiers["gpu"]["need"] - 1)
    assert found.fits
    assert way(found) == ("block", 2)
    assert found.longest_row == planned(whole.tiers["gpu"]["need"] - 1, "tiered.weight_buffers=2").longest_row
    assert way(planned(fewer.tiers["gpu"]["need"])) == ("block", 1)


def test_a_block_too_large_by_itself_is_named_by_its_part() -> None:
    assert "the block transformer.h.0 alone has" in planned(560 * 10**6, "tiered.fetch_granularity=block").too_large
    told = planned(510 * 10**6)
    assert not told.fits
    assert told.too_large.startswith("transformer.h.0.attn alone has 33.6 MB of weights")


def test_one_buffer_prefetches_nothing() -> None:
    """A single buffer allows no overlap, so transfers add to the computing time."""
    here, seconds = cluster(gpu=ROOMY, copies=(1e9, 1e9, 1e9), matmul=1e12), {}
    for count in (2, 1):
        words = [*AWAY, "--params", "cpu", "--ram-fraction", "1", f"tiered.weight_buffers={count}"]
        plan = make_plan(load_config(words), SHAPES["gpt2"], here)
        seconds[count] = {bound.kind: bound.seconds for bound in plan.forecast.bounds if bound.phase == "forward"}
    assert "turns" not in seconds[2]
    assert seconds[1]["turns"] == pytest.approx(seconds[1]["compute"] + seconds[1]["device"])


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}')
    words = ["--model", str(tmp_path), "--scratch", "tiered.fetch_granularity=module", "--nvme", "/ssd"]
    with pytest.raises(
        UserError,
        match=r"tiered\.fetch_granularity=module: a trial with a tiny model of this architecture found no block",
    ):
        plan_elsewhere(load_config(words), machine(gpu=ROOMY))


# -- a unit too large for the device is named with its size ------------------------------------------------------------

# BLOCKS has blocks of 12 x 8192^2 weights, 1.6 GB in bf16; WORDS has an embedding of 2 GB over small blocks.
BLOCKS = gpt2_shape(PRESETS["gpt2"] | {"n_embd": 8192, "n_head": 64, "n_layer": 3})
WORDS = gpt2_shape(PRESETS["gpt2"] | {"vocab_size": 10**6, "n_embd": 1024, "n_layer": 3})


def of_shape(shape: ModelShape, gpu: float, *words: str) -> Plan:
    return make_plan(wish("--micro-batch", "1", "--seq-len", "64", *words), shape, machine(gpu=int(gpu * GB)))


@pytest.mark.parametrize(("shape", "name"), [(BLOCKS, "the block transformer.h.0"), (WORDS, "transformer.wte")])
def test_a_unit_that_fits_nowhere_is_named_with_its_bytes(shape: ModelShape, name: str) -> None:
    size = sum(2 * weight.numel for weight in shape.weights if weight.unit == name.split()[-1])
    plan = of_shape(shape, 2)  # half of it is CUDA's own memory and the reserve
    assert not plan.fits
    told = f"{name} alone has {format_bytes(size)} of weights, a GPU has room for 1 GB, and it is fetched as a whole"
    assert told in plan.describe(full=True)
    assert plan.to_json()["too_large"] == told
    with pytest.raises(UserError, match=f"gpu needs .*; {told}"):
        plan.refuse(force=False)
    for gpu, fits in ((2.7, False), (24, True)):  # with 2.7 GB, BLOCKS lacks memory for something else
        plan = of_shape(BLOCKS, gpu)
        assert (plan.fits, plan.too_large) == (fits, "")
