"""Tests that a unit too large for the device is refused, and named with its size."""

from __future__ import annotations

import pytest
from sample_plans import GB, machine, wish

from offload_trainer.errors import UserError
from offload_trainer.model.presets import PRESETS, gpt2_shape
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.units import format_bytes

# WIDE has blocks of 12 x 8192^2 weights, 1.6 GB in bf16; WORDS has an embedding of 2 GB over small blocks.
WIDE = gpt2_shape(PRESETS["gpt2"] | {"n_embd": 8192, "n_head": 64, "n_layer": 3})
WORDS = gpt2_shape(PRESETS["gpt2"] | {"vocab_size": 10**6, "n_embd": 1024, "n_layer": 3})


def planned(shape: ModelShape, gpu: float, *words: str) -> Plan:
    return make_plan(wish("--micro-batch", "1", "--seq-len", "64", *words), shape, machine(gpu=int(gpu * GB)))


@pytest.mark.parametrize(("shape", "name"), [(WIDE, "the block transformer.h.0"), (WORDS, "transformer.wte")])
def test_a_unit_that_fits_nowhere_is_named_with_its_bytes(shape: ModelShape, name: str) -> None:
    size = sum(2 * weight.numel for weight in shape.weights if weight.unit == name.split()[-1])
    plan = planned(shape, 2)  # half of it is CUDA's own memory and the reserve
    assert not plan.fits
    told = f"{name} alone has {format_bytes(size)} of weights, a GPU has room for 1 GB, and it is fetched as a whole"
    assert told in plan.describe()
    assert plan.to_json()["too_large"] == told
    with pytest.raises(UserError, match=f"gpu needs .*; {told}"):
        plan.refuse(force=False)


def test_a_unit_that_fits_is_not_named() -> None:
    """The plan then lacks memory for something else."""
    plan = planned(WIDE, 2.7)
    assert not plan.fits
    assert plan.too_large == ""
    roomy = planned(WIDE, 24)
    assert roomy.fits
    assert roomy.too_large == ""
