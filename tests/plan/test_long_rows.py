"""Tests of the longest row that fits, in what `plan` reports."""

import json
from functools import cache

import pytest
from sample_plans import GB, machine, wish

from offload_trainer.config import ModelSection
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import longest_row, make_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.commands.plan import plan_elsewhere

WIDE = {"n_positions": 65536, "n_layer": 2, "n_embd": 256, "n_inner": 16384, "n_head": 4}


@cache
def wide() -> ModelShape:
    """Return a model whose MLPs are 64 times as wide as its hidden states."""
    return resolve_model(ModelSection(overrides=WIDE), seed=0).shape


@pytest.mark.parametrize("gpu", [2.5, 4, 24])
def test_the_longest_row_fits_and_the_next_does_not(gpu: float) -> None:
    """The plans of both lengths confirm it."""
    here = machine(gpu=int(gpu * GB))
    found = longest_row(wish("--micro-batch", "1"), wide(), here, world=1, nodes=1)
    assert 0 < found <= 65536
    assert make_plan(wish("--micro-batch", "1", "--seq-len", str(found)), wide(), here).fits
    if found < 65536:
        assert found % 512 == 0  # a 128th of the context
        assert not make_plan(wish("--micro-batch", "1", "--seq-len", str(found + 512)), wide(), here).fits


def test_the_plan_names_the_longest_row() -> None:
    """The plan states it for a described machine, without torch for a preset, and in the command's JSON."""
    plan = plan_elsewhere(wish("--model", "gpt2"), machine(gpu=24 * GB))
    assert plan.longest_row == 1024
    assert "rows of up to 1024 tokens fit" in plan.describe(full=True)
    assert json.loads(json.dumps(plan.to_json()))["longest_row"] == 1024
    words = [f"model.overrides.{key}={value}" for key, value in WIDE.items()]
    small = plan_elsewhere(wish(*words, "--micro-batch", "1", "--seq-len", "512"), machine(gpu=4 * GB))
    assert small.longest_row == longest_row(wish("--micro-batch", "1"), wide(), machine(gpu=4 * GB), world=1, nodes=1)
