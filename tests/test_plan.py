"""Plans: pure arithmetic with properties that must hold, and DeepSpeed's configuration held by golden files.

After a deliberate change: `UPDATE_GOLDEN=1 pytest tests/test_plan.py`, and read the difference.
"""

from __future__ import annotations

import dataclasses
import json
import os
from itertools import product
from pathlib import Path

import pytest

from offload_trainer.config import TrainConfig
from offload_trainer.engine.ds_config import deepspeed_config
from offload_trainer.errors import UserError
from offload_trainer.machine.profile import DriveFacts, MachineProfile
from offload_trainer.model.presets import PRESETS, gpt2_shape
from offload_trainer.plan.plan import make_plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.zero import Placement, zero_sizes
from offload_trainer.settings import load_config

GOLDEN = Path(__file__).parent / "golden"
GB = 10**9


def machine(*, gpu: int = 0, ram: int = 64 * GB, drive: int = 500 * GB) -> MachineProfile:
    return MachineProfile(
        gpu="V100" if gpu else None,
        gpu_bytes=gpu,
        ram_bytes=ram,
        cores=8,
        drives=(DriveFacts("/ssd", drive, "ext4"),),
        output=DriveFacts("/out", 1000 * GB, "ext4"),
    )


def wish(*words: str) -> TrainConfig:
    return load_config(["--nvme", "/ssd", "--save-every", "0", *words])


SHAPES = {name: gpt2_shape(preset) for name, preset in PRESETS.items()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("homes", list(product(("gpu", "cpu", "nvme"), repeat=2)), ids="/".join)
def test_items_sum_to_the_tiers(name: str, homes: tuple[str, str]) -> None:
    plan = make_plan(wish("--params", homes[0], "--optimizer", homes[1]), SHAPES[name], machine(gpu=32 * GB))
    assert (plan.placement.params, plan.placement.optimizer) == homes
    for tier, room in plan.tiers.items():
        assert room["need"] == sum(item.bytes for item in plan.items if item.tier == tier)
    assert {item.tier for item in plan.items} <= set(plan.tiers)


def test_bytes_never_fall_when_layers_are_added() -> None:
    for homes in product(("gpu", "cpu", "nvme"), repeat=2):
        before = 0
        for layers in range(1, 40, 3):
            shape = gpt2_shape(PRESETS["gpt2-medium"] | {"n_layer": layers})
            config = wish("--params", homes[0], "--optimizer", homes[1], "model.checkpointing=on")
            total = sum(item.bytes for item in make_plan(config, shape, machine(gpu=32 * GB)).items)
            assert total >= before, (homes, layers)
            before = total


def test_a_plan_that_just_fits_is_refused_with_one_byte_less() -> None:
    config, shape = wish("--params", "cpu", "--optimizer", "cpu"), SHAPES["gpt2"]
    need = make_plan(config, shape, machine()).tiers["ram"]["need"]
    assert make_plan(config, shape, machine(ram=need)).fits
    assert not make_plan(config, shape, machine(ram=need - 1)).fits


def test_auto_takes_the_first_that_fits_and_says_why_not_the_others() -> None:
    shape = SHAPES["gpt2-xl"]
    chosen = {gpu: make_plan(wish(), shape, machine(gpu=gpu * GB)) for gpu in (80, 16)}
    assert str(chosen[80].placement) == "params gpu, optimizer gpu"
    assert str(chosen[16].placement) == "params gpu, optimizer cpu"
    assert [name for name, _ in chosen[16].rejected] == ["params gpu, optimizer gpu"]
    assert "gpu needs" in chosen[16].rejected[0][1]
    assert make_plan(wish(), shape, machine(gpu=16 * GB)) == chosen[16]
    tight = make_plan(wish(), shape, machine(gpu=16 * GB, ram=16 * GB))
    assert tight.placement.optimizer == "nvme"
    none = make_plan(wish(), SHAPES["gpt2-10b"], machine(gpu=1 * GB, ram=2 * GB))
    assert not none.fits
    assert none.shortfalls()


def test_without_a_gpu_its_tier_stays_empty() -> None:
    plan = make_plan(wish(), SHAPES["gpt2"], machine())
    assert plan.tiers["gpu"] == {"need": 0, "have": 0}
    assert plan.placement == Placement("gpu", "cpu")


def test_rows_longer_than_the_context_are_refused() -> None:
    with pytest.raises(UserError, match="context is 1024 tokens"):
        make_plan(wish("--seq-len", "2048"), SHAPES["gpt2"], machine())


def test_sizes_follow_the_largest_weight() -> None:
    """An embedding larger than all else: buffers hold it, sub-groups end with it, and count it once."""
    weights = [Weight("wte", (100_000, 4096))] + [Weight(f"w{i}", (4096, 512)) for i in range(64)]
    shape = ModelShape(tuple(weights), layers=16, hidden=4096, vocabulary=100_000, context=1024)
    sizes = zero_sizes(shape, TrainConfig().deepspeed, Placement("nvme", "nvme"), world=1, item_bytes=2)
    assert sizes.weight_buffer_elements == 409_600_000
    assert sizes.largest_sub_group >= 409_600_000
    assert sizes.weight_buffers >= 65
    assert sizes.prefetch_bucket == 0
    halved = zero_sizes(shape, TrainConfig().deepspeed, Placement("nvme", "nvme"), world=2, item_bytes=2)
    assert halved.weight_buffer_elements == 204_800_000


def test_largest_sub_group_is_deepspeeds() -> None:
    """Against a plain re-enactment: weights are added until the size is reached."""
    shape = SHAPES["gpt2-medium"]
    sizes = zero_sizes(shape, TrainConfig().deepspeed, Placement("cpu", "nvme"), world=1, item_bytes=2)
    groups, held = [], 0
    for weight in [w for w in shape.weights if len(w.shape) > 1]:
        held += weight.numel
        if held >= sizes.sub_group:
            groups.append(held)
            held = 0
    assert sizes.largest_sub_group == max([*groups, held])


CASES = {
    "zero2-cpu-bf16": (Placement("gpu", "cpu"), [], "cpu"),
    "zero2-gpu-fp16": (Placement("gpu", "gpu"), ["--dtype", "fp16"], "cuda"),
    "zero3-cpu-bf16-accumulate": (Placement("cpu", "cpu"), ["--accumulate", "4"], "cuda"),
    "zero3-nvme-optimizer": (Placement("gpu", "nvme"), [], "cuda"),
    "zero3-nvme": (Placement("nvme", "nvme"), ["--dtype", "fp32"], "cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_configuration_is_the_golden_one(name: str) -> None:
    placement, words, accelerator = CASES[name]
    config, shape = wish(*words), SHAPES["gpt2-medium"]
    sizes = zero_sizes(shape, config.deepspeed, placement, world=2, item_bytes=2)
    swap = "/ssd/offload-trainer/run-x" if "nvme" in dataclasses.astuple(placement) else None
    given = deepspeed_config(config, placement, sizes, world=2, accelerator=accelerator, swap_directory=swap)
    path = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(given, indent=1) + "\n")
    assert json.loads(path.read_text()) == given
