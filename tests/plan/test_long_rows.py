"""Tests of the longest row that fits, in what `plan` reports."""

import json

from sample_plans import GB, machine, wish

from offload_trainer.config import ModelSection
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.planner import longest_row, make_plan
from offload_trainer.run.commands.plan import plan_elsewhere

WIDE = {"n_positions": 65536, "n_layer": 2, "n_embd": 256, "n_inner": 16384, "n_head": 4}


def test_the_longest_row_fits_and_the_next_does_not() -> None:
    """The plans of both lengths confirm it. The model's MLPs are 64 times as wide as its hidden states."""
    shape, words = resolve_model(ModelSection(overrides=WIDE), seed=0).shape, ("--micro-batch", "1")
    for gpu in (2.5, 4, 24):
        here = machine(gpu=int(gpu * GB))
        found = longest_row(wish(*words), shape, here, world=1, nodes=1)
        assert 0 < found <= 65536
        assert make_plan(wish(*words, "--seq-len", str(found)), shape, here).fits
        if found < 65536:
            assert found % 512 == 0  # a 128th of the context
            assert not make_plan(wish(*words, "--seq-len", str(found + 512)), shape, here).fits
        wide = [f"model.overrides.{key}={value}" for key, value in WIDE.items()]
        assert plan_elsewhere(wish(*wide, *words, "--seq-len", "512"), here).longest_row == found


def test_the_plan_names_the_longest_row() -> None:
    plan = plan_elsewhere(wish("--model", "gpt2"), machine(gpu=24 * GB))
    assert plan.longest_row == 1024
    assert "rows of up to 1024 tokens fit" in plan.describe(full=True)
    assert json.loads(json.dumps(plan.to_json()))["longest_row"] == 1024
